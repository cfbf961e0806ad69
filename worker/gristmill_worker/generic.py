"""The generic path: any causal language model of transformers, with our LoRA layers put in. The oracle."""

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from gristmill_contracts.errors import InvalidRequestError
from gristmill_worker import attention
from gristmill_worker.adapter import Adapter
from gristmill_worker.base_model import BaseModel, Part
from gristmill_worker.facts import ModelFacts
from gristmill_worker.head import make_head
from gristmill_worker.lora import LayerGradient, LoraLinear, Slot
from gristmill_worker.runs import Run

log = logging.getLogger(__name__)

CHECK_TOLERANCE: Final = 2e-2
"""Relative. bf16 keeps 8 bits; a mask or position that is wrong shows as a difference of order 1."""


class GenericCache:
    """transformers' own cache."""

    def __init__(self, inner: Any) -> None:  # Any: transformers is not typed
        self.inner = inner

    def repeat(self, rows: int) -> None:
        if rows > 1:
            self.inner.batch_repeat_interleave(rows)

    def select(self, at: Tensor) -> None:
        self.inner.batch_select_indices(at)

    def copy(self) -> "GenericCache":
        return GenericCache(copy.deepcopy(self.inner))

    def release(self) -> None:
        self.inner = None


class LonelyRows:
    """A cache for each row, so that no row's numbers depend on another's."""

    def __init__(self, rows: list[GenericCache]) -> None:
        self.rows = rows

    def repeat(self, rows: int) -> None:
        raise ValueError(f"these are rows of their own; {rows} more cannot be made")

    def select(self, at: Tensor) -> None:
        self.rows = [self.rows[index] for index in at.tolist()]

    def copy(self) -> "LonelyRows":
        return LonelyRows([row.copy() for row in self.rows])

    def release(self) -> None:
        self.rows = []


class GenericModel(BaseModel):
    """A transformers model whose linear layers are LoraLinears."""

    path = "generic"

    def __init__(
        self,
        *,
        folder: Path,
        facts: ModelFacts,
        model: Any,
        layers: dict[str, LoraLinear],
        slot: Slot,
        why: str,
    ) -> None:
        super().__init__(
            folder=folder, facts=facts, head=make_head(model),
            names=tuple(layers), shapes=tuple(layer.shape for layer in layers.values()), why=why,
        )  # fmt: skip
        self.model = model
        self.layers = layers
        self.slot = slot
        self.transposed = any(layer.transposed for layer in layers.values())
        # transformers renamed the argument in 5.2x, and warns of the old name.
        accepted = inspect.signature(model.base_model.forward).parameters
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"

    @contextmanager
    def selected(
        self, adapter: Adapter | None, gradient: list[LayerGradient] | None = None
    ) -> Iterator[None]:
        """Run with this adapter; with `gradient`, a backward pass adds to it."""
        self.slot.factors = None if adapter is None else adapter.factors
        self.slot.scale = 1.0 if adapter is None else adapter.scale
        self.slot.gradient = gradient
        try:
            yield
        finally:
            self.slot.factors = self.slot.gradient = None

    def hidden(self, tokens: Tensor) -> Tensor:
        """(n, L) equally long sequences -> (n * L, h), behind the final norm."""
        out = self.model.base_model(input_ids=tokens, use_cache=False)
        states: Tensor = out.last_hidden_state
        return states.reshape(-1, states.shape[-1])

    def hidden_packed(self, tokens: Tensor, table: tuple[Run, ...]) -> Tensor:
        """(T,) tokens of the table's segments, one after another -> (T, h)."""
        positions = torch.cat(
            [torch.arange(run.length, device=tokens.device).repeat(run.segments) for run in table]
        )
        with attention.segments(table):
            out = self.model.base_model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False
            )
        states: Tensor = out.last_hidden_state
        return states[0]

    def hidden_cached(self, tokens: Tensor, cache: Any) -> Tensor:
        """(B, n) new tokens behind those in `cache`, which grows -> (B, n, h)."""
        out = self.model.base_model(
            input_ids=tokens, use_cache=True, **{self.cache_name: cache.inner}
        )
        states: Tensor = out.last_hidden_state
        return states

    @property
    def position_bytes(self) -> int:
        """By the config, as most families name it; a few of them hold less."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 1)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        hidden = getattr(config, "hidden_size", self.head.weight.shape[1])
        size = getattr(config, "head_dim", None) or hidden // heads
        layers: int = getattr(config, "num_hidden_layers", 1)
        return int(2 * layers * kv_heads * size * self.dtype.itemsize)

    def new_cache(self, room: int = 0) -> GenericCache:
        return GenericCache(DynamicCache(config=self.model.config))

    def prefill(self, tokens: Tensor, cache: Any) -> Tensor:
        return self.hidden_cached(tokens[None], cache)[0]

    def begin(self, cache: GenericCache, rows: int) -> GenericCache | LonelyRows:
        if self.invariant:
            return LonelyRows([cache.copy() for _ in range(rows)])
        cache.repeat(rows)
        return cache

    def decode(self, parts: Sequence[Part]) -> Tensor:
        """transformers runs one cache at a time."""
        found = []
        for part in parts:
            with self.selected(part.adapter):
                if isinstance(part.cache, LonelyRows):
                    pairs = zip(part.tokens, part.cache.rows, strict=True)
                    found += [self.hidden_cached(token.view(1, 1), own)[0] for token, own in pairs]
                else:
                    found.append(self.hidden_cached(part.tokens[:, None], part.cache)[:, 0])
        return torch.cat(found)


def load_generic(
    folder: Path, facts: ModelFacts, *, dtype: torch.dtype, device: torch.device, why: str,
) -> GenericModel:  # fmt: skip
    """Raises InvalidRequestError if it is not a model that we can run exactly."""
    attention.register()
    disable_progress_bar()
    model, ours = _load_model(folder, dtype)
    model.to(device).eval().requires_grad_(False)
    slot = Slot(device)
    layers = wrap_layers(model, slot)
    base = GenericModel(
        folder=folder,
        facts=facts,
        model=model,
        layers=layers,
        slot=slot,
        why=why,
    )
    with torch.no_grad():
        _check_head(base)
        _check_causal(base)
        lengths_matter = _positions_follow_the_longest(model.config.get_text_config())
        base.packed = ours and not lengths_matter and _packs_exactly(base)
    return base


def wrap_layers(model: Any, slot: Slot) -> dict[str, LoraLinear]:
    """Replace every linear layer but the output layer. Returns them by the name they had."""
    output = model.get_output_embeddings()
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output
    }
    wrapped: dict[str, LoraLinear] = {}
    for index, (name, module) in enumerate(found.items()):
        parent, _, leaf = name.rpartition(".")
        wrapped[name] = LoraLinear(module, slot, index)
        setattr(model.get_submodule(parent), leaf, wrapped[name])
    if not wrapped:
        raise InvalidRequestError(f"{type(model).__name__} has no linear layers to adapt")
    return wrapped


def _load_model(folder: Path, dtype: torch.dtype) -> tuple[Any, bool]:
    """The model, and whether it runs our attention; else transformers' default for it."""
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    if not _takes_our_attention(folder):
        log.info("packing_unsupported", extra={"folder": str(folder)})
        return AutoModelForCausalLM.from_pretrained(folder, **options), False
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attention.ATTENTION, **options
        )
    except (ValueError, KeyError):  # KeyError: families with a table of their own, as Falcon
        log.info("packing_unsupported", extra={"folder": str(folder)})
        return AutoModelForCausalLM.from_pretrained(folder, **options), False
    return model, True


