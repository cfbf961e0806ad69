"""A decode step in one call of a compiled library, for packed bf16 weights on a processor that multiplies bf16.

A step of torch's operators is a thousand small ones; with few rows, calling them takes longer than what they do.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from gristmill_worker.fast.decoder import Decoder
from gristmill_worker.fast.library import step_library
from gristmill_worker.fast.linear import Factors, Linear, Shared
from gristmill_worker.fast.seats import Mixed
from gristmill_worker.fast.weights import Block

log = logging.getLogger(__name__)

UNIT: Final = 32
"""Sizes of a decoder that the library serves are multiples of this."""
BLOCKS: Final = (64, 32)
"""Columns that oneDNN may have packed side by side."""
PARTS_MAX: Final = 3
"""Projections in one fused layer."""
HEADS_AT_ONCE: Final = 4
"""Whose scores a thread holds."""

Pointer = ctypes.c_void_p
Int = ctypes.c_int64


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, Int) for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "inner")),
        ("blocks", Int * 4), ("final_norm", Pointer), ("table", Pointer),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, Int) for name in ("rows", "threads", "longest")),
        *((name, Pointer) for name in (
            "x", "out", "cos", "sin", "row", "places", "adapters",
            "normed", "qkv", "seen", "both", "inner", "low", "scores",
        )),
        ("rank", Int), ("eps", ctypes.c_float), ("scale", ctypes.c_float),
    )  # fmt: skip


class NativeStep:
    """As the decoder's own `step`, for the seats of a mixed batch. Holds what its tables point to."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, blocks: Sequence[int]) -> None:
        s = decoder.shape
        self.decoder = decoder
        self.run = library.gristmill_step
        self.layers = torch.tensor([_layer_of(each) for each in decoder.weights.blocks])
        self.model = _Model(
            s.layers, s.hidden, s.heads, s.kv_heads, s.head_size, s.inner, (Int * 4)(*blocks),
            decoder.weights.final_norm.data_ptr(), self.layers.data_ptr(),
        )  # fmt: skip
        self.known: dict[int, tuple[list[Factors], Tensor]] = {}
        """Tables of the adapters of the last step."""

    def step(self, tokens: Tensor, seats: Mixed, adapters: Sequence[Shared]) -> Tensor:
        """(B,) next tokens -> (B, h). What each seat holds grows once the caller says so."""
        s, d = self.decoder.shape, self.decoder
        x = d.weights.embedding[tokens]
        seats.open(x)
        count, length = len(x), int(seats.positions.max()) + 1
        cos, sin = d.rope.at(seats.positions, length)
        rows, places = _seated(seats, s.layers, x.element_size())
        table, rank = self._serving(adapters, rows)
        threads, longest = torch.get_num_threads(), -(-length // 16) * 16
        out = torch.empty_like(x)
        widths = (s.hidden, s.q_size + 2 * s.kv_size, s.q_size, 2 * s.inner, s.inner)
        buffers = [x.new_empty(count, width) for width in widths]
        buffers.append(torch.empty(count, PARTS_MAX * rank))
        buffers.append(torch.empty(threads, HEADS_AT_ONCE, longest))
        held = [x, out, cos.contiguous(), sin.contiguous(), rows, places, table, *buffers]
        self.run(
            ctypes.byref(self.model),
            ctypes.byref(_Step(
                count, threads, longest, *(each.data_ptr() for each in held),
                rank, s.eps, d.attention.scale,
            )),
        )  # fmt: skip
        return out

    def _serving(self, adapters: Sequence[Shared], rows: Tensor) -> tuple[Tensor, int]:
        """(adapters, layers * 4, 3) and the highest rank; tells each row its adapter."""
        held = {id(each.factors): (each.factors, self._table(each.factors)) for each in adapters}
        self.known = held
        for index, each in enumerate(adapters):
            rows[each.rows, 0] = index
        tables = [held[id(each.factors)][1] for each in adapters]
        if not tables:
            return rows.new_empty(0), 0
        return torch.stack(tables), max(int(table[0, 2]) for table in tables)

    def _table(self, factors: list[Factors]) -> Tensor:
        known = self.known.get(id(factors))
        if known is not None:
            return known[1]
        parts = [len(each.parts) for each in self.decoder.weights.blocks[0].linears]
        return torch.tensor([
            (each.a.data_ptr(), each.b_t.data_ptr(), each.a.shape[0] // parts[index % len(parts)])
            for index, each in enumerate(factors)
        ])  # fmt: skip


def _seated(seats: Mixed, layers: int, item: int) -> tuple[Tensor, Tensor]:
    """Of each row (B, 5): adapter, positions and rooms; and where its keys and values are (layers, B, 4)."""
    total = len(seats.positions)
    rows = torch.zeros(total, 5, dtype=torch.int64)
    rows[:, 0] = -1
    places = torch.zeros(layers, total, 4, dtype=torch.int64)
    start = 0
    for each in seats.loose:
        at = slice(start, start + len(each.lengths))
        rows[at, 2], rows[at, 4] = each.lengths, each.pool.room
        for column, parts in enumerate((each.pool.keys, each.pool.values)):
            places[:, at, column] = _each_row(parts, each.lengths.shape[0], item)
        start = at.stop
    for group in seats.groups:
        at = slice(start, start + group.rows)
        rows[at, 1], rows[at, 2] = group.prefix_length, group.used
        rows[at, 4] = group.own[0][0].shape[2]
        for column in range(2):
            places[:, at, column] = _each_row(
                [pair[column] for pair in group.own], group.rows, item
            )
        if group.prefix_length:
            rows[at, 3] = group.shared[0][0].shape[1]
            for column in range(2):
                first = torch.tensor([pair[column].data_ptr() for pair in group.shared])
                places[:, at, 2 + column] = first[:, None]
        start = at.stop
    return rows, places


def _each_row(parts: Sequence[Tensor], rows: int, item: int) -> Tensor:
    """(layers, rows): where each row of these tensors begins."""
    first = torch.tensor([each.data_ptr() for each in parts])
    return first[:, None] + torch.arange(rows) * parts[0].stride(0) * item


def _layer_of(block: Block) -> list[int]:
    """As the library's struct of a layer."""
    norms = (block.before_attention, block.before_mlp, block.q_norm, block.k_norm)
    found = [_at(each) for each in norms] + [block.window or 0]
    for linear in block.linears:
        found += [torch.ops.mkldnn.data_ptr(linear.weight), _at(linear.bias)]
    return found


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# --- where it works --------------------------------------------------------------------------------


def native_step(decoder: Decoder) -> NativeStep | None:
    """None where the weights are not packed as the library reads them, or it cannot be had."""
    weights, s = decoder.weights, decoder.shape
    if not weights.packed or weights.embedding.dtype != torch.bfloat16:
        return None
    sizes = (s.hidden, s.inner, s.head_size)
    library = None if any(each % UNIT for each in sizes) else step_library()
    if library is None:
        return None
    blocks = [packed_block(each) for each in weights.blocks[0].linears]  # all blocks are alike
    if None in blocks:
        log.info("decode_step_not_compiled", extra={"error": "weights are packed in another order"})
        return None
    return NativeStep(decoder, library, [each or 0 for each in blocks])


def packed_block(linear: Linear) -> int | None:
    """How many output columns oneDNN put side by side in a packed bf16 weight; None = in another order.

    Read from the memory itself, all of it: nothing but this order is relied on.
    """
    rows, columns = linear.out, linear.columns
    try:
        count = torch.ops.mkldnn._nbytes(linear.weight)
        where = torch.ops.mkldnn.data_ptr(linear.weight)
        plain = linear.weight.to_dense().view(torch.int16)
    except (RuntimeError, AttributeError) as error:
        log.info("decode_step_not_compiled", extra={"error": str(error).splitlines()[0]})
        return None
    if count != plain.nbytes:
        return None
    seen = torch.frombuffer((ctypes.c_char * count).from_address(where), dtype=torch.int16)
    for block in BLOCKS:
        if rows % block == 0:
            ordered = plain.view(rows // block, block, columns // 2, 2).transpose(1, 2)
            pairs = zip(ordered, seen.view(rows // block, columns // 2, block, 2), strict=True)
            if all(torch.equal(one, other) for one, other in pairs):
                return block
    return None
