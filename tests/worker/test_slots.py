"""The places of single rows: how much room they have, and that what others left there changes nothing."""

import pytest
import torch

from gristmill_worker.fast.cache import FastCache
from gristmill_worker.fast.shape import Shape
from gristmill_worker.fast.slots import Pools, room_for

SHAPE = Shape(
    family="llama", hidden=16, heads=4, kv_heads=2, head_size=4, inner=8, layers=2, vocabulary=9,
    eps=1e-5, tied=True, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False,
    windows=(None, None),
)  # fmt: skip


@pytest.mark.parametrize(
    ("length", "room"),
    [(1, 64), (64, 64), (65, 128), (97, 128), (128, 128), (129, 192), (192, 192), (193, 256),
     (257, 384), (385, 512), (1025, 1536), (1537, 2048)],
)  # fmt: skip
def test_a_room_is_a_power_of_two_or_three_quarters_of_one(length: int, room: int) -> None:
    assert room_for(length) == room


def prompt(length: int, seed: int) -> FastCache:
    """Keys and values of a prompt, drawn by chance."""
    maker = torch.Generator().manual_seed(seed)
    cache = FastCache(SHAPE)
    cache.prompt_room(length, torch.empty(0))
    for layer in range(SHAPE.layers):
        cache.put_prompt(
            layer, *(torch.randn(length, 2, 4, generator=maker) for _ in ("key", "value"))
        )
    cache.prefix_length = length
    return cache


def looked_back(pools: Pools, lengths: list[int]) -> torch.Tensor:
    """What the rows of the only pool see, each up to its own length."""
    (pool,) = pools.live()
    hidden = torch.arange(pool.room)[None] >= torch.tensor(lengths)[:, None]
    return pool.attend(1, torch.ones(len(lengths), 4, 4), hidden)


def test_what_a_row_left_that_was_not_a_number_reaches_nobody() -> None:
    """Its slot goes to a shorter prompt; and the row that moved into a gap takes its own rest with it."""
    expected = []
    for seed, length in ((5, 3), (6, 7)):
        clean = Pools(SHAPE)
        clean.take(prompt(length, seed))
        expected.append(looked_back(clean, [length]))
    pools = Pools(SHAPE)
    broken = [pools.take(prompt(20, seed)) for seed in range(2)]
    kept = pools.take(prompt(7, 6))
    for each in broken[0].pool.values:
        each[:2] = torch.nan
    for one in broken:
        one.release()
    assert kept.at == 0
    torch.testing.assert_close(looked_back(pools, [7]), expected[1])
    pools.take(prompt(3, 5))
    torch.testing.assert_close(looked_back(pools, [7, 3]), torch.cat([expected[1], expected[0]]))
