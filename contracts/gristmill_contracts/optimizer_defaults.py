"""What each public API's own specification puts where a client leaves out a field of an optimizer step.

They disagree, so each wire fills in its own, and everything below the wires is told every value.
"""

from typing import Final

import msgspec


class OptimizerDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of OptimStep."""

    learning_rate: float | None
    """None = the client must send one."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float
    weight_decay: float = 0.0
    grad_clip_norm: float
    """0 = no clipping."""
    lora_plus_lr_ratio: float = 1.0


SAGEMAKER: Final = OptimizerDefaults(learning_rate=None, eps=1e-8, grad_clip_norm=1.0)
"""The service's (aws/api-models-aws). Its SDK sends other betas and decay, and leaves out the clip norm."""
TINKER: Final = OptimizerDefaults(learning_rate=1e-4, eps=1e-12, grad_clip_norm=0.0)
"""AdamParams of the Tinker documentation."""
