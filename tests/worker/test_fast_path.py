"""The fast path gives what the generic one gives, for every family and feature that it serves."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import ForwardBackward
from gristmill_testing import tiny_models
from gristmill_testing.local_runner import datum, load
from gristmill_worker import train
from gristmill_worker.adapter import Adapter, fresh_weights, make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.fast import model
from gristmill_worker.fast.attention import MATMUL_LENGTH_MAX
from gristmill_worker.fast.kernels import EAGER, FEW_ROWS, Kernels, compiled, for_rows
from gristmill_worker.fast.linear import Factors, Linear, packing_works
from gristmill_worker.fast.model import FastModel
from gristmill_worker.fast.output import PackedHead
from gristmill_worker.fast.shape import why_not
from gristmill_worker.team import Team

TOLERANCE = 1e-5
"""max |d| / max |reference|, float32."""

ROPE = {"rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **ROPE}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, **ROPE,
}  # fmt: skip
VARIANTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama, grouped queries": (LlamaConfig, {}),
    "llama, one key head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama, a key head each": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama, wide heads": (LlamaConfig, {"head_dim": 32}),
    "llama, linear rope": (
        LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **ROPE}},
    ),
    "llama, llama3 rope": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama, yarn rope": (LlamaConfig, {"rope_parameters": YARN}),
    "mistral, window": (MistralConfig, {"sliding_window": 16, "head_dim": 16}),
    "mistral, no window": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, window in one layer": (
        Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2, yarn rope": (Qwen2Config, {"rope_parameters": YARN}),
    "qwen3, normed heads": (Qwen3Config, {"head_dim": 16}),
    "qwen3, tied, window in one layer": (
        Qwen3Config,
        {
            "head_dim": 16, "tie_word_embeddings": True,
            "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
        },
    ),
    "qwen3, biases": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Twins:
    """One model on both paths, with equal adapters."""

    generic: BaseModel
    fast: BaseModel
    adapters: tuple[Adapter, Adapter]

    def both(self) -> list[tuple[BaseModel, Adapter]]:
        return [(self.generic, self.adapters[0]), (self.fast, self.adapters[1])]


def twins(folder: Path, dtype: torch.dtype = torch.float32) -> Twins:
    generic, fast = load(folder, dtype, "generic"), load(folder, dtype, "fast")
    layout = generic.layout(8)
    assert (fast.names, fast.shapes) == (generic.names, generic.shapes)
    weights = fresh_weights(layout, 1)
    generator = torch.Generator().manual_seed(2)
    weights[layout.a_size :] = 0.05 * torch.randn(layout.size - layout.a_size, generator=generator)
    first, second = (
        make_adapter(layout, 16, weights, device=torch.device("cpu"), dtype=dtype) for _ in range(2)
    )
    return Twins(generic, fast, (first, second))


def build(folder: Path, variant: str) -> Path:
    kind, changes = VARIANTS[variant]
    config = kind(**{**tiny_models._llama_like(), **changes})
    path: Path = tiny_models._build(folder, 0, config)
    return path


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return twins(build(tmp_path_factory.mktemp("fast") / "model", request.param))


def far(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).abs().max() / reference.abs().max())


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, tiny_models.VOCABULARY, (count,), generator=generator).tolist()


def trained(twin: Twins, lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities and gradient, generic first."""
    rows = [datum(tokens(length, seed)) for seed, length in enumerate(lengths)]
    op = ForwardBackward(loss="cross_entropy", loss_config={}, datums=rows)
    found = []
    for base, adapter in twin.both():
        result, gradient = train.forward_backward(base, adapter, op, 4096, Team())
        logprobs = [torch.tensor(each["logprobs"].tolist()) for each in result.outputs]
        found.append((torch.cat(logprobs), gradient))
    return found


def test_loss_and_gradient_are_those_of_the_generic_path(pair: Twins) -> None:
    reference, found = trained(pair, (5, 17, 17, 40, 3))
    assert far(found[0], reference[0]) <= TOLERANCE
    assert far(found[1], reference[1]) <= TOLERANCE
    assert bool(reference[1].any())


def test_logits_with_and_without_an_adapter_are_those_of_the_generic_path(pair: Twins) -> None:
    prompt = torch.tensor([tokens(33)])
    for adapted in (True, False):
        logits = []
        for base, adapter in pair.both():
            with torch.no_grad(), base.selected(adapter if adapted else None):
                logits.append(base.head.logits(base.hidden(prompt)))
        assert far(logits[1], logits[0]) <= TOLERANCE


