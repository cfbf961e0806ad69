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


def adamw(
    *,
    weights: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    a_size: int,
    settings: OptimStep,
) -> Stepped:
    """One step. `step` counts from 1; entries from `a_size` on are B matrices, with LoRA+'s own rate.

    Raises OperationFailedError if the gradient or the result is not finite.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    _finite("gradient norm", norm)
    scale = clip_scale(norm, settings.grad_clip_norm)
    old = Buffers(weights, m, v)
    new = Buffers(*(torch.empty_like(each) for each in (weights, m, v)))
    rates = (
        (0, a_size, settings.learning_rate),
        (a_size, weights.numel(), settings.learning_rate * settings.lora_plus_lr_ratio),
    )
    span = BLOCK if weights.device.type == "cpu" else max(1, weights.numel())
    for first, last, rate in rates:
        for start in range(first, last, span):
            at = slice(start, min(last, start + span))
            _step_block(old.at(at), new.at(at), gradient[at] * scale, step, rate, settings)
    update_norm = float(torch.linalg.vector_norm(new.weights - weights))
    _finite("update norm", update_norm)
    return Stepped(weights=new.weights, m=new.m, v=new.v, grad_norm=norm, update_norm=update_norm)


def _step_block(  # noqa: PLR0917
    old: Buffers, new: Buffers, g: Tensor, step: int, rate: float, settings: OptimStep
) -> None:
    """Fill `new`. `g` is overwritten. Each value has its own roundings alone, however blocks are cut."""
    torch.mul(old.m, settings.beta1, out=new.m).add_(g * (1 - settings.beta1))
    torch.mul(old.v, settings.beta2, out=new.v).add_(g.square_().mul_(1 - settings.beta2))
    direction = (new.v / (1 - settings.beta2**step)).sqrt_().add_(settings.eps)
    torch.div(new.m, direction, out=direction).div_(1 - settings.beta1**step)
    torch.mul(old.weights, 1 - rate * settings.weight_decay, out=new.weights)
    new.weights.sub_(direction.mul_(rate))


def _finite(what: str, value: float) -> None:
    if value - value != 0:
        raise OperationFailedError(
            f"the {what} is {value}; nothing was changed, lower the learning rate or the loss"
        )
