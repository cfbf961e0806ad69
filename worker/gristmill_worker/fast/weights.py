"""The decoder's weights, read from safetensors and fused: q, k and v into one matrix, gate and up into one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

from gristmill_worker.facts import WEIGHTS_FILE
from gristmill_worker.fast.linear import Linear
from gristmill_worker.fast.shape import Shape

PROJECTIONS: Final = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""What each of a block's four fused layers is made of, in the order in which transformers names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """One of a block's fused layers: its input columns, and the output rows of its projections."""

    columns: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer of the decoder."""

    before_attention: Tensor
    before_mlp: Tensor
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding: Tensor
    """(V, h)."""
    blocks: Sequence[Block]
    final_norm: Tensor
    head: Tensor
    """(V, h); the embedding itself where they are tied."""
    packed: bool = False
    """Whether the linear layers are packed for oneDNN."""


def layer_names(shape: Shape) -> tuple[str, ...]:
    """Of every projection, as transformers' decoder calls them: what adapters are stored under."""
    return tuple(
        f"model.layers.{index}.{name}"
        for index in range(shape.layers)
        for fused in PROJECTIONS
        for name in fused
    )


def layer_shapes(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(out, in) of each of them."""
    h, q, kv, f = shape.hidden, shape.q_size, shape.kv_size, shape.inner
    block = ((q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f))
    return block * shape.layers


def fused_layers(shape: Shape) -> tuple[Fused, ...]:
    """Of a block, in the order in which it runs them. Blocks are alike."""
    shapes = iter(layer_shapes(shape))
    found = []
    for members in PROJECTIONS:
        own = [next(shapes) for _ in members]
        found.append(Fused(columns=own[0][1], parts=tuple(rows for rows, _ in own)))
    return tuple(found)


def load_weights(
    folder: Path,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pack: bool,
    hold: Callable[[Iterator[Block]], Sequence[Block]] = tuple,
) -> Weights:
    """`hold` takes the blocks one by one. Raises KeyError with the name of a weight that is not there."""
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = set(file.keys())

        def read(name: str) -> Tensor:
            if name not in names:
                raise KeyError(name)
            value: Tensor = file.get_tensor(name)
            return value.to(device=device, dtype=dtype)

        embedding = read("model.embed_tokens.weight")
        head = read("lm_head.weight") if "lm_head.weight" in names and not shape.tied else embedding
        return Weights(
            embedding=embedding,
            blocks=hold(_blocks(read, names, shape, pack=pack)),
            final_norm=read("model.norm.weight"),
            head=head,
            packed=pack,
        )


def _blocks(
    read: Callable[[str], Tensor], names: set[str], shape: Shape, *, pack: bool
) -> Iterator[Block]:
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."

        def fused(members: tuple[str, ...], prefix: str = prefix) -> Linear:
            weights = [read(f"{prefix}{name}.weight") for name in members]
            biases = [f"{prefix}{name}.bias" for name in members]
            bias = torch.cat([read(name) for name in biases]) if biases[0] in names else None
            parts = tuple(each.shape[0] for each in weights)
            return Linear(torch.cat(weights), bias, parts, pack=pack)

        qkv, out, gate_up, down = (fused(members) for members in PROJECTIONS)
        yield Block(
            before_attention=read(prefix + "input_layernorm.weight"),
            before_mlp=read(prefix + "post_attention_layernorm.weight"),
            qkv=qkv, out=out, gate_up=gate_up, down=down,
            q_norm=read(prefix + "self_attn.q_norm.weight") if shape.qk_norm else None,
            k_norm=read(prefix + "self_attn.k_norm.weight") if shape.qk_norm else None,
            window=shape.windows[index],
        )  # fmt: skip
