"""The wrapped layers: exact, rounded once, and for every kind of decoder."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Phi3Config
from transformers.pytorch_utils import Conv1D

from gristmill_contracts.errors import InvalidRequestError
from gristmill_testing import tiny_models
from gristmill_testing.local_runner import Client, datum, load, make_runner
from gristmill_worker import generic
from gristmill_worker.adapter import Adapter, fresh_weights, gradient_views, make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.generic import GenericModel
from gristmill_worker.lora import LayerFactors, LayerGradient, LoraLinear, Slot
from gristmill_worker.runs import Run

FAMILIES = (
    "llama", "qwen2", "mistral", "gpt2", "falcon", "falcon_alibi", "bloom", "mpt", "gemma2",
)  # fmt: skip
OWN_ATTENTION = {"Falcon", "Bloom", "Mpt", "Gemma2"}


def random_adapter(base: BaseModel, rank: int = 4, alpha: int = 8, seed: int = 1) -> Adapter:
    """With a B that is not zero."""
    layout = base.layout(rank)
    weights = fresh_weights(layout, seed)
    noise = torch.Generator().manual_seed(seed + 1)
    weights[layout.a_size :] = torch.randn(layout.size - layout.a_size, generator=noise) * 0.05
    return make_adapter(layout, alpha, weights, device=base.device, dtype=base.dtype)


def make_layer(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    if kind == "conv1d":
        layer: nn.Module = Conv1D(24, 16)
        nn.init.normal_(layer.bias)  # type: ignore[arg-type]
    else:
        layer = nn.Linear(16, 24, bias=kind == "linear with bias")
    return layer.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("kind", ["linear", "linear with bias", "conv1d"])
def test_output_and_gradients_are_those_of_the_formula(kind: str) -> None:
    base = make_layer(kind, torch.float32)
    slot = Slot(torch.device("cpu"))
    layer = LoraLinear(base, slot, 0)
    a, b = torch.randn(3, 16), torch.randn(24, 3)
    x, dy = torch.randn(5, 7, 16), torch.randn(5, 7, 24)

    own_a, own_b, own_x = (t.clone().requires_grad_() for t in (a, b, x))
    expected = base(own_x) + 2.5 * own_x @ own_a.t() @ own_b.t()
    expected.backward(dy)

    gradient = LayerGradient(torch.ones_like(a), torch.ones_like(b))
    slot.factors, slot.gradient, slot.scale = [LayerFactors(a, 2.5 * b)], [gradient], 2.5
    given = x.clone().requires_grad_()
    found = layer(given)
    found.backward(dy)
    assert torch.allclose(found, expected, atol=1e-5)
    assert given.grad is not None
    assert torch.allclose(given.grad, own_x.grad, atol=1e-5)
    assert torch.allclose(gradient.a - 1, own_a.grad, atol=1e-4)  # it adds to what is there
    assert torch.allclose(gradient.b - 1, own_b.grad, atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "linear with bias", "conv1d"])
def test_a_small_update_is_added_before_the_rounding(kind: str) -> None:
    """An update of an eighth of a bf16 step survives on average; after the rounding it is gone."""
    torch.manual_seed(1)
    rows, width = 4096, 16
    base = make_layer(kind, torch.bfloat16)
    slot = Slot(torch.device("cpu"))
    layer = LoraLinear(base, slot, 0)
    x = torch.randn(rows, width).bfloat16()
    a = torch.randn(2, width).bfloat16()
    b = (torch.randn(24, 2) * 2e-4).bfloat16()
    plain = layer(x)
    slot.factors = [LayerFactors(a, b)]
    exact = (x.float() @ a.float().t()) @ b.float().t()
    found = layer(x).float() - plain.float()
    naive = (plain + exact.bfloat16()).float() - plain.float()

    def share(update: Tensor) -> float:
        """How much of the update is in the output: its regression on the exact one."""
        return float((update * exact).sum() / exact.square().sum())

    assert share(found) == pytest.approx(1.0, abs=0.05)
    assert share(naive) < 0.9


def test_alpha_over_rank_scales_the_update(llama_dir: Path) -> None:
    """r 8, alpha 16: the update is 2 B A x, not 16 B A x."""
    llama = load_generic(llama_dir)
    adapter = random_adapter(llama, rank=8, alpha=16)
    name, layer = next(iter(llama.layers.items()))
    a, b = adapter.layout.views(adapter.weights)[0]
    x = torch.randn(20, layer.shape[1])
    with torch.no_grad():
        plain = layer(x)
        with llama.selected(adapter):
            moved = layer(x)
    assert torch.allclose(moved - plain, 2 * x @ a.t() @ b.t(), atol=1e-5), name


def load_generic(folder: Path) -> GenericModel:
    base = load(folder, path="generic")
    assert isinstance(base, GenericModel)
    return base


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> BaseModel:
    return load(family_dir(request.param))


def peft_twin(base: BaseModel, folder: Path, adapter: Adapter) -> Any:
    """The same model and adapter in transformers and PEFT."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=base.dtype).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that it sets fan_in_fan_out itself
        twin = get_peft_model(
            model,
            LoraConfig(
                r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=0.0,
                target_modules=sorted({n.rpartition(".")[2] for n in base.names}),
            ),
        )  # fmt: skip
    modules = dict(twin.get_base_model().named_modules())
    for name, (a, b) in zip(
        adapter.layout.names, adapter.layout.views(adapter.weights), strict=True
    ):
        modules[name].lora_A["default"].weight.data.copy_(a)
        modules[name].lora_B["default"].weight.data.copy_(b)
    return twin


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_but_the_head_is_wrapped(
    family: str, family_dir: Callable[[str], Path]
) -> None:
    base = load_generic(family_dir(family))
    head = base.model.get_output_embeddings()
    left = [m for m in base.model.modules() if isinstance(m, nn.Linear | Conv1D)]
    assert left == [head]
    assert len(base.layers) >= 8


