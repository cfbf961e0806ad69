"""How much memory is there, and the refusal of an operation that needs more."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import (
    ComputeLogprobs,
    Forward,
    ForwardBackward,
    Operation,
    OptimStep,
    Sample,
    SaveWeights,
)
from gristmill_worker import memory
from gristmill_worker.cpu_quota import CGROUP_ROOT
from gristmill_worker.memory import Batch, Draw
from gristmill_worker.sizes import Sizes
from gristmill_worker.targets import width_of

log = logging.getLogger(__name__)

NEVER_REFUSED_BYTES: Final = 64 * 2**20
"""Less than this is not looked at: it is within what the estimate of a process's memory is wrong by."""
MEMINFO: Final = Path("/proc/meminfo")
KV_BYTES_MAX: Final = 2**31
"""As the worker's settings have it by default."""
KEPT_SHARE: Final = 2
"""What a pass keeps is at most one part in so many of what is free, where layers may run again."""


class Room:
    """Of one worker. `available` tells how many bytes could be had now; None = nobody knows."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        budget: int,
        packed: bool,
        world: int,
        available: Callable[[], int | None],
        kv_bytes_max: int = KV_BYTES_MAX,
        recomputes: bool = False,
        host: Callable[[], int | None] | None = None,
    ) -> None:
        self.sizes = sizes
        self.budget = budget
        self.packed = packed
        self.world = world
        self.available = available
        self.kv_bytes_max = kv_bytes_max
        self.recomputes = recomputes
        """Whether layers run again in the backward pass where memory is short."""
        self.host = host or available
        """As `available`, of the machine's own memory."""

    def check(self, op: Operation, rank: int) -> None:
        """`rank` of the session's adapter. Raises InvalidRequestError with the numbers and what would help."""
        if isinstance(op, Forward | ForwardBackward):
            batch = self._batch(op, rank)
            needed = memory.batch_bytes(self.sizes, batch)
            if self.recomputes and needed > NEVER_REFUSED_BYTES:
                free = self.available()
                batch = replace(batch, kept_bytes_max=None if free is None else free // KEPT_SHARE)
                needed = memory.batch_bytes(self.sizes, batch)
            self._compare(needed, lambda free: _shorten(self.sizes, batch, free))
        elif isinstance(op, OptimStep):
            needed = memory.step_bytes(self.sizes, rank)
            self._compare(needed, lambda _: "close sessions of this worker, or use a lower rank")
        elif isinstance(op, SaveWeights) and op.merge:
            needed = memory.merge_bytes(self.sizes, rank)
            self._compare(needed, lambda _: "save the adapter alone, without merge", self.host)
        elif isinstance(op, Sample | ComputeLogprobs):
            draw = self._draw(op, rank)
            needed = memory.draw_bytes(self.sizes, draw)
            self._compare(needed, lambda _: _draw_less(draw))

    def holds_together(self, prompts: Sequence[int], ranks: Sequence[int]) -> bool:
        """Whether whole prompts of these lengths may run in one pass, for adapters of these ranks.

        Nothing is refused where they may not: they run one after another.
        """
        needed = memory.joined_bytes(self.sizes, prompts, ranks)
        free = None if needed <= NEVER_REFUSED_BYTES else self.available()
        return free is None or needed <= free

    def _batch(self, op: Forward | ForwardBackward, rank: int) -> Batch:
        return Batch(
            lengths=tuple(datum.tokens.size for datum in op.datums),
            targets=max(map(width_of, op.datums), default=1),
            budget=self.budget,
            packed=self.packed,
            world=self.world,
            rank=rank,
            trains=isinstance(op, ForwardBackward),
        )

    def _draw(self, op: Sample | ComputeLogprobs, rank: int) -> Draw:
        # Of messages the tokens are not known yet; characters are no fewer.
        given = op.prompt
        characters = sum(len(str(each)) for each in getattr(op, "messages", None) or [])
        prompt = min(characters if given is None else given.size, self.sizes.context)
        if isinstance(op, ComputeLogprobs):
            return Draw(
                prompt=prompt, rows=0, tokens_max=0, cuts=False, scores_prompt=True, rank=rank,
                kv_bytes_max=self.kv_bytes_max,
            )  # fmt: skip
        params = op.params
        return Draw(
            prompt=prompt,
            rows=op.num_samples,
            tokens_max=max(1, min(params.max_tokens, self.sizes.context - prompt)),
            cuts=params.top_k != -1 or params.top_p < 1.0,
            scores_prompt=op.include_prompt_logprobs or op.topk_prompt_logprobs > 0,
            rank=rank,
            kv_bytes_max=self.kv_bytes_max,
        )

    def _compare(
        self, needed: int, remedy: Callable[[int], str],
        available: Callable[[], int | None] | None = None,
    ) -> None:  # fmt: skip
        if needed <= NEVER_REFUSED_BYTES:
            return
        free = (available or self.available)()
        if free is not None and needed > free:
            log.warning("operation_does_not_fit", extra={"needed": needed, "available": free})
            raise InvalidRequestError(
                f"the operation needs about {needed} bytes of memory and {free} are available, so that "
                f"nothing was run; {remedy(free)}"
            )


def _shorten(sizes: Sizes, batch: Batch, free: int) -> str:
    longest = max(batch.lengths)
    fits = memory.longest_fitting(sizes, batch, free)
    if fits < longest:
        at = batch.lengths.index(longest)
        return f"datum {at} has {longest} tokens, and about {fits} fit: send shorter datums"
    return (
        f"a pass takes {batch.budget} tokens: send fewer datums, or start the worker with a lower "
        "GRISTMILL_WORKER_TOKEN_BUDGET"
    )


def _draw_less(draw: Draw) -> str:
    if not draw.rows:
        return f"the prompt has {draw.prompt} tokens: send a shorter one"
    return (
        f"{draw.rows} samples of up to {draw.tokens_max} tokens behind a prompt of {draw.prompt}: "
        "lower max_tokens or num_samples, or send a shorter prompt"
    )


# --- what there is ---------------------------------------------------------------------------------


def room_on(device: torch.device) -> Callable[[], int | None]:
    """How many bytes could be had on a device now."""
    if device.type == "cuda":
        return lambda: _on_cuda(device)
    return on_host


def _on_cuda(device: torch.device) -> int:
    free, _total = torch.cuda.mem_get_info(device)
    # What torch keeps for itself and nobody uses.
    kept: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + kept


def on_host(meminfo: Path = MEMINFO, cgroup: Path = CGROUP_ROOT) -> int | None:
    """What the machine has left, or the control group where that is less."""
    known = [
        left for left in (left_on_machine(meminfo), left_in_cgroup(cgroup)) if left is not None
    ]
    return min(known, default=None)


def left_on_machine(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def left_in_cgroup(root: Path) -> int | None:
    """Limit less use, by either version; file pages that could be dropped count as unused. None = no limit."""
    names = (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder, limit_name, used_name, dropped_name in names:
        try:
            limit = (folder / limit_name).read_text().strip()
            if limit == "max":
                return None
            used = int((folder / used_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return max(0, int(limit) - used + int(stat.get(dropped_name, 0)))
        except (OSError, ValueError):
            continue
    return None
