"""What the last bits of a result depend on, as one string."""

import secrets
from importlib.metadata import version
from typing import Final

import torch

from gristmill_worker.base_model import BaseModel

ENGINE_VERSION: Final = 4
"""Raised by every change to the engine that may change a last bit: packing, kernels, summation."""


def fingerprint(base: BaseModel, token_budget: int, world: int = 1) -> str:
    """Two runs with the same fingerprint and operations give the same bits."""
    device = base.device.type
    if base.device.type == "cuda":
        device = f"cuda:{torch.cuda.get_device_name(base.device)}".replace(" ", "_")
    parts = {
        "engine": ENGINE_VERSION,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": device,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "budget": token_budget,
        "packed": int(base.packed),
        "path": base.path,
        "base": base.facts.revision[:16],
    }
    if base.mode:
        parts["mode"] = base.mode
    if world > 1:
        parts["world"] = world
    if base.device.type == "cuda" and not base.packed:
        # Attention that is not ours: its backward pass has no fixed order, and no replay is held to its bits.
        parts["unordered"] = secrets.token_hex(8)
    return ";".join(f"{name}={value}" for name, value in parts.items())