def _takes_our_attention(folder: Path) -> bool:
    """Whether the family lets others compute its attention.

    One that does not (those with alibi, or with capped scores) still takes the masks that were registered
    with ours: none where ours needs none, so that every token would see the whole text.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    flags = ("_supports_attention_backend", "_supports_sdpa")
    return all(getattr(kind, flag, False) for flag in flags)


def _positions_follow_the_longest(config: Any) -> bool:  # Any: transformers is not typed
    """Whether a pass turns all its tokens by the length of its longest datum: a short one beside it
    would get other numbers than alone. Equally long datums may still share a pass.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]  # or by layer type
    return any(each.get("rope_type") in {"dynamic", "longrope"} for each in kinds)


def _far(left: Tensor, right: Tensor) -> bool:
    scale = right.abs().max().clamp_min(1e-6)
    return bool(((left - right).abs().max() / scale) > CHECK_TOLERANCE)


def _probe(base: GenericModel, count: int) -> Tensor:
    return torch.arange(1, count + 1, device=base.device) % base.facts.vocabulary_size


def _check_head(base: GenericModel) -> None:
    """Our output layer on the hidden states must give the model's own logits."""
    tokens = _probe(base, 8)
    own = base.head.logits(base.hidden(tokens[None]))
    theirs = base.model(input_ids=tokens[None], use_cache=False).logits[0].float()
    if _far(own, theirs):
        raise InvalidRequestError(
            f"{base.facts.architecture} changes its logits after the output layer in a way that is "
            "not known here; choose another base model"
        )


def _check_causal(base: GenericModel) -> None:
    """No token may see those behind it: what 16 tokens give is the same before any 16 others."""
    tokens = _probe(base, 48)
    one, other = (base.hidden(tokens[None, at])[:16].float() for at in _two_texts(base.device))
    far = (one - other).abs().amax(dim=1) > CHECK_TOLERANCE * one.abs().amax().clamp_min(1e-6)
    # Most rows, not one: where experts are chosen, a last bit may choose another one.
    if int(far.sum()) > 8:
        raise InvalidRequestError(
            f"{base.facts.architecture} lets tokens see those behind them; choose another base model"
        )


def _two_texts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of two texts of 32 tokens that begin with the same 16."""
    at = torch.arange(48, device=device)
    return at[:32], torch.cat((at[:16], at[32:]))


def _packs_exactly(base: GenericModel) -> bool:
    """Whether two sequences in one packed row give what each gives alone."""
    tokens = _probe(base, 40)
    try:
        packed = base.hidden_packed(tokens, (Run(0, 16, 1), Run(16, 24, 1)))
    except (ValueError, TypeError, RuntimeError) as error:
        log.info("packing_unsupported", extra={"error": str(error)})
        return False
    alone = torch.cat([base.hidden(tokens[None, :16]), base.hidden(tokens[None, 16:])])
    return not _far(packed.float(), alone.float())
