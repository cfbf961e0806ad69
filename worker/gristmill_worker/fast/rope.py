"""Rotary positions: cosines and sines of every position, with transformers' own frequencies."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Rope:
    """Tables grow as longer sequences come; float32, whatever the base's dtype."""

    def __init__(self, config: Any, device: torch.device) -> None:  # Any: a transformers config
        self.frequencies, self.scaling = _frequencies(config)
        self.frequencies = self.frequencies.to(device)
        self.cos = self.sin = torch.empty(0, 0, device=device)
        self.grow(256)

    def grow(self, length: int) -> None:
        """Have tables for positions below `length`."""
        if length <= self.cos.shape[0]:
            return
        length = max(length, 2 * self.cos.shape[0])
        at = torch.arange(length, device=self.frequencies.device, dtype=torch.float32)
        angles = torch.outer(at, self.frequencies)
        self.cos, self.sin = angles.cos() * self.scaling, angles.sin() * self.scaling

    def at(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(T,) positions, all below `length` -> cos and sin (T, 1, D / 2)."""
        self.grow(length)
        return self.cos[positions][:, None], self.sin[positions][:, None]


def _frequencies(config: Any) -> tuple[Tensor, float]:
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies.float(), float(scaling)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0
