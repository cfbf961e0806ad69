"""Whether the ranks of a team divide the base model among them."""

from collections.abc import Callable, Iterator
from typing import Final, Literal

import torch

from gristmill_worker.base_model import BaseModel
from gristmill_worker.fast.shape import Shape
from gristmill_worker.fast.sharded import ShardedBlocks, shard_blocks
from gristmill_worker.fast.weights import Block, layer_shapes
from gristmill_worker.orders import Lend
from gristmill_worker.room import room_on
from gristmill_worker.team import Team

BaseWeights = Literal["auto", "replicated", "sharded"]
FREE_PARTS: Final = (3, 4)
"""A base that takes more than three fourths of what is free leaves no room to work in."""


class Sharding:
    """Of one team on devices of one kind. `available`: bytes that could be had now; None = nobody knows."""

    def __init__(
        self,
        team: Team,
        device: torch.device,
        choice: BaseWeights,
        available: Callable[[], int | None],
    ) -> None:
        self.team = team
        self.device = device
        self.choice = choice
        self.available = available

    @property
    def required(self) -> bool:
        """A rank that is alone has nobody to share with."""
        return self.choice == "sharded" and not self.team.alone

    def wanted(self, shape: Shape, dtype: torch.dtype) -> bool:
        """The same on every rank."""
        if self.team.alone or self.choice != "auto":
            return self.required
        return self.device.type == "cuda" and not all(
            self.team.gather(fits(base_bytes(shape, dtype), self.available()))
        )

    def blocks(self, blocks: Iterator[Block]) -> ShardedBlocks:
        return shard_blocks(blocks, self.device, lambda: self.team.tell(Lend()))


def fits(needed: int, free: int | None) -> bool:
    """Whether a rank can hold the whole base and still work."""
    part, whole = FREE_PARTS
    return free is None or needed * whole <= free * part


def base_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Of a decoder's weights, norms and biases aside."""
    layers = sum(rows * columns for rows, columns in layer_shapes(shape))
    ends = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    return (layers + ends) * dtype.itemsize


def room_beside(base: BaseModel) -> Callable[[], int | None]:
    """How many bytes could be had now on the base's device, beside what a gathered block takes."""
    free_now = room_on(base.device)
    taken = 0 if base.shards is None else base.shards.gathered_bytes

    def left() -> int | None:
        free = free_now()
        return None if free is None else max(0, free - taken)

    return left
