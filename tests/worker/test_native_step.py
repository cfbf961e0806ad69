"""The compiled decode step gives what torch's operators give, and each row the same bits in any batch."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from gristmill_testing import tiny_models
from gristmill_testing.local_runner import Client, load, make_runner, ref
from gristmill_testing.samples_together import FIRST, ask, finish
from gristmill_testing.samples_together import mixed as mixed_requests
from gristmill_worker.adapter import Adapter, make_adapter
from gristmill_worker.base_model import Part
from gristmill_worker.fast.library import step_library
from gristmill_worker.fast.linear import packing_works
from gristmill_worker.fast.model import FastModel
from gristmill_worker.fast.native import NativeStep, native_step

pytestmark = pytest.mark.skipif(
    not packing_works(torch.bfloat16) or step_library() is None,
    reason="no processor that multiplies bf16 here, or no compiler",
)

SHAPE = {
    **tiny_models._llama_like(), "hidden_size": 128, "intermediate_size": 192, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "heads wider than the model": lambda: LlamaConfig(
        **{**SHAPE, "num_key_value_heads": 2, "head_dim": 64}
    ),
    "biases of q, k and v": lambda: Qwen2Config(**SHAPE),
    "norms of q and k": lambda: Qwen3Config(**SHAPE),
    "a window": lambda: MistralConfig(**SHAPE, sliding_window=8),
}
FAR = 0.06
"""Of the largest value; bf16 has a step of 0.004 there, and two layers add up a few of them: 0.02 here."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FastModel]:
    made: dict[str, FastModel] = {}

    def find(name: str) -> FastModel:
        if name not in made:
            folder = tiny_models._build(tmp_path_factory.mktemp("m") / "m", 0, CONFIGS[name]())
            base = load(folder, torch.bfloat16)
            assert isinstance(base, FastModel)
            made[name] = base
        return made[name]

    return find


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
    torch.set_num_threads(1)


def adapter(base: FastModel, rank: int, seed: int) -> Adapter:
    """Both factors drawn by chance, so that it changes much."""
    layout = base.layout(rank)
    weights = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)) * 0.1
    return make_adapter(layout, 2 * rank, weights, device=base.device, dtype=base.dtype)


def begun(
    base: FastModel, wanted: Sequence[tuple[int, int, Adapter | None]]
) -> list[Part]:  # fmt: skip
    """Prompts (length, rows, adapter) that have run; each row has a token of its own next."""
    found = []
    for number, (length, rows, own) in enumerate(wanted):
        cache = base.new_cache(length)
        with base.selected(own):
            base.prefill(torch.arange(20 + number, 20 + number + length), cache)
            cache_of_rows = base.begin(cache, rows)
        tokens = torch.arange(40 + number, 40 + number + rows)
        found.append(Part(adapter=own, tokens=tokens, cache=cache_of_rows))
    return found


def stepped(base: FastModel, stepper: Any, parts: Sequence[Part], steps: int = 3) -> Tensor:
    """(steps, B, h) of so many steps, each row with tokens that do not depend on what came out."""
    base._native = stepper
    found = []
    for at in range(steps):
        moved = [Part(adapter=p.adapter, tokens=p.tokens + 7 * at, cache=p.cache) for p in parts]
        found.append(base.decode(moved))
    for part in parts:
        part.cache.release()
    return torch.stack(found).float()


def compiled(base: FastModel) -> NativeStep:
    found = native_step(base.decoder)
    assert found is not None
    return found


def mixed(base: FastModel) -> list[tuple[int, int, Adapter | None]]:
    """Slots of two sizes, groups that share a prompt, adapters of two ranks, and rows without one: more
    in all than are worked on at once."""
    one, two = adapter(base, 8, 1), adapter(base, 5, 2)
    return [
        (3, 1, one), (9, 1, None), (70, 1, two), (5, 3, one), (12, 2, None), (63, 1, two),
        (30, 4, two), (17, 1, one), (8, 45, one),
    ]  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_compiled_step_gives_what_torchs_operators_give(
    name: str, models: Callable[[str], FastModel]
) -> None:
    base = models(name)
    wanted = mixed(base)
    expected = stepped(base, base.decoder, begun(base, wanted))
    got = stepped(base, compiled(base), begun(base, wanted))
    assert (got - expected).abs().max() <= FAR * expected.abs().max()


