"""Which rank runs which datums of a request. A pure function of their lengths and the world's size."""

from collections.abc import Sequence


def shares(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Indices of each rank's datums, ascending: longest first, each to the rank with the fewest tokens.

    Every index once; a rank may get none, and takes part in the collectives all the same.
    """
    held = [0] * world
    given: list[list[int]] = [[] for _ in range(world)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = min(range(world), key=lambda each: (held[each], each))
        held[rank] += lengths[index]
        given[rank].append(index)
    return [sorted(indices) for indices in given]
