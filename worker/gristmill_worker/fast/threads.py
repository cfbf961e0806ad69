"""Small products run on one thread: another one takes longer to wake than it takes to do its half."""

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

ALONE_FLOPS_MAX: Final = 2**24
"""A product of so many operations takes one thread 40 microseconds; two that sleep take 50 to meet."""

_TOGETHER: Final = nullcontext()


class _Alone:
    """While inside, torch uses the calling thread alone."""

    __slots__ = ("threads",)

    def __enter__(self) -> None:
        self.threads = torch.get_num_threads()
        if self.threads > 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self.threads > 1:
            torch.set_num_threads(self.threads)


def alone_if_small(flops: int, device: torch.device) -> AbstractContextManager[None]:
    """For what runs inside: products of up to `flops` operations each. A function of their shapes, so that
    they have the same bits in every run with as many threads."""
    if flops > ALONE_FLOPS_MAX or device.type != "cpu":
        return _TOGETHER
    return _Alone()
