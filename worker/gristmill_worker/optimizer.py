"""AdamW over flat float32 buffers: clip, decoupled decay, moments, bias correction, LoRA+."""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gristmill_contracts.errors import OperationFailedError
from gristmill_contracts.operations import OptimStep

BLOCK: Final = 2**15
"""Entries that a CPU steps at a time: what lies between the formula's parts then stays in its cache.
More are shared among threads, which cost more than they save here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """New values; the old ones are untouched, so that a failed step leaves nothing."""

    weights: Tensor
    m: Tensor
    v: Tensor
    grad_norm: float
    """Before clipping."""
    update_norm: float


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a step changes, or a block of it."""

    weights: Tensor
    m: Tensor
    v: Tensor

    def at(self, block: slice) -> "Buffers":
        return Buffers(self.weights[block], self.m[block], self.v[block])


def fit_for_a_step(gradient: Tensor) -> bool:
    """Whether its norm is finite. If not, entries may still be, but no step could ever take them: they must
    not be accumulated."""
    return math.isfinite(float(torch.linalg.vector_norm(gradient)))


def clip_scale(norm: float, limit: float) -> float:
    """min(1, limit / (norm + 1e-6)), as torch clips; 1 when the limit is 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


class Spares:
    """The buffers that a step left behind, for the next one: fresh memory costs as much as the step itself."""

    def __init__(self) -> None:
        self._kept: Buffers | None = None

    def take(self, like: Tensor) -> Buffers:
        """Three of `like`'s kind, whatever they hold."""
        kept, self._kept = self._kept, None
        if kept is not None:
            own = kept.weights
            if (own.shape, own.dtype, own.device) == (like.shape, like.dtype, like.device):
                return kept
        return Buffers(*(torch.empty_like(like) for _ in range(3)))

    def keep(self, buffers: Buffers) -> None:
        """Nobody else may hold them."""
        self._kept = buffers


def adamw(
    *,
    weights: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    a_size: int,
    settings: OptimStep,
    spares: Spares | None = None,
) -> Stepped:
    """One step. `step` counts from 1; entries from `a_size` on are B matrices, with LoRA+'s own rate.

    The new values are in buffers of `spares`. Raises OperationFailedError if the gradient or the result
    is not finite.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    _finite("gradient norm", norm)
    scale = clip_scale(norm, settings.grad_clip_norm)
    old, new = Buffers(weights, m, v), (spares or Spares()).take(weights)
    rates = (
        (0, a_size, settings.learning_rate),
        (a_size, weights.numel(), settings.learning_rate * settings.lora_plus_lr_ratio),
    )
    span = BLOCK if weights.device.type == "cpu" else max(1, weights.numel())
    room = weights.new_empty(min(span, weights.numel()))
    moved = 0.0
    for first, last, rate in rates:
        for start in range(first, last, span):
            at = slice(start, min(last, start + span))
            own = room[: at.stop - at.start]
            factors = _factors(step, rate, scale, settings)
            moved += _step_block(old.at(at), new.at(at), gradient[at], own, factors) ** 2
    update_norm = math.sqrt(moved)
    _finite("update norm", update_norm)
    return Stepped(weights=new.weights, m=new.m, v=new.v, grad_norm=norm, update_norm=update_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factors:
    """Numbers of a step, each rounded once."""

    beta1: float
    beta2: float
    first: float
    """Of the gradient in m."""
    second: float
    """Of its square in v."""
    unbias: float
    """Of the root of v."""
    eps: float
    rate: float
    decay: float


def _factors(step: int, rate: float, scale: float, settings: OptimStep) -> _Factors:
    return _Factors(
        beta1=settings.beta1, beta2=settings.beta2, first=(1 - settings.beta1) * scale,
        second=(1 - settings.beta2) * scale**2, unbias=(1 - settings.beta2**step) ** -0.5,
        eps=settings.eps, rate=rate / (1 - settings.beta1**step),
        decay=1 - rate * settings.weight_decay,
    )  # fmt: skip


def _step_block(old: Buffers, new: Buffers, g: Tensor, room: Tensor, by: _Factors) -> float:
    """Fill `new`; returns how far the weights moved. Each value has its own roundings alone, however
    blocks are cut. `room` is as long as they are."""
    torch.mul(old.m, by.beta1, out=new.m).add_(torch.mul(g, by.first, out=room))
    torch.mul(old.v, by.beta2, out=new.v).add_(torch.mul(g, g, out=room).mul_(by.second))
    direction = torch.sqrt(new.v, out=room).mul_(by.unbias).add_(by.eps)
    torch.div(new.m, direction, out=direction).mul_(by.rate)
    if by.decay == 1:
        torch.sub(old.weights, direction, out=new.weights)
    else:
        torch.mul(old.weights, by.decay, out=new.weights).sub_(direction)
    return float(torch.linalg.vector_norm(torch.sub(new.weights, old.weights, out=room)))


def _finite(what: str, value: float) -> None:
    if value - value != 0:
        raise OperationFailedError(
            f"the {what} is {value}; nothing was changed, lower the learning rate or the loss"
        )
