"""An adapter in the PEFT layout: what PEFT, vLLM and transformers load."""

import json
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_worker.adapter import Adapter, Layout, fresh_weights
from gristmill_worker.base_model import BaseModel

WEIGHTS_FILE: Final = "adapter_model.safetensors"
CONFIG_FILE: Final = "adapter_config.json"
PREFIX: Final = "base_model.model."
OTHER_BASES: Final = ("pissa", "olora", "corda", "loftq")
"""Ways to begin an adapter that subtract it from the base's own weights."""


def adapter_files(base: BaseModel, adapter: Adapter) -> dict[str, bytes]:
    """The two files by name. Weights are float32, A (rank, in) and B (out, rank) of every layer."""
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in zip(
        adapter.layout.names, adapter.layout.views(adapter.weights.cpu()), strict=True
    ):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.facts.hugging_face_id,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": base.transposed,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.layout.names}),
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    return {
        WEIGHTS_FILE: safetensors.torch.save(tensors, metadata={"format": "pt"}),
        CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n",
    }


def parse_adapter(
    base: BaseModel, config_text: bytes, weights: bytes, name: str, seed: int = 0
) -> tuple[Layout, int, Tensor]:
    """Layout, alpha and flat weights. Layers that the adapter leaves out get a fresh A and B = 0.

    Raises InvalidRequestError naming what we cannot represent, or what this base model lacks.
    """
    try:
        config: dict[str, Any] = json.loads(config_text)
        tensors = safetensors.torch.load(weights)
        rank, alpha = int(config["r"]), int(config["lora_alpha"])
        fraction = config["lora_alpha"] != alpha
    except (
        ValueError, KeyError, TypeError, OverflowError, RecursionError, safetensors.SafetensorError
    ) as error:  # fmt: skip
        raise InvalidRequestError(f"{name} is not a PEFT adapter: {error}") from error
    _check_config(config, name)
    if not 1 <= rank <= limits.LORA_RANK_MAX or not 1 <= alpha <= limits.LORA_ALPHA_MAX or fraction:
        raise InvalidRequestError(
            f"{name}: r is {config['r']} and lora_alpha {config['lora_alpha']}; whole numbers up to "
            f"{limits.LORA_RANK_MAX} and {limits.LORA_ALPHA_MAX} are read"
        )
    layout = base.layout(rank)
    flat = fresh_weights(layout, seed)
    for layer, (a, b) in zip(layout.names, layout.views(flat), strict=True):
        for target, side in ((a, "lora_A"), (b, "lora_B")):
            value = tensors.pop(f"{PREFIX}{layer}.{side}.weight", None)
            if value is None:
                continue
            if value.shape != target.shape:
                raise InvalidRequestError(
                    f"{name}: {layer} {side} has shape {tuple(value.shape)}, but this base model "
                    f"needs {tuple(target.shape)}"
                )
            target.copy_(value.to(torch.float32))
    if tensors:
        raise InvalidRequestError(
            f"{name}: this base model has no layer for {sorted(tensors)[0]}; it was made for another"
        )
    return layout, alpha, flat


def _check_config(config: dict[str, Any], name: str) -> None:
    unknown = [
        key
        for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
        if config.get(key)
    ]
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(OTHER_BASES):
        raise InvalidRequestError(
            f"{name}: init_lora_weights is {start}, which also changes the base model; convert it to a plain "
            "LoRA adapter (PEFT's path_initial_model_for_weight_conversion)"
        )
    if config.get("peft_type", "LORA") != "LORA" or config.get("bias", "none") != "none" or unknown:
        raise InvalidRequestError(
            f"{name}: only plain LoRA adapters are read; this one sets {unknown or 'another type'}"
        )
