"""Layers that run again for the backward pass: fewer bytes kept, the same bits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import ForwardBackward
from gristmill_testing.local_runner import Client, datum, load, make_runner
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_worker import memory
from gristmill_worker.adapter import fresh_weights, gradient_views, make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.recompute import ALWAYS_KEPT_BYTES, Keeper, layers_kept
from gristmill_worker.room import Room
from gristmill_worker.runs import Run
from gristmill_worker.sizes import Sizes, sizes_of

ROWS = [datum(list(range(5, 45))), datum(list(range(60, 100))), datum([7, 8, 9])]
LAYERS = 4


class Keeps:
    """Always as many, and remembers what it was asked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[tuple[Sequence[Run], int]] = []

    def layers(self, table: Sequence[Run], rank: int) -> int:
        self.asked.append((table, rank))
        return self.count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("recompute") / "m", num_hidden_layers=LAYERS)


def gradient(base: BaseModel, tmp_path: Path, turns: int = 2) -> Tensor:
    client = Client(make_runner(base, tmp_path / "a"), "u", "")
    client.open()
    for _ in range(turns):
        client.train(ROWS)
        client.step()
    client.train(ROWS)
    return client.session.gradient.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [0, 1, LAYERS - 1, LAYERS])
def test_the_gradient_has_the_same_bits(
    folder: Path, tmp_path: Path, dtype: torch.dtype, kept: int
) -> None:
    expected = gradient(load(folder, dtype), tmp_path / "all")
    base = load(folder, dtype)
    keeps = base.keeper = Keeps(kept)
    found = gradient(base, tmp_path / "some")
    assert torch.equal(found, expected)
    assert bool(expected.any())
    assert {rank for _, rank in keeps.asked} == {8}


def held(tape: list[Any]) -> int:
    """Bytes of all tensors of the blocks on a tape, each storage once."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each)
        elif hasattr(value, "__slots__"):
            for name in value.__slots__:
                visit(getattr(value, name, None))

    visit(tape)
    return sum(found.values())


@pytest.mark.parametrize("kept", [0, 1, LAYERS])
def test_what_is_kept_is_what_was_reckoned(folder: Path, kept: int) -> None:
    base: Any = load(folder)
    layout = base.layout(4)
    adapter = make_adapter(
        layout, 8, fresh_weights(layout, 1), device=base.device, dtype=base.dtype
    )
    table = (Run(0, 40, 2), Run(80, 3, 1))
    tape: list[Any] = []
    with base.selected(adapter, gradient_views(layout, torch.zeros(layout.size))):
        base.decoder.forward(torch.arange(83), table, base.now, tape, kept)
    tape.pop()  # the final norm's
    sizes = sizes_of(base)
    whole = memory.kept_bytes(sizes, 83, table, 4)
    inputs = LAYERS * 83 * sizes.hidden * sizes.item_bytes
    reckoned = inputs + kept * (whole - inputs) // LAYERS
    assert 0.7 * reckoned <= held(tape) <= 1.35 * reckoned


def sizes(layers: int = 30) -> Sizes:
    """Of a model with 135 million parameters."""
    h, q, kv, f = 576, 576, 192, 1536
    block = ((q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f))
    return Sizes(
        path="fast", item_bytes=2, layers=layers, hidden=h, heads=9, kv_heads=3, head_size=64,
        inner=f, vocabulary=49_152, context=8192, linears=block * layers,
        windows=(None,) * layers, qk_norm=False,
    )  # fmt: skip


TABLE = (Run(0, 256, 8),)


def test_with_room_enough_every_layer_keeps_all() -> None:
    whole = memory.kept_bytes(sizes(), 2048, TABLE, 16)
    assert layers_kept(sizes(), TABLE, 16, 2 * whole) == 30
    assert layers_kept(sizes(), TABLE, 16, 2 * whole - 2) < 30


def test_less_room_keeps_fewer_layers_and_never_more_than_half_of_it() -> None:
    s = sizes()
    whole = memory.kept_bytes(s, 2048, TABLE, 16)
    inputs = s.layers * 2048 * s.hidden * s.item_bytes
    each = (whole - inputs) // s.layers
    counts = []
    for free in range(0, 2 * whole + whole // 7, whole // 7):
        count = layers_kept(s, TABLE, 16, free)
        counts.append(count)
        assert count == 0 or inputs + count * each <= free // 2
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 30)


def test_small_passes_do_not_look_and_unknown_memory_keeps_all() -> None:
    asked: list[int] = []

    def available() -> int | None:
        asked.append(1)
        return 0

    keeper = Keeper(sizes(), available)
    assert memory.kept_bytes(sizes(), 32, (Run(0, 32, 1),), 16) < ALWAYS_KEPT_BYTES
    assert keeper.layers((Run(0, 32, 1),), 16) == 30
    assert asked == []
    assert keeper.layers(TABLE, 16) == 0
    assert asked == [1]
    assert Keeper(sizes(), lambda: None).layers(TABLE, 16) == 30


def test_what_fits_with_layers_that_run_again_is_not_refused() -> None:
    """And is refused where even the inputs of all layers would not fit."""
    op = ForwardBackward(
        loss="cross_entropy", loss_config={}, datums=[datum([5] * 256) for _ in range(8)]
    )
    batch = memory.Batch(
        lengths=(256,) * 8, targets=1, budget=2048, packed=True, world=1, rank=16, trains=True
    )
    whole = memory.batch_bytes(sizes(), batch)
    least = memory.batch_bytes(sizes(), replace(batch, kept_bytes_max=0))
    assert least < 0.6 * whole

    def check(free: int, *, recomputes: bool) -> None:
        room = Room(
            sizes(), budget=2048, packed=True, world=1, available=lambda: free,
            recomputes=recomputes,
        )  # fmt: skip
        room.check(op, 16)

    check(whole + 1, recomputes=False)
    with pytest.raises(InvalidRequestError, match="the operation needs about"):
        check(whole - 1, recomputes=False)
    check(whole - 1, recomputes=True)
    with pytest.raises(InvalidRequestError, match="the operation needs about"):
        check(least - 1, recomputes=True)
