"""A checksum differs wherever a byte does, and is the same however it is reckoned."""

import hashlib

import pytest
import torch
from torch import Tensor

from gristmill_worker.checksum import LANES, checksum, folded, multipliers

WORDS = 2 * LANES
"""float32 values of a block that is folded at once."""


def drawn(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [0, 1, 7, WORDS - 1, WORDS, 3 * WORDS + 5])
def test_it_fits_63_bits_and_follows_from_step_and_values(size: int) -> None:
    found = checksum(3, drawn(size))
    assert 0 <= found < 2**63
    assert found == checksum(3, drawn(size).clone())
    assert found != checksum(4, drawn(size))
    assert size == 0 or found != checksum(3, drawn(size, 1))


@pytest.mark.parametrize("at", [0, 1, WORDS - 1, WORDS, 2 * WORDS + 17, 3 * WORDS, 3 * WORDS + 4])
@pytest.mark.parametrize("bit", [0, 15, 30, 31])
def test_one_changed_bit_is_seen_wherever_it_is(at: int, bit: int) -> None:
    values = drawn(3 * WORDS + 5)
    before = checksum(1, values)
    values.view(torch.int32)[at] ^= torch.tensor(1, dtype=torch.int32) << bit
    assert checksum(1, values) != before


@pytest.mark.parametrize("apart", [1, 2, WORDS, 2 * WORDS])
def test_two_signs_that_change_are_seen(apart: int) -> None:
    """A sign is the highest bit: the one that is lost where a sum's multiplier shifts it out."""
    for at in range(8):
        values = drawn(3 * WORDS)
        before = checksum(1, values)
        values[at] *= -1
        values[at + apart] *= -1
        assert checksum(1, values) != before


@pytest.mark.parametrize("apart", [1, 2, WORDS, 2 * WORDS])
def test_two_values_that_trade_places_are_seen(apart: int) -> None:
    values = drawn(3 * WORDS)
    before = checksum(1, values)
    first, second = values[5].clone(), values[5 + apart].clone()
    values[5], values[5 + apart] = second, first
    assert checksum(1, values) != before


def test_which_buffer_holds_what_is_seen() -> None:
    first, second = drawn(WORDS + 3), drawn(WORDS + 3, 1)
    assert checksum(1, first, second) != checksum(1, second, first)
    assert checksum(1, first[:WORDS], first[WORDS:]) != checksum(1, first)


def test_folding_is_the_sum_that_it_says() -> None:
    words = torch.randint(
        -(2**63), 2**63 - 1, (3 * LANES,), generator=torch.Generator().manual_seed(2)
    )
    found = folded(words)
    for lane in (0, 1, LANES - 1):
        own = [int(words[block * LANES + lane]) for block in range(3)]
        factors = [multipliers(block) for block in range(3)]
        whole = sum(word * first for word, (first, _) in zip(own, factors, strict=True))
        upper = sum((word >> 32) * second for word, (_, second) in zip(own, factors, strict=True))
        assert [int(each) % 2**64 for each in found[:, lane]] == [whole % 2**64, upper % 2**64]


def test_multipliers_are_odd_and_differ() -> None:
    drawn_ones = [each for index in range(1000) for each in multipliers(index)]
    assert all(each % 2 == 1 for each in drawn_ones)
    assert len(set(drawn_ones)) == 2000


def test_what_is_shorter_than_a_block_is_digested_as_it_is() -> None:
    digest = hashlib.sha256(b"2;8;" + torch.ones(2).numpy().tobytes()).digest()
    assert checksum(2, torch.ones(2)) == int.from_bytes(digest[:8], "big") >> 1
