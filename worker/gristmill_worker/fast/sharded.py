"""The decoder's blocks where each rank of a team holds an equal part of every one (FSDP2, frozen).

A block is whole on a rank only while that rank looks at it, and gathering it takes all ranks. So all of them
follow one plan: which blocks are gathered, in which order. It depends on how many passes are run and on
nothing else; a rank that has less to run, or whose share failed, gathers the rest of the plan all the same.
Adapters, gradients and moments are none of this: they are flat buffers beside the base, whole on every rank.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final, Protocol, overload

import torch
from torch import Tensor, nn

from gristmill_worker.fast.linear import Linear
from gristmill_worker.fast.weights import Block
from gristmill_worker.team import collective

COPIES: Final = 2
"""Of a block while it is gathered: as it arrives, and as its weights lie."""


def visits(layers: int, passes: int, *, trains: bool) -> list[int]:
    """The blocks of so many passes, forward and (`trains`) back again. Neighbours differ: what is there stays."""
    there = list(range(layers))
    one = [*there, *reversed(there)] if trains else there
    return [index for index, _ in groupby(one * passes)]


class Shard(Protocol):
    """One block, of which this rank holds a part."""

    whole_bytes: int

    def gather(self) -> Block:
        """The whole block. Returns once all ranks have asked for it."""

    def release(self) -> None:
        """Keep this rank's part alone."""


class ShardedBlocks(Sequence[Block]):
    """To look at block i is to gather it; the one that was looked at before it is released.

    Inside `together` all ranks run passes of their own. Outside, rank 0 looks at the blocks in their order
    and `lend` asks the other ranks to gather along with it, once for each pass.
    """

    def __init__(self, shards: Sequence[Shard], lend: Callable[[], None]) -> None:
        self.shards = shards
        self.lend = lend
        self.ahead: deque[int] = deque()
        self.inside = False
        self.held: tuple[int, Block] | None = None

    @property
    def gathered_bytes(self) -> int:
        """What the largest block takes while it is whole."""
        return COPIES * max(shard.whole_bytes for shard in self.shards)

    def __len__(self) -> int:
        return len(self.shards)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        """Raises RuntimeError where the block is not the next one: the other ranks gather another."""
        if isinstance(index, slice):
            raise TypeError("sharded blocks are looked at one at a time")
        if not 0 <= index < len(self.shards):
            raise IndexError(index)
        if self.held is not None and self.held[0] == index:
            return self.held[1]
        if index == 0 and not self.inside:
            self.settle()
            self.lend()
            self.ahead.extend(visits(len(self.shards), 1, trains=False))
        if not self.ahead or self.ahead[0] != index:
            raise RuntimeError(
                f"block {index} was looked at, and the plan of all ranks has {self._next}"
            )
        return self._take()

    @property
    def _next(self) -> str:
        return f"block {self.ahead[0]} next" if self.ahead else "nothing next"

    def _take(self) -> Block:
        index = self.ahead.popleft()
        self._release()
        try:
            with collective():
                block = self.shards[index].gather()
        except BaseException:
            self.ahead.clear()  # the team is over: nobody gathers any more
            raise
        self.held = (index, block)
        return block

    def _release(self) -> None:
        if self.held is not None:
            index, _ = self.held
            self.held = None
            self.shards[index].release()

    @contextmanager
    def together(self, passes: int, *, trains: bool) -> Iterator[None]:
        """All ranks enter with the same numbers; each runs up to `passes` passes inside."""
        self.settle()
        self.ahead.extend(visits(len(self.shards), passes, trains=trains))
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            self.settle()

    def settle(self) -> None:
        """Gather what the other ranks still wait for, and hold nothing whole."""
        while self.ahead:
            self._take()
        self._release()


class BlockShard(nn.Module):
    """A block's tensors as the frozen parameters of a module, which `fully_shard` can split."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.parts = [linear.parts for linear in block.linears]
        self.window = block.window
        tensors = tensors_of(block)
        self.whole_bytes = sum(
            t.numel() * t.element_size() for t in tensors.values() if t is not None
        )
        for name, value in tensors.items():
            frozen = None if value is None else nn.Parameter(value, requires_grad=False)
            self.register_parameter(name, frozen)

    def gather(self) -> Block:
        own: Any = self  # Any: `fully_shard` makes another class of it, with these methods
        # Made inside inference mode they could not be written to outside of it, by the next gathering.
        with torch.inference_mode(mode=False), torch.no_grad():
            own.unshard()
        linears = [
            Linear(getattr(own, f"weight_{at}"), getattr(own, f"bias_{at}"), parts, pack=False)
            for at, parts in enumerate(self.parts)
        ]
        qkv, out, gate_up, down = linears
        return Block(
            before_attention=own.before_attention, before_mlp=own.before_mlp, qkv=qkv, out=out,
            gate_up=gate_up, down=down, q_norm=own.q_norm, k_norm=own.k_norm, window=self.window,
        )  # fmt: skip

    def release(self) -> None:
        own: Any = self
        own.reshard()


def tensors_of(block: Block) -> dict[str, Tensor | None]:
    """By the name under which a `BlockShard` has them."""
    found: dict[str, Tensor | None] = {
        "before_attention": block.before_attention,
        "before_mlp": block.before_mlp,
        "q_norm": block.q_norm,
        "k_norm": block.k_norm,
    }
    for at, linear in enumerate(block.linears):
        found[f"weight_{at}"], found[f"bias_{at}"] = linear.weight, linear.bias
    return found


def shard_blocks(
    blocks: Iterable[Block], device: torch.device, lend: Callable[[], None]
) -> ShardedBlocks:
    """Split each block as it comes, over all ranks of the default group: no two are whole at a time."""
    # Imported here: it takes as long as torch itself, and most workers never shard.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    shards = []
    for block in blocks:
        shard = BlockShard(block)
        fully_shard(shard, mesh=mesh)
        shards.append(shard)
    return ShardedBlocks(shards, lend)
