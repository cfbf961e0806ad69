"""Rotary positions: cosines and sines of every position, with transformers' own frequencies."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill_worker.fast.shape import read_config, shape_of


class Rope:
    """Tables grow as longer sequences come; float32, whatever the base's dtype."""

    def __init__(self, frequencies: Tensor, scaling: float, device: torch.device) -> None:
        """(D / 2,) radians for each position, and a factor of every cosine and sine."""
        self.frequencies, self.scaling = frequencies.to(device), scaling
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


def frequencies_of(folder: Path) -> tuple[Tensor, float]:
    """Of the model in a folder that the fast path serves."""
    config = read_config(folder)
    theta = _plain_theta(config)
    if theta is None:
        return _scaled(folder)
    return _plain(theta, shape_of(config).head_size)


def _plain(theta: float, size: int) -> tuple[Tensor, float]:
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return 1.0 / theta**exponents, 1.0


def _plain_theta(config: dict[str, Any]) -> float | None:  # Any: Hugging Face's files are free-form
    """The base of frequencies that nothing scales; None where only transformers can tell."""
    parameters = config.get("rope_parameters") or {}
    if parameters.get("rope_type") != "default" or config.get("rope_scaling"):
        return None
    theta: float | None = parameters.get("rope_theta")
    return theta


def _scaled(folder: Path) -> tuple[Tensor, float]:
    # As slow to import as torch, and most models have no need of it.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies.float(), float(scaling)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _plain(parameters["rope_theta"], size)