def test_logits_and_gradients_equal_those_of_peft(
    base: BaseModel, request: pytest.FixtureRequest, family_dir: Callable[[str], Path]
) -> None:
    folder = family_dir(request.node.callspec.params["base"])
    adapter = random_adapter(base)
    twin = peft_twin(base, folder, adapter)
    tokens = torch.arange(3, 43) % 500
    targets = torch.roll(tokens, -1)
    logits = twin(input_ids=tokens[None]).logits[0]
    loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
    loss.backward()

    client = Client(make_runner(base, folder.parent / "artifacts"), "u", "")
    client.rank, client.alpha = adapter.rank, adapter.alpha
    client.runner.sessions["u"] = _session_with(base, adapter)
    result = client.train([datum(tokens.tolist())])
    assert result.metrics["loss_sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    own = gradient_views(adapter.layout, client.session.gradient)
    modules = dict(twin.get_base_model().named_modules())
    for name, (a, b) in zip(adapter.layout.names, own, strict=True):
        for mine, side in ((a, "lora_A"), (b, "lora_B")):
            theirs = getattr(modules[name], side)["default"].weight.grad
            assert torch.allclose(mine, theirs, atol=2e-4, rtol=1e-3), f"{name} {side}"
            assert bool(mine.any()), f"{name} {side} got no gradient"


def _session_with(base: BaseModel, adapter: Adapter) -> Any:
    from gristmill_worker.session import new_session

    session = new_session(
        base, uid="u", state_dir="", seed=0, rank=adapter.rank, alpha=adapter.alpha
    )
    session.adapter = adapter
    return session


def test_packed_sequences_do_not_see_each_other(base: BaseModel) -> None:
    """Also beyond the sliding window of 16. Some families' own attention cannot be replaced."""
    assert base.packed == (base.facts.architecture.removesuffix("ForCausalLM") not in OWN_ATTENTION)
    if not base.packed:
        return
    adapter = random_adapter(base)
    tokens = torch.arange(5, 95) % 512
    table = (Run(0, 40, 1), Run(40, 20, 2), Run(80, 10, 1))
    with base.selected(adapter), torch.no_grad():
        packed = base.hidden_packed(tokens, table)
        for start, end in ((0, 40), (40, 60), (60, 80), (80, 90)):
            alone = base.hidden(tokens[None, start:end])
            assert torch.allclose(packed[start:end], alone, atol=2e-5)
        other = tokens.clone()
        other[:40] += 7
        changed = base.hidden_packed(other, table)
    assert torch.equal(changed[40:], packed[40:])
    assert not torch.equal(changed[:40], packed[:40])


@pytest.mark.parametrize("company", [[60], [60, 9, 9], [9, 60]])
def test_a_short_datum_beside_a_long_one_keeps_its_own_positions(
    company: list[int], tmp_path: Path
) -> None:
    """A rope that turns otherwise beyond 32 tokens looks at the longest datum of a pass."""
    size = 64 // 4 // 2
    config = Phi3Config(
        **tiny_models._llama_like(), original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10_000.0, "factor": 32.0,
            "short_factor": [1.0] * size, "long_factor": [8.0] * size,
            "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    base = load(tiny_models._build(tmp_path / "m", 0, config))
    client = Client(make_runner(base, tmp_path / "a"), "u", "")
    client.open()
    probe = [(7 * at) % 500 + 5 for at in range(20)]
    others = [datum([(3 * at) % 500 + 5 for at in range(length)]) for length in company]
    (alone,) = client.score([datum(probe)])
    assert client.score([datum(probe), *others])[0] == pytest.approx(alone, abs=1e-5)


def test_a_model_whose_tokens_see_those_behind_them_is_refused(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does BLOOM under masks that were made for another attention than its own."""
    folder = family_dir("bloom")
    assert not generic._takes_our_attention(folder)
    assert generic._takes_our_attention(family_dir("llama"))
    monkeypatch.setattr(generic, "_takes_our_attention", lambda folder: True)
    with pytest.raises(InvalidRequestError, match="see those behind them"):
        load(folder)


def test_two_adapters_take_turns_on_one_base(llama: BaseModel) -> None:
    first, second = random_adapter(llama, seed=1), random_adapter(llama, seed=2, rank=8)
    tokens = torch.arange(3, 23)[None]
    outs = []
    with torch.no_grad():
        for adapter in (first, second, None, first, None):
            with llama.selected(adapter):
                outs.append(llama.hidden(tokens))
    assert torch.equal(outs[0], outs[3])
    assert torch.equal(outs[2], outs[4])
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_a_fresh_adapter_changes_nothing_and_depends_on_its_seed(llama: BaseModel) -> None:
    layout = llama.layout(8)
    weights = fresh_weights(layout, 5)
    adapter = make_adapter(layout, 16, weights, device=llama.device, dtype=llama.dtype)
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        plain = llama.hidden(tokens)
        with llama.selected(adapter):
            assert torch.equal(llama.hidden(tokens), plain)
    assert torch.equal(fresh_weights(layout, 5), weights)
    assert not torch.equal(fresh_weights(layout, 6), weights)
    a, _ = layout.views(weights)[0]
    bound = a.shape[1] ** -0.5
    assert 0.9 * bound < float(a.abs().max()) <= bound


def test_an_adapter_owns_its_weights(llama: BaseModel) -> None:
    weights = fresh_weights(llama.layout(4), 0)
    adapter = make_adapter(llama.layout(4), 8, weights, device=llama.device, dtype=llama.dtype)
    before = copy.deepcopy(adapter.weights)
    weights.zero_()
    assert torch.equal(adapter.weights, before)
