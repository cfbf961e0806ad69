"""Random numbers that depend on (seed, sample, step) alone: not on the batch, not on the device."""

from typing import Final

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, sample: int, step: int) -> float:
    """A number in [0, 1) with 53 bits. Each argument is mixed before the next one is added."""
    state = _mix((seed + _GAMMA) & _MASK)
    state = _mix((state + sample + _GAMMA) & _MASK)
    state = _mix((state + step + _GAMMA) & _MASK)
    return (state >> 11) / 2.0**53
