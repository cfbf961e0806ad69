"""The live state of one session: adapter, moments, accumulated gradient, counters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import torch
from torch import Tensor

from gristmill_contracts.errors import ConflictError, OperationFailedError
from gristmill_contracts.operations import ForwardBackward, OptimStep, OptimStepResult
from gristmill_worker.adapter import Adapter, fresh_weights, make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.checksum import checksum
from gristmill_worker.optimizer import Buffers, Spares, adamw, fit_for_a_step

BUFFERS: Final = ("weights", "m", "v", "gradient")


class Counters(msgspec.Struct, kw_only=True):
    """Integers of a session that live on in its snapshots and saved states."""

    applied: int = 0
    """Train operations executed, failed and skipped ones included."""
    step: int = 0
    """Optimizer steps since the moments began."""
    accumulated: int = 0
    """forward_backward operations since the last step."""
    tokens: int = 0
    """Tokens of those."""
    trained: bool = False
    """Whether any forward_backward has run: from then on rank and alpha are fixed."""


class Session:
    """`gradient`, `m` and `v` are flat float32 buffers like the adapter's weights."""

    def __init__(
        self,
        *,
        uid: str,
        state_dir: str,
        seed: int,
        adapter: Adapter,
        m: Tensor,
        v: Tensor,
        gradient: Tensor,
        counters: Counters,
    ) -> None:
        self.uid = uid
        self.state_dir = state_dir
        self.seed = seed
        self.adapter = adapter
        self.m = m
        self.v = v
        self.gradient = gradient
        self.counters = counters

    def expect(self, index: int) -> None:
        """Raises ConflictError unless `index` is the next one."""
        expected = self.counters.applied + 1
        if index != expected:
            raise ConflictError(
                f"session {self.uid}: operation index {index} was sent but {expected} is next; "
                "open the session again with the log's own count"
            )

    def buffers(self) -> dict[str, Tensor]:
        """The four flat buffers by name."""
        return {
            "weights": self.adapter.weights,
            "m": self.m,
            "v": self.v,
            "gradient": self.gradient,
        }

    def checksum(self) -> int:
        return checksum(self.counters.step, self.adapter.weights, self.m, self.v)

    @contextmanager
    def scratch(self) -> Iterator[Tensor]:
        """Zeros for an operation's own gradient: the session's buffer, while nothing else is in it."""
        if self.counters.accumulated:
            yield torch.zeros_like(self.gradient)
            return
        try:
            yield self.gradient
        except BaseException:
            self.gradient.zero_()
            raise

    def accumulate(self, op: ForwardBackward, scratch: Tensor) -> None:
        """Add the gradient of a whole operation, at its success. `scratch` is used up.

        Raises OperationFailedError if no step could take the sum; then nothing changes.
        """
        if scratch is not self.gradient:
            self.gradient = self._sum(scratch)
        self.counters.accumulated += 1
        self.counters.tokens += sum(datum.tokens.size for datum in op.datums)
        self.counters.trained = True

    def _sum(self, scratch: Tensor) -> Tensor:
        total = torch.add(self.gradient, scratch, out=scratch)
        if not fit_for_a_step(total):  # each alone was looked at
            raise OperationFailedError(
                f"session {self.uid}: with this operation the norm of the accumulated gradient would not be "
                "finite; it was not added, check advantages and weights, or step before it"
            )
        return total

    def optim_step(self, op: OptimStep, spares: Spares) -> OptimStepResult:
        """Raises OperationFailedError if nothing was accumulated; then nothing changes."""
        if self.counters.accumulated == 0:
            raise OperationFailedError(
                f"session {self.uid}: optim_step without a forward_backward since the last step; "
                "send one first"
            )
        stepped = adamw(
            weights=self.adapter.weights,
            gradient=self.gradient,
            m=self.m,
            v=self.v,
            step=self.counters.step + 1,
            a_size=self.adapter.layout.a_size,
            settings=op,
            spares=spares,
        )
        spares.keep(Buffers(self.adapter.weights, self.m, self.v))
        self.adapter.weights = stepped.weights
        self.adapter.sync()
        self.m, self.v = stepped.m, stepped.v
        tokens = self.counters.tokens
        self.clear_gradient()
        self.counters.step += 1
        metrics = {
            "grad_norm": stepped.grad_norm,
            "update_norm": stepped.update_norm,
            "step": float(self.counters.step),
            "tokens": float(tokens),
        }
        return OptimStepResult(metrics=metrics)

    def clear_gradient(self) -> None:
        self.gradient.zero_()
        self.counters.accumulated = self.counters.tokens = 0


def new_session(
    base: BaseModel, *, uid: str, state_dir: str, seed: int, rank: int, alpha: int
) -> Session:
    """A fresh adapter: A from the seed, B zero."""
    layout = base.layout(rank)
    adapter = make_adapter(
        layout, alpha, fresh_weights(layout, seed), device=base.device, dtype=base.dtype
    )
    m, v, gradient = (torch.zeros_like(adapter.weights) for _ in range(3))
    return Session(
        uid=uid, state_dir=state_dir, seed=seed, adapter=adapter, m=m, v=v, gradient=gradient,
        counters=Counters(),
    )  # fmt: skip
