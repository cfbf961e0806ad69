"""What a decoder looks like, read from its config; and whether the fast path can run it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies depend on no sequence length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and switches of one decoder."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Of each layer: a position sees this many, itself included; None = all before it."""

    @property
    def group(self) -> int:
        """Query heads for each key and value head."""
        return self.heads // self.kv_heads

    @property
    def q_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size


def read_config(folder: Path) -> dict[str, Any]:  # Any: Hugging Face's files are free-form
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def why_not(config: dict[str, Any]) -> str:
    """Why the fast path does not serve a model with this config; empty = it does."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"model type {family} is none of {', '.join(FAMILIES)}"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config['hidden_act']} is not silu"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"  # "type" in older configs
    if kind not in ROPE_TYPES:
        return f"rope type {kind} is none of {', '.join(ROPE_TYPES)}"
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        return "a part of each head has no position"
    odd = [name for name in ("quantization_config", "num_local_experts") if config.get(name)]
    return f"config has {odd[0]}" if odd else ""


def path_of(config: dict[str, Any]) -> tuple[Literal["fast", "generic"], str]:
    """The path that runs a model with this config unless the settings name one, and why."""
    reason = why_not(config)
    return ("generic", reason) if reason else ("fast", why_fast(config["model_type"]))


def why_fast(family: str) -> str:
    return f"{family} is a Llama-shaped decoder"


def shape_of(config: dict[str, Any]) -> Shape:
    """The shape of a config that `why_not` has nothing against."""
    family = config["model_type"]
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    return Shape(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        inner=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        out_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(config),
    )


def _windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Mistral: every layer, if a window is set. Qwen: the layers that layer_types names."""
    count: int = config["num_hidden_layers"]
    window: int | None = config.get("sliding_window")
    if config["model_type"] == "mistral":
        return (window,) * count
    if not window or not config.get("use_sliding_window", False):
        return (None,) * count
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", count)
        kinds = ["sliding_attention" if at >= first else "full_attention" for at in range(count)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
