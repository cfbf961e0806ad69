"""One integer for a session's weights and moments, to compare a replay with the first run.

It tells runs apart that went different ways; it keeps out nobody who builds two states with one checksum.
A cryptographic digest of everything took a fifth of a small training step, so buffers are folded first.
"""

import hashlib
from functools import cache
from typing import Final

import torch
from torch import Tensor

LANES: Final = 2**14
"""Words of eight bytes that are folded at a time: what lies between the steps stays in a core's cache."""

_MASK: Final = 2**64 - 1


def bytes_of(value: Tensor) -> memoryview:
    """The tensor's bytes on the host."""
    return memoryview(value.detach().cpu().contiguous().numpy().data).cast("B")


def checksum(step: int, *buffers: Tensor) -> int:
    """The first 63 bits of a SHA-256 over folded buffers, so that it fits any integer column."""
    digest = hashlib.sha256(f"{step}".encode())
    for buffer in buffers:
        flat = buffer.detach().contiguous().view(-1).view(torch.uint8)
        whole = flat.numel() - flat.numel() % (8 * LANES)
        digest.update(f";{flat.numel()};".encode())
        if whole:
            digest.update(bytes_of(folded(flat[:whole].view(torch.int64))))
        digest.update(bytes_of(flat[whole:]))
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def folded(words: Tensor) -> Tensor:
    """(k LANES,) int64 -> (2, LANES): sums over k of each word, and of its upper half, times an odd number
    of k's own, modulo 2^64. Integers: the same bits on any device, with any threads.

    A lane with one changed word has another sum. One with more has, but by a chance of 2^-32: a
    multiplier's bits move a change of a half word through the upper half of the sum.
    """
    sums = torch.zeros(2, LANES, dtype=torch.int64, device=words.device)
    whole, upper = sums
    half = torch.empty(LANES, dtype=torch.int64, device=words.device)
    for index, block in enumerate(words.view(-1, LANES)):
        first, second = multipliers(index)
        whole.add_(block, alpha=first)
        torch.bitwise_right_shift(block, 32, out=half)
        upper.add_(half, alpha=second)
    return sums


@cache
def multipliers(index: int) -> tuple[int, int]:
    """Two odd numbers, as signed words: two steps of SplitMix64."""
    return _odd(2 * index + 1), _odd(2 * index + 2)


def _odd(number: int) -> int:
    z = number * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    z = (z ^ z >> 31) | 1
    return z - 2**64 if z >> 63 else z