def test_decoding_is_that_of_the_generic_path(pair: Twins) -> None:
    """Past every window, over growing room, while rows leave the batch and change places."""
    found = []
    for base, adapter in pair.both():
        with torch.no_grad(), base.selected(adapter):
            cache = base.new_cache()
            states = [base.hidden_cached(torch.tensor([tokens(9)]), cache)[:, -1]]
            cache.repeat(3)
            other = cache.copy()
            rows = torch.tensor(tokens(3, 5))
            for step in range(70):
                states.append(base.hidden_cached(rows[:, None], cache)[:, 0])
                if step == 20:
                    cache.select(torch.tensor([2, 0]))
                    rows = rows[[2, 0]]
                rows = (rows + 7) % tiny_models.VOCABULARY
            states.append(base.hidden_cached(torch.tensor([[1], [2], [3]]), other)[:, 0])
            found.append(torch.cat(states))
    assert far(found[1], found[0]) <= TOLERANCE


def test_decoding_gives_what_a_whole_pass_gives(pair: Twins) -> None:
    """A sliding window that is off by one at its edge would show here."""
    row = tokens(60)
    base, adapter = pair.fast, pair.adapters[1]
    with torch.no_grad(), base.selected(adapter):
        whole = base.hidden(torch.tensor([row]))
        cache = base.new_cache()
        parts = [base.hidden_cached(torch.tensor([row[:7]]), cache)[0]]
        parts += [base.hidden_cached(torch.tensor([[token]]), cache)[0] for token in row[7:]]
    assert far(torch.cat(parts), whole) <= TOLERANCE


def test_segments_beyond_the_matmul_length_take_the_fused_kernel(tmp_path: Path) -> None:
    twin = twins(build(tmp_path / "m", "llama, grouped queries"))
    reference, found = trained(twin, (MATMUL_LENGTH_MAX + 5, MATMUL_LENGTH_MAX, 30))
    assert far(found[0], reference[0]) <= TOLERANCE
    assert far(found[1], reference[1]) <= TOLERANCE


@pytest.mark.parametrize("variant", ["llama, grouped queries", "qwen2", "qwen3, biases"])
def test_in_bf16_the_two_paths_differ_by_rounding_alone(tmp_path: Path, variant: str) -> None:
    """Both are as far from float32 as each other, not further."""
    folder = build(tmp_path / "m", variant)
    exact = trained(twins(folder), (60, 33))[0]
    generic, fast = trained(twins(folder, torch.bfloat16), (60, 33))
    for at in (0, 1):
        theirs = float((generic[at] - exact[at]).norm() / exact[at].norm())
        ours = float((fast[at] - exact[at]).norm() / exact[at].norm())
        assert ours <= 1.2 * theirs + 1e-3


def test_datums_of_one_row_do_not_see_each_other(pair: Twins) -> None:
    """Another neighbour, the same log-probabilities, to the last bit."""

    def scores(neighbour: int) -> list[float]:
        rows = [datum(tokens(20, 1)), datum(tokens(20, neighbour))]
        op = ForwardBackward(loss="cross_entropy", loss_config={}, datums=rows)
        result, _ = train.forward_backward(pair.fast, pair.adapters[1], op, 4096, Team())
        first: list[float] = result.outputs[0]["logprobs"].tolist()
        return first

    assert scores(2) == scores(3)


def test_three_runs_give_the_same_bits(pair: Twins) -> None:
    runs = [trained(pair, (31, 8, 8))[1] for _ in range(3)]
    assert all(torch.equal(run[1], runs[0][1]) for run in runs)
    assert all(torch.equal(run[0], runs[0][0]) for run in runs)


PACKED = [
    pytest.param(
        dtype, error, id=str(dtype),
        marks=pytest.mark.skipif(
            not packing_works(dtype), reason="torch has no packed linear layer on this machine"
        ),
    )
    for dtype, error in ((torch.bfloat16, 2e-2), (torch.float32, TOLERANCE))
]  # fmt: skip
"""Dtypes that are packed, and how far the result may be."""


