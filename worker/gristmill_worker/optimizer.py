"""AdamW over flat float32 buffers: clip, decoupled decay, moments, bias correction, LoRA+."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill_contracts.errors import OperationFailedError
from gristmill_contracts.operations import OptimStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """New values; the old ones are untouched, so that a failed step leaves nothing."""

    weights: Tensor
    m: Tensor
    v: Tensor
    grad_norm: float
    """Before clipping."""
    update_norm: float


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
    g = gradient * clip_scale(norm, settings.grad_clip_norm)
    new_m = m * settings.beta1 + g * (1 - settings.beta1)
    new_v = v * settings.beta2 + g.square_() * (1 - settings.beta2)
    correction1 = 1 - settings.beta1**step
    correction2 = 1 - settings.beta2**step
    direction = (new_v / correction2).sqrt_().add_(settings.eps)
    torch.div(new_m, direction, out=direction).div_(correction1)
    rates = (
        (slice(None, a_size), settings.learning_rate),
        (slice(a_size, None), settings.learning_rate * settings.lora_plus_lr_ratio),
    )
    new_weights = weights.clone()
    for part, rate in rates:
        new_weights[part] *= 1 - rate * settings.weight_decay
        new_weights[part] -= rate * direction[part]
    update_norm = float(torch.linalg.vector_norm(new_weights - weights))
    _finite("update norm", update_norm)
    return Stepped(weights=new_weights, m=new_m, v=new_v, grad_norm=norm, update_norm=update_norm)


def _finite(what: str, value: float) -> None:
    if value - value != 0:
        raise OperationFailedError(
            f"the {what} is {value}; nothing was changed, lower the learning rate or the loss"
        )