def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(
    models: Callable[[str], FastModel],
) -> None:
    base = models("llama")
    wanted = mixed(base)
    native = compiled(base)
    together = stepped(base, native, begun(base, wanted))
    parts = begun(base, wanted)  # on one thread: prompts are torch's
    torch.set_num_threads(3)
    assert torch.equal(stepped(base, native, parts), together)
    torch.set_num_threads(1)
    start = 0
    for number, (_, rows, _) in enumerate(wanted):
        alone = begun(base, wanted)
        for part in alone[:number] + alone[number + 1 :]:
            part.cache.release()
        got = stepped(base, native, alone[number : number + 1])
        assert torch.equal(got, together[:, start : start + rows])
        start += rows


def test_an_adapter_is_seen_by_its_own_rows_alone(models: Callable[[str], FastModel]) -> None:
    base = models("llama")
    native, own = compiled(base), adapter(base, 8, 1)
    plain = stepped(base, native, begun(base, [(5, 1, None), (6, 1, None)]))
    parts = begun(base, [(5, 1, None), (6, 1, None)])
    served = [parts[0], Part(adapter=own, tokens=parts[1].tokens, cache=parts[1].cache)]
    got = stepped(base, native, served)
    assert torch.equal(got[:, 0], plain[:, 0])
    assert (got[:, 1] - plain[:, 1]).abs().max() > 10 * FAR


def test_what_is_not_a_number_stays_so_and_reaches_no_other_row(
    models: Callable[[str], FastModel],
) -> None:
    """An adapter that ran away in its queries alone: scores without a number are no even weights."""
    base = models("llama")
    native, broken = compiled(base), adapter(base, 8, 1)
    a, _ = broken.layout.views(broken.weights)[0]
    wanted = [(5, 1, None), (6, 1, None)]
    plain = stepped(base, native, begun(base, wanted))
    parts = begun(base, wanted)
    a.fill_(torch.nan)
    broken.sync()
    served = [parts[0], Part(adapter=broken, tokens=parts[1].tokens, cache=parts[1].cache)]
    got = stepped(base, native, served)
    assert torch.equal(got[:, 0], plain[:, 0])
    assert got[:, 1].isnan().all()


def test_batch_invariant_samples_have_the_same_bits_in_any_batch(
    models: Callable[[str], FastModel], tmp_path: Path
) -> None:
    base = models("llama")
    base._native, base.invariant = compiled(base), True
    try:
        client = Client(make_runner(base, tmp_path / "a"), FIRST, str(tmp_path / "s"))
        client.open()
        requests = mixed_requests([ref(client.save_weights()) for _ in range(3)])
        alone = [client.sample(**options) for options in requests]
        for order in (range(7), (6, 3, 5, 0, 2, 4, 1)):
            asked = {at: ask(client, **requests[at]) for at in order}
            finish(client)
            assert [asked[at].result for at in range(7)] == alone
    finally:
        base._native, base.invariant = None, False


def test_a_small_model_and_one_in_float32_keep_torchs_operators(
    models: Callable[[str], FastModel], llama_dir: Path
) -> None:
    assert native_step(load(llama_dir).decoder) is None  # type: ignore[attr-defined]
    base = models("llama")
    base._native = None
    assert base._stepper() is base.decoder
    base._native, base.compiles = None, True
    assert isinstance(base._stepper(), NativeStep)
    base._native, base.compiles = None, False


def test_without_a_compiler_or_a_folder_of_its_own_there_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding goes on with torch's operators. What others may have written is not loaded."""
    made = step_library.__wrapped__
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert made() is None
    monkeypatch.delenv("CXX")
    tmp_path.chmod(0o777)
    assert made() is None
    tmp_path.chmod(0o700)
    assert made() is not None
    (built,) = tmp_path.glob("*.so")
    before = built.stat().st_ino
    assert made() is not None
    assert built.stat().st_ino == before
