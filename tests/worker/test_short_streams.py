"""What a short request is spared: threads for small products, a product of each block, factors made anew."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill_contracts.errors import GristmillError
from gristmill_contracts.operations import ForwardBackward
from gristmill_testing.local_runner import Client, datum, load, make_runner
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_worker import memory, train
from gristmill_worker.adapter import Adapter, fresh_weights, make_adapter
from gristmill_worker.fast import owed
from gristmill_worker.fast.factors import Stacks
from gristmill_worker.fast.model import FastModel
from gristmill_worker.fast.threads import ALONE_FLOPS_MAX, alone_if_small
from gristmill_worker.fast.weights import PROJECTIONS
from gristmill_worker.sizes import sizes_of
from gristmill_worker.team import Team

LAYERS = 3
RANK, ALPHA = 4, 6
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("short") / "m", num_hidden_layers=LAYERS)


def fast(folder: Path, dtype: torch.dtype = torch.float32) -> FastModel:
    base = load(folder, dtype, path="fast")
    assert isinstance(base, FastModel)
    return base


def adapter_of(base: FastModel) -> Adapter:
    """B is not zero, so that A has a gradient."""
    layout = base.layout(RANK)
    weights = fresh_weights(layout, 1)
    maker = torch.Generator().manual_seed(2)
    weights[layout.a_size :] = 0.1 * torch.randn(layout.size - layout.a_size, generator=maker)
    return make_adapter(layout, ALPHA, weights, device=base.device, dtype=base.dtype)


def gradient(base: FastModel, *lengths: int) -> Tensor:
    datums = [datum([5 + (at + 7 * n) % 300 for at in range(n)]) for n in lengths]
    op = ForwardBackward(loss="cross_entropy", loss_config={}, datums=datums)
    return train.forward_backward(base, adapter_of(base), op, 4096, Team())[1]


class Keeps:
    def __init__(self, count: int) -> None:
        self.count = count

    def layers(self, _table: object, _rank: int) -> int:
        return self.count


# --- what blocks are owed --------------------------------------------------------------------------


@pytest.fixture
def paid(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks of each payment."""
    found: list[int] = []
    whole = owed.pay

    def counting(debts: list[owed.Owed], *rest: object) -> None:
        found.append(len(debts))
        whole(debts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("gristmill_worker.fast.decoder.pay", counting)
    return found


@pytest.mark.parametrize("lengths", [(20,), (1,), (16, 16, 16, 16), (30, 5, 5)])
def test_a_short_streams_gradient_is_that_of_a_product_of_each_block(
    folder: Path, paid: list[int], monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    found = gradient(fast(folder), *lengths)
    assert paid == [LAYERS] * 4
    monkeypatch.setattr(owed, "ROWS_MAX", 0)
    expected = gradient(fast(folder), *lengths)
    assert len(paid) == 4
    assert int(expected.count_nonzero()) > expected.numel() // 2
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-6


def test_a_longer_stream_pays_as_it_goes(folder: Path, paid: list[int]) -> None:
    gradient(fast(folder), owed.ROWS_MAX + 1)
    assert paid == []


def test_so_does_one_of_a_large_model(
    folder: Path, paid: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = fast(folder)
    columns = owed.owed_columns(base.fused, RANK)
    monkeypatch.setattr(owed, "BYTES_MAX", 20 * LAYERS * columns * 4)
    gradient(base, 20)
    assert len(paid) == 4
    gradient(base, 21)
    assert len(paid) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [0, 1])
def test_layers_that_run_again_change_no_bit_of_a_short_stream(
    folder: Path, paid: list[int], dtype: torch.dtype, kept: int
) -> None:
    base = fast(folder, dtype)
    expected = gradient(base, 20, 9)
    base.keeper = Keeps(kept)
    assert torch.equal(gradient(base, 20, 9), expected)
    assert len(paid) == 8


@pytest.mark.parametrize("rank", [1, 8])
def test_what_is_owed_is_foretold(folder: Path, rank: int) -> None:
    base = fast(folder)
    columns = owed.owed_columns(base.fused, rank)
    bytes_owed = owed.owed_bytes(20, LAYERS, columns, 4)
    assert bytes_owed == 20 * LAYERS * columns * 4
    copies = memory.compute_copies(sizes_of(base), rank)
    assert memory.debts(sizes_of(base), 20, rank) == bytes_owed + bytes_owed // 2 + copies
    assert memory.debts(sizes_of(base), owed.ROWS_MAX + 1, rank) == 0


# --- factors ---------------------------------------------------------------------------------------


def test_factors_are_the_masters_side_by_side(folder: Path) -> None:
    base = fast(folder)
    adapter = adapter_of(base)
    with base.selected(adapter):
        found = base.now.factors
    assert found is not None
    views = iter(adapter.layout.views(adapter.weights))
    for index, each in enumerate(found):
        own = [next(views) for _ in PROJECTIONS[index % 4]]
        assert torch.equal(each.a, torch.cat([a for a, _ in own]))
        assert torch.equal(each.b_t, torch.block_diag(*(b.t() * adapter.scale for _, b in own)))
        assert each.a.is_contiguous()
        assert each.b_t.is_contiguous()


def test_another_version_fills_the_same_factors(folder: Path) -> None:
    base = fast(folder)
    adapter = adapter_of(base)
    with base.selected(adapter):
        first = base.now.factors
    stacks = adapter.fused
    assert isinstance(stacks, Stacks)
    adapter.weights = 2 * adapter.weights
    adapter.sync()
    assert first is not None
    before = [each.a.clone() for each in first]
    with base.selected(adapter):
        assert base.now.factors is first
    for each, old in zip(first, before, strict=True):
        assert torch.equal(each.a, 2 * old)


@pytest.mark.parametrize("path", ["fast", "generic"])
def test_a_version_is_copied_once(folder: Path, path: str) -> None:
    base = load(folder, path=path)  # type: ignore[arg-type]
    layout = base.layout(RANK)
    adapter = make_adapter(
        layout, ALPHA, fresh_weights(layout, 1), device=base.device, dtype=base.dtype
    )
    if path == "generic":
        first = adapter.factors
        adapter.weights += 1  # nobody was told: no new version
        assert torch.equal(adapter.factors[0].a + 1, adapter.layout.views(adapter.weights)[0][0])
        adapter.sync()
        assert torch.equal(adapter.factors[0].a, adapter.layout.views(adapter.weights)[0][0])
        assert adapter.factors is first
        return
    with base.selected(adapter):
        pass
    stacks = adapter.fused
    adapter.weights += 1
    with base.selected(adapter):
        assert adapter.fused is stacks
        assert not torch.equal(stacks.a[0][0, :RANK], layout.views(adapter.weights)[0][0])


# --- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_small_products_run_on_one_thread_and_what_follows_on_all() -> None:
    with alone_if_small(ALONE_FLOPS_MAX, CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with alone_if_small(ALONE_FLOPS_MAX + 1, CPU):
        assert torch.get_num_threads() == 2
    with alone_if_small(1, torch.device("cuda")):
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_product_that_fails_gives_the_threads_back() -> None:
    with pytest.raises(RuntimeError), alone_if_small(1, CPU):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_two_runs_have_the_same_bits_with_two_threads(folder: Path) -> None:
    base = fast(folder, torch.bfloat16)
    first = gradient(base, 33)
    assert torch.equal(gradient(base, 33), first)
    assert torch.get_num_threads() == 2


# --- the gradient's own buffer ---------------------------------------------------------------------


def test_the_first_request_fills_the_gradient_and_one_that_fails_empties_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = fast(folder)
    client = Client(make_runner(base, tmp_path / "a", budget=16), "u", str(tmp_path / "s"))
    client.open()
    rows = [datum(list(range(at, at + 16))) for at in (5, 50)]
    own = client.session.gradient
    backward = base.decoder.backward
    passes: list[int] = []

    def failing(*given: Any) -> None:
        backward(*given)
        passes.append(int(own.count_nonzero()))
        if len(passes) == 2:
            raise RuntimeError("bug")

    with monkeypatch.context() as patched:
        patched.setattr(base.decoder, "backward", failing)
        with pytest.raises(GristmillError, match="bug"):
            client.train(rows)
    assert passes[0] > 0
    assert client.session.gradient is own
    assert not bool(own.any())
    client.train(rows)
    assert client.session.gradient is own
    alone = own.clone()
    client.train(rows)
    assert torch.allclose(client.session.gradient, 2 * alone)
    assert client.session.counters.accumulated == 2
