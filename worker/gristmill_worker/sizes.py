"""The sizes of a base model that its need for memory follows from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gristmill_worker.base_model import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Counts of elements, but `item_bytes`: of one element of the base's dtype."""

    path: Literal["fast", "generic"]
    item_bytes: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    """Of the MLP."""
    vocabulary: int
    context: int
    linears: tuple[tuple[int, int], ...]
    """(out, in) of every adapted layer of the whole model."""
    windows: tuple[int | None, ...]
    """Of each layer."""
    qk_norm: bool
    parameters: int = 0
    """Of the whole base; only a merged export depends on them."""

    @property
    def q_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def position_bytes(self) -> int:
        """Of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_size * self.item_bytes

    def adapter_size(self, rank: int) -> int:
        """Elements of one flat buffer."""
        return rank * sum(rows + columns for rows, columns in self.linears)


def sizes_of(base: BaseModel) -> Sizes:
    """Of a loaded model, either path."""
    shape: Any = getattr(getattr(base, "decoder", None), "shape", None)
    if shape is None:
        return _generic(base)
    return Sizes(
        path="fast",
        item_bytes=base.dtype.itemsize,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        inner=shape.inner,
        vocabulary=shape.vocabulary,
        context=base.facts.context_length,
        linears=base.shapes,
        windows=shape.windows,
        qk_norm=shape.qk_norm,
        parameters=_elements(base.shapes)
        + (1 if shape.tied else 2) * shape.vocabulary * shape.hidden,
    )


def _generic(base: Any) -> Sizes:  # Any: transformers' config is not typed
    config = base.model.config.get_text_config()
    hidden = int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    layers = int(getattr(config, "num_hidden_layers", 0) or 1)
    return Sizes(
        path="generic",
        item_bytes=base.dtype.itemsize,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or hidden // heads),
        inner=_widest(base.shapes),
        vocabulary=base.facts.vocabulary_size,
        context=base.facts.context_length,
        linears=base.shapes,
        windows=(None,) * layers,
        qk_norm=False,
        parameters=sum(each.numel() for each in base.model.parameters()),
    )


def _elements(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes)


def _widest(shapes: Sequence[tuple[int, int]]) -> int:
    return max(max(shape) for shape in shapes)
