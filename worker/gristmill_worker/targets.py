"""Targets that come as rows of their own length, as the dense (N, K) that the engine scores, and back."""

from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor

from gristmill_contracts.operations import Datum, Forward, ForwardBackward
from gristmill_worker.tensors import from_torch, to_torch

SPARSE_KEY: Final = "target_rows"


def width_of(datum: Datum) -> int:
    """Targets of a token, at most."""
    counts, shape = _counts(datum), datum.loss_inputs["target_tokens"].shape
    if counts is not None:
        return max(1, int(counts.max()))
    return shape[1] if len(shape) > 1 else 1


def dense(op: Forward | ForwardBackward) -> Forward | ForwardBackward:
    """The same operation with sparse targets filled up by targets of weight 0, all to one width."""
    counts = [_counts(datum) for datum in op.datums]
    if all(each is None for each in counts):
        return op
    sparse = (datum for datum, own in zip(op.datums, counts, strict=True) if own is not None)
    width = max(map(width_of, sparse))
    datums = [
        datum if own is None else _filled(datum, own, width)
        for datum, own in zip(op.datums, counts, strict=True)
    ]
    return msgspec.structs.replace(op, datums=datums)


def sparse_again(
    datums: Sequence[Datum], outputs: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Outputs (N, K) of dense datums as (M,) where the datum was sparse; the others as they are."""
    found = []
    for datum, output in zip(datums, outputs, strict=True):
        counts = _counts(datum)
        if counts is None:
            found.append(output)
        else:
            held = {key: value[_held(counts, value.shape[1])] for key, value in output.items()}
            found.append(held)
    return found


def _counts(datum: Datum) -> Tensor | None:
    """(N,): targets of each token; None if the datum is dense."""
    rows = datum.loss_inputs.get(SPARSE_KEY)
    return None if rows is None else to_torch(rows).diff()


def _held(counts: Tensor, width: int) -> Tensor:
    """(N, width): True where a token has a target."""
    return torch.arange(width)[None] < counts[:, None]


def _filled(datum: Datum, counts: Tensor, width: int) -> Datum:
    held = _held(counts, width)
    inputs = {key: value for key, value in datum.loss_inputs.items() if key != SPARSE_KEY}
    for key in ("target_tokens", "weights"):
        own = to_torch(inputs[key])
        wide = torch.zeros(held.shape, dtype=own.dtype)
        wide[held] = own
        inputs[key] = from_torch(wide)
    return Datum(datum.tokens, inputs)
