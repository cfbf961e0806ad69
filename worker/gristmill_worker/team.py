"""The ranks of one session as a team: one process a rank, started by torchrun or alike (env://).

Every rank holds the whole base model and the whole adapter. A request's datums are split over the
ranks, and the gradient of each operation is summed over them before it is accumulated: all ranks hold
the same state between any two operations, so that a snapshot of rank 0 is a snapshot of the team.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill_worker.orders import Order

log = logging.getLogger(__name__)

IDLE_S_MAX: Final = 365 * 86_400
"""Ranks wait for an order as long as a client thinks."""
CONNECT_RETRY_S: Final = 1.0


class TeamLostError(BaseException):
    """A rank is gone: what was running has no result, and this process must end.

    No Exception on purpose: it is nobody's failed operation.
    """


class Team:
    """A single rank needs no process group: its methods do nothing and return what they got."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world
        self.control: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world == 1

    def join(self, backend: str, *, start_s: float, timeout_s: float) -> None:
        """Meet the other ranks at MASTER_ADDR:MASTER_PORT. Raises TeamLostError after `start_s`."""
        if self.alone:
            return
        until = time.monotonic() + start_s
        while True:
            try:
                left = max(1.0, until - time.monotonic())
                dist.init_process_group(backend, timeout=timedelta(seconds=min(left, timeout_s)))
                break
            except (RuntimeError, ValueError, OSError) as error:
                # The name of rank 0 may not be in the DNS yet.
                log.warning("team_not_met", extra={"error": str(error).splitlines()[0]})
                if time.monotonic() >= until:
                    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                    raise TeamLostError(
                        f"rank {self.rank} of {self.world} did not meet the others at {address} "
                        f"within {start_s:.0f} s"
                    ) from error
                time.sleep(CONNECT_RETRY_S)
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=IDLE_S_MAX))
        assert isinstance(control, dist.ProcessGroup)
        self.control = control
        log.info("team_met", extra={"rank": self.rank, "world": self.world, "backend": backend})

    def tell(self, order: Order) -> None:
        """Rank 0: send every other rank the order."""
        if self.alone:
            return
        body = bytearray(msgspec.msgpack.encode(order))
        with collective():
            dist.broadcast(torch.tensor([len(body)]), 0, group=self.control)
            dist.broadcast(torch.frombuffer(body, dtype=torch.uint8), 0, group=self.control)

    def hear(self) -> Order:
        """Other ranks: the next order, however long it takes."""
        size = torch.zeros(1, dtype=torch.int64)
        with collective():
            dist.broadcast(size, 0, group=self.control)
            body = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(body, 0, group=self.control)
        order: Order = msgspec.msgpack.decode(body.numpy().tobytes(), type=Order)
        return order

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, in place, in a fixed order of summation."""
        if not self.alone:
            with collective():
                dist.all_reduce(value)
        return value

    def gather(self, value: Any) -> list[Any]:  # Any: whatever can be pickled
        """The values of all ranks, in their order, at every rank."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.world
        with collective():
            dist.all_gather_object(found, value, group=self.control)
        return found

    def leave(self) -> None:
        if not self.alone and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """What fails inside fails because a rank is gone: raises TeamLostError."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise TeamLostError(f"another rank is gone: {str(error).splitlines()[0]}") from error


def team_from_environment() -> Team:
    """RANK and WORLD_SIZE as torchrun sets them; without them a team of one."""
    return Team(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