@pytest.mark.parametrize(("dtype", "error"), PACKED)
@pytest.mark.parametrize("biased", [True, False])
def test_a_packed_layer_gives_what_a_plain_one_gives(
    biased: bool, dtype: torch.dtype, error: float
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    weight, bias, x, dy = (
        draw(48, 64) * 0.1,
        draw(48) if biased else None,
        draw(33, 64),
        draw(33, 48),
    )
    blocks = torch.block_diag(*(draw(4, 16).float() for _ in range(3)))
    factors = Factors(draw(12, 64), (0.5 * blocks).to(dtype))
    found = []
    for pack in (False, True):
        layer = Linear(weight, bias, (16, 16, 16), pack=pack)
        into = [(torch.zeros(4, 64), torch.zeros(16, 4)) for _ in range(3)]
        y, low = layer.forward(x, factors)
        dx = layer.backward(dy, low, factors, into, 0.5)
        found.append((y, dx, layer.plain(x), *(part for pair in into for part in pair)))
    for plain, packed in zip(*found, strict=True):
        assert far(packed.float(), plain.float()) <= error


@pytest.mark.parametrize("variant", ["llama, biases", "llama, tied"])
@pytest.mark.skipif(not packing_works(torch.float32), reason="torch packs no float32 here")
def test_packed_in_float32_the_model_is_still_that_of_the_generic_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    monkeypatch.setattr(model, "packs", lambda _dtype, *, large: not large)
    twin = twins(build(tmp_path / "m", variant))
    assert isinstance(twin.fast, FastModel)
    assert twin.fast.mode == "eager+packed"
    assert isinstance(twin.fast.head, PackedHead)
    runs = [trained(twin, (5, 17, 17, 40, 3)) for _ in range(2)]
    for reference, found in runs:
        assert far(found[0], reference[0]) <= TOLERANCE
        assert far(found[1], reference[1]) <= TOLERANCE
    assert all(torch.equal(*both) for both in zip(runs[0][1], runs[1][1], strict=True))


def test_float32_is_packed_where_the_model_is_large() -> None:
    works = {dtype: packing_works(dtype) for dtype in (torch.float32, torch.bfloat16)}
    assert model.packs(torch.float32, large=True) == works[torch.float32]
    assert not model.packs(torch.float32, large=False)
    assert model.packs(torch.bfloat16, large=False) == works[torch.bfloat16]
    assert not model.packs(torch.float64, large=True)


def test_compiled_kernels_give_what_eager_ones_give(tmp_path: Path) -> None:
    """Within float32's rounding; skipped with a reason where there is no compiler."""
    kernels = compiled(torch.float32, torch.device("cpu"), 48)
    if kernels is EAGER:
        pytest.skip("no compiler for torch.compile here")
    base = load(build(tmp_path / "m", "qwen3, normed heads"), path="fast")
    assert isinstance(base, FastModel)
    adapter = make_adapter(
        base.layout(4), 8, fresh_weights(base.layout(4), 0), device=base.device, dtype=base.dtype
    )
    op = ForwardBackward(
        loss="cross_entropy", loss_config={},
        datums=[datum(tokens(FEW_ROWS)), datum(tokens(17, 1))],
    )  # fmt: skip
    _, eager = train.forward_backward(base, adapter, op, 4096, Team())
    base.decoder.kernels = base.decoder.attention.kernels = kernels
    _, fused = train.forward_backward(base, adapter, op, 4096, Team())
    assert far(fused, eager) <= TOLERANCE


def test_few_rows_run_torchs_operators_but_for_the_mlp() -> None:
    named = {each.name: object() for each in dataclasses.fields(EAGER)}
    kernels = Kernels(**named)  # type: ignore[arg-type]
    few = for_rows(kernels, torch.zeros(FEW_ROWS, 2))
    for name, own in named.items():
        kept = name in {"mode", "swiglu_forward", "swiglu_backward"}
        assert getattr(few, name) is (own if kept else getattr(EAGER, name))
    assert for_rows(kernels, torch.zeros(FEW_ROWS + 1, 2)) is kernels
    assert for_rows(kernels, torch.zeros(FEW_ROWS, 2, device="meta")) is kernels


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "falcon"}, "model type falcon is none of llama"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "activation gelu is not silu"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic"}},
            "rope type dynamic is none of default",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope type dynamic is none of default",
        ),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, ""),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "a part of each head"),
        ({"model_type": "qwen2", "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "llama"}, ""),
    ],
)
def test_a_model_is_served_or_the_reason_is_given(config: dict[str, Any], reason: str) -> None:
    assert reason in why_not(config)
    assert bool(why_not(config)) == bool(reason)


def test_the_path_can_be_chosen_and_is_told(llama_dir: Path, tmp_path: Path) -> None:
    assert load(llama_dir).path == "fast"
    generic = load(llama_dir, path="generic")
    assert (generic.path, generic.why) == ("generic", "chosen by the settings")
    falcon = tiny_models.build_tiny_falcon(tmp_path / "falcon")
    assert load(falcon).path == "generic"
    with pytest.raises(InvalidRequestError, match=r"does not serve .*falcon"):
        load(falcon, path="fast")
