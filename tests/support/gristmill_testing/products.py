"""The processor a benchmark runs on: its instructions, and how fast it multiplies matrices of a model's shapes.

No engine can train faster than its matrix products take. That floor is measured in the same run, since
machines differ: in bf16 the ratio to a peer follows from how much faster than fp32 they multiply it.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
INSTRUCTIONS = (*BF16_INSTRUCTIONS, "amx_tile", "avx512f", "avx2", "sve", "bf16", "neon")
FAST_BF16 = 4.0
"""From this ratio of bf16 to fp32 on, more is asked of training in bf16."""


def instructions(cpuinfo: str | None = None) -> tuple[str, ...]:
    """Those of the vector extensions that matter, of /proc/cpuinfo."""
    if cpuinfo is None:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            has = set(words.split())
            return tuple(each for each in INSTRUCTIONS if each in has)
    return ()


def processor_name(cpuinfo: str | None = None) -> str:
    if cpuinfo is None:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown processor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama-shaped decoder, as far as its products depend on it."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "Shape":  # Any: a config of transformers
        heads = config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
        )

    @property
    def linears(self) -> list[tuple[int, int, int]]:
        """(inputs, outputs, how many), joined where an engine may join them; the head last."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (self.hidden, q + 2 * kv, self.layers),
            (q, self.hidden, self.layers),
            (self.hidden, 2 * self.inner, self.layers),
            (self.inner, self.hidden, self.layers),
            (self.hidden, self.vocabulary, 1),
        ]

    @property
    def weights(self) -> int:
        return sum(inputs * outputs * count for inputs, outputs, count in self.linears)

    def lora_weights(self, rank: int) -> int:
        """On all seven linear layers."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = 2 * (q + self.hidden) + 2 * (self.hidden + kv) + 3 * (self.hidden + self.inner)
        return rank * sides * self.layers

    def training_flops(self, length: int, rank: int) -> int:
        """Of one token of a sequence, forward and backward: 4 for each frozen weight, which has no gradient,
        6 for each of LoRA's, and causal attention."""
        attention = 6 * length * self.heads * self.head_dim * self.layers
        return 4 * self.weights + 6 * self.lora_weights(rank) + attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Products of the model's shapes, forward and backward, in FLOP/s."""

    bf16: float
    fp32: float
    rows: int

    @property
    def ratio(self) -> float:
        return self.bf16 / self.fp32

    def faster(self, other: "Products") -> "Products":
        """Of two measurements the better figure of each kind: other work can only slow a product down."""
        return Products(
            bf16=max(self.bf16, other.bf16), fp32=max(self.fp32, other.fp32), rows=self.rows
        )

    def floor_s(self, flops: float, dtype: str) -> float:
        return flops / (self.bf16 if dtype == "bfloat16" else self.fp32)


def measure_products(shape: Shape, *, rows: int = 1024, turns: int = 5) -> Products:
    """The median of each product, weighed by how often the model has it."""
    rates = {
        dtype: _rate(shape.linears, rows, turns, dtype) for dtype in (torch.bfloat16, torch.float32)
    }
    return Products(bf16=rates[torch.bfloat16], fp32=rates[torch.float32], rows=rows)


def _rate(
    linears: Sequence[tuple[int, int, int]], rows: int, turns: int, dtype: torch.dtype
) -> float:
    flops = seconds = 0.0
    for inputs, outputs, count in linears:
        x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        y = torch.randn(rows, outputs).to(dtype)
        both = _median_s(x, weight.T, turns) + _median_s(y, weight, turns)
        flops += count * 4.0 * rows * inputs * outputs
        seconds += count * both
    return flops / seconds


def _median_s(left: torch.Tensor, right: torch.Tensor, turns: int) -> float:
    left @ right
    taken = []
    for _ in range(turns):
        started = time.perf_counter()
        left @ right
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def machine_facts(products: Products | None) -> dict[str, Any]:
    """For the head of the table and for JSON."""
    facts: dict[str, Any] = {
        "processor": processor_name(),
        "instructions": list(instructions()),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }
    if products is not None:
        facts |= {
            "gemm_bf16_gflops": round(products.bf16 / 1e9, 1),
            "gemm_fp32_gflops": round(products.fp32 / 1e9, 1),
            "gemm_bf16_over_fp32": round(products.ratio, 2),
        }
    return facts
