"""The fast path as a base model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig

from gristmill_contracts.errors import InvalidRequestError
from gristmill_worker.adapter import Adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.facts import ModelFacts
from gristmill_worker.fast import kernels
from gristmill_worker.fast.cache import FastCache
from gristmill_worker.fast.decoder import Decoder, DecoderFunction, How, Parts, Selected
from gristmill_worker.fast.linear import Factors, fuse_factors, packing_works
from gristmill_worker.fast.rope import Rope
from gristmill_worker.fast.shape import read_config, shape_of
from gristmill_worker.fast.weights import (
    PROJECTIONS,
    layer_names,
    layer_shapes,
    load_weights,
)
from gristmill_worker.head import Head
from gristmill_worker.lora import LayerGradient
from gristmill_worker.runs import Run

COMPILE_PARAMETERS_MIN: Final = 50_000_000
"""Compiling takes seconds at every start; a smaller model never earns them back."""
NOTHING: Final = Selected()


class FastModel(BaseModel):
    """`decoder` runs it; an adapter's fused factors are made once for each of its versions."""

    path = "fast"
    packed = True

    def __init__(
        self, *, folder: Path, facts: ModelFacts, tokenizer: Any, decoder: Decoder, head: Head
    ) -> None:  # Any: transformers is not typed
        shape = decoder.shape
        super().__init__(
            folder=folder, facts=facts, tokenizer=tokenizer, head=head, names=layer_names(shape),
            shapes=layer_shapes(shape), why=f"{shape.family} is a Llama-shaped decoder",
        )  # fmt: skip
        self.decoder = decoder
        self.now = NOTHING
        self.anchor = torch.zeros((), device=head.weight.device, requires_grad=True)

    @property
    def mode(self) -> str:  # type: ignore[override]
        packed = "packed" if self.decoder.weights.blocks[0].qkv.packed else "plain"
        return f"{self.decoder.kernels.mode}+{packed}"

    @contextmanager
    def selected(
        self, adapter: Adapter | None, gradient: list[LayerGradient] | None = None
    ) -> Iterator[None]:
        if adapter is not None:
            parts = None if gradient is None else by_fused_layer(list(map(tuple, gradient)))
            self.now = Selected(factors=self._factors(adapter), gradient=parts, scale=adapter.scale)
        try:
            yield
        finally:
            self.now = NOTHING

    def _factors(self, adapter: Adapter) -> list[Factors]:
        if adapter.fused is None:
            views = by_fused_layer(adapter.layout.views(adapter.weights))
            linears = [each for block in self.decoder.weights.blocks for each in block.linears]
            adapter.fused = [
                fuse_factors(linear.parts, own, adapter.scale, self.dtype)
                for linear, own in zip(linears, views, strict=True)
            ]
        fused: list[Factors] = adapter.fused
        return fused

    def hidden(self, tokens: Tensor) -> Tensor:
        count, length = tokens.shape
        return self.hidden_packed(tokens.reshape(-1), (Run(0, length, count),))

    def hidden_packed(self, tokens: Tensor, table: tuple[Run, ...]) -> Tensor:
        if self.now.gradient is None or not torch.is_grad_enabled():
            return self.decoder.forward(tokens, table, self.now, None)
        hidden: Tensor = DecoderFunction.apply(
            self.anchor, self.decoder, tokens, How(table, self.now)
        )
        return hidden

    def new_cache(self) -> FastCache:
        return FastCache(self.decoder.shape)

    def hidden_cached(self, tokens: Tensor, cache: FastCache) -> Tensor:
        if cache.length == 0 and tokens.shape[0] == 1:
            return self.decoder.prefill(tokens[0], cache, self.now)[None]
        steps = [self.decoder.step(tokens[:, at], cache, self.now) for at in range(tokens.shape[1])]
        return torch.stack(steps, dim=1)


def by_fused_layer(views: list[Any]) -> list[Parts]:
    """(A, B) of each projection, grouped as the decoder fuses them."""
    grouped: list[Parts] = []
    at = 0
    while at < len(views):
        for members in PROJECTIONS:
            grouped.append(views[at : at + len(members)])
            at += len(members)
    return grouped


def load_fast(
    folder: Path,
    facts: ModelFacts,
    tokenizer: Any,  # Any: transformers is not typed
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> FastModel:
    """Raises InvalidRequestError if a weight is missing."""
    shape = shape_of(read_config(folder))
    pack = device.type == "cpu" and dtype == torch.bfloat16 and packing_works()
    try:
        weights = load_weights(folder, shape, dtype=dtype, device=device, pack=pack)
    except KeyError as error:
        raise InvalidRequestError(
            f"{folder} has no weight {error.args[0]}; prepare the model again"
        ) from error
    rope = Rope(AutoConfig.from_pretrained(folder, local_files_only=True), device)
    large = sum(rows * columns for rows, columns in layer_shapes(shape)) >= COMPILE_PARAMETERS_MIN
    chosen = kernels.compiled() if large else kernels.EAGER
    return FastModel(
        folder=folder, facts=facts, tokenizer=tokenizer,
        decoder=Decoder(shape, weights, rope, chosen), head=Head(_OutputLayer(weights.head), 1.0, None),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _OutputLayer:
    """What a Head is made from."""

    weight: Tensor
    bias: None = None
