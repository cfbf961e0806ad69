"""How many bytes an operation will take beside what is held already: pure functions of sizes and lengths.

They count the tensors that the code holds at once where it holds the most, and are to be no lower than
what is measured and not four times as high (tests/worker/test_memory.py). Kernels' own workspaces are
not in them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gristmill_worker.batch import MicroBatch, plan
from gristmill_worker.fast.attention import MATMUL_LENGTH_MAX, SCORES_MAX
from gristmill_worker.fast.cache import ROOM_MIN
from gristmill_worker.fast.model import PROMPT_BLOCK
from gristmill_worker.fast.owed import owed_bytes
from gristmill_worker.fast.slots import SLOTS_MIN
from gristmill_worker.runs import Run
from gristmill_worker.scheduler import ROWS_MAX
from gristmill_worker.shares import shares
from gristmill_worker.sizes import Sizes
from gristmill_worker.train import HEAD_ROWS

WIDE: Final = 4
"""Bytes of a float32, in which kernels reckon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A request's datums, and how they are run."""

    lengths: tuple[int, ...]
    targets: int
    """For each token, at most."""
    budget: int
    packed: bool
    world: int
    rank: int
    """Of the adapter."""
    trains: bool
    kept_bytes_max: int | None = None
    """What a pass keeps for its backward pass, where layers may run again there; None = they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A sample, or the scoring of a prompt (no rows)."""

    prompt: int
    rows: int
    tokens_max: int
    """New ones of each row."""
    cuts: bool
    """top_k or top_p is set: the vocabulary is sorted."""
    scores_prompt: bool
    rank: int
    kv_bytes_max: int
    """Keys and values of all samples that run at once."""


# --- training --------------------------------------------------------------------------------------


def batch_bytes(s: Sizes, batch: Batch) -> int:
    """Of forward or forward_backward: its largest pass, and what the whole request holds."""
    parts = [
        part
        for mine in shares(batch.lengths, batch.world)
        for part in plan(
            [batch.lengths[index] for index in mine], batch.budget, packed=batch.packed
        )
    ]
    largest = max((pass_bytes(s, part, batch) for part in parts), default=0)
    results = sum(batch.lengths) * batch.targets * WIDE
    gradient = s.adapter_size(batch.rank) * WIDE if batch.trains else 0
    return largest + results + gradient + compute_copies(s, batch.rank)


def pass_bytes(s: Sizes, part: MicroBatch, batch: Batch) -> int:
    """Of one pass over a token stream."""
    tokens = sum(run.length * run.segments for run in part.runs)
    inputs = tokens * (8 + batch.targets * 6 * WIDE)
    # The last hidden states and their gradient.
    ends = 3 * tokens * s.hidden * s.item_bytes
    head = head_bytes(s, min(tokens, HEAD_ROWS), batch.targets)
    inside = block_bytes(s, tokens, part.runs)
    kept = 0
    if batch.trains:
        kept = kept_bytes(s, tokens, part.runs, batch.rank)
        if batch.kept_bytes_max is not None:
            least = s.layers * tokens * s.hidden * s.item_bytes + kept // s.layers
            kept = min(kept, max(least, batch.kept_bytes_max))
        kept += debts(s, tokens, batch.rank)
    return inputs + ends + kept + max(head, inside)


def head_bytes(s: Sizes, rows: int, targets: int) -> int:
    """Logits in both dtypes, log-probabilities and their gradient; a temperature's copy."""
    return rows * (s.vocabulary * (3 * WIDE + s.item_bytes) + targets * 8 * WIDE)


def block_bytes(s: Sizes, tokens: int, runs: Sequence[Run]) -> int:
    """What one layer holds only while it runs, forward or backward, whichever is more."""
    scores = max(
        run.segments * run.length**2 * s.heads if _by_products(s, run) else 0 for run in runs
    )
    attention = scores * (4 * WIDE + 2 * s.item_bytes)
    mlp = tokens * s.inner * (7 * WIDE + 4 * s.item_bytes)
    rest = tokens * (s.hidden * (3 * WIDE + 4 * s.item_bytes) + 3 * s.q_size * s.item_bytes)
    return max(attention, mlp) + rest


def kept_bytes(s: Sizes, tokens: int, runs: Sequence[Run], rank: int) -> int:
    """What a forward pass keeps of every layer for the backward pass."""
    if s.path == "generic":
        linears = sum(rows + columns + rank for rows, columns in s.linears)
        # Norms keep float32 copies, activations their steps, attention heads as they were turned.
        each = (
            s.hidden * 2 * (2 * WIDE + s.item_bytes) + (6 * s.inner + 4 * s.q_size) * s.item_bytes
        )
        return tokens * (linears * s.item_bytes + s.layers * each)
    columns = 4 * s.hidden + 3 * s.inner + s.q_size + 7 * rank
    if s.qk_norm:
        columns += s.q_size + 2 * s.kv_size
    plain = s.layers * tokens * (columns * s.item_bytes + 2 * WIDE)
    return plain + sum(
        count * sum(_kept_attention(s, run, window) for run in runs)
        for window, count in Counter(s.windows).items()
    )


def debts(s: Sizes, tokens: int, rank: int) -> int:
    """What the gradients of all blocks' factors are made of at once, where the stream is a short one; half of it
    is put side by side at a time, and the products are as large as the factors."""
    if s.path == "generic":
        return 0
    wide = 4 * s.hidden + 3 * s.inner + 2 * (s.q_size + s.kv_size) + 14 * rank
    owed = owed_bytes(tokens, s.layers, wide, s.item_bytes)
    return owed + owed // 2 + compute_copies(s, rank) if owed else 0


def _kept_attention(s: Sizes, run: Run, window: int | None) -> int:
    tokens = run.length * run.segments
    if _products(run, window):
        return tokens * (2 * s.q_size + 2 * s.kv_size + s.heads * run.length) * s.item_bytes
    return tokens * ((4 * s.q_size + s.kv_size) * s.item_bytes + s.heads * WIDE)


def _by_products(s: Sizes, run: Run) -> bool:
    return s.path == "fast" and any(_products(run, window) for window in s.windows)


def _products(run: Run, window: int | None) -> bool:
    """Whether the probabilities of a run exist as a whole."""
    return run.length <= MATMUL_LENGTH_MAX or (window is not None and window < run.length)


def compute_copies(s: Sizes, rank: int) -> int:
    """An adapter's factors in the base's dtype; the fast path puts A and B of P projections side by side."""
    if s.path == "generic":
        return s.adapter_size(rank) * s.item_bytes
    h, q, kv, f = s.hidden, s.q_size, s.kv_size, s.inner
    fused = 3 * (h + q + 2 * kv) + (q + h) + 2 * (h + 2 * f) + (f + h)
    return s.layers * rank * fused * s.item_bytes


def step_bytes(s: Sizes, rank: int) -> int:
    """Of optim_step: new weights and moments, and what they are reckoned with, all at once on a GPU."""
    return 4 * s.adapter_size(rank) * WIDE + compute_copies(s, rank)


def merge_bytes(s: Sizes, rank: int) -> int:
    """Of a merged export, on the host: the whole base once more, and one layer's update in float32."""
    largest = max(rows * columns for rows, columns in s.linears)
    whole = s.parameters * s.item_bytes
    return whole + (3 * largest + s.adapter_size(rank)) * WIDE


# --- sampling --------------------------------------------------------------------------------------


def draw_bytes(s: Sizes, draw: Draw) -> int:
    """Of a sample: its prefill, or its decoding at its longest."""
    copies = compute_copies(s, draw.rank)
    if not draw.rows:
        return copies + _scoring(s, draw.prompt)
    prefill = _block_of_prompt(s, draw.prompt) + s.vocabulary * (2 * WIDE + s.item_bytes)
    if draw.scores_prompt:
        prefill = max(prefill, _scoring(s, draw.prompt))
    prompt = draw.prompt * s.position_bytes
    rows = rows_at_once(s, draw)
    held = _held_by_rows(s, draw, rows) + rows * row_bytes(s, cuts=draw.cuts)
    return copies + prompt + max(prefill, held)


def joined_bytes(s: Sizes, prompts: Sequence[int], ranks: Sequence[int]) -> int:
    """Of one pass over whole prompts of these lengths, for adapters of these ranks, and of what it leaves."""
    tokens = sum(prompts)
    runs = [Run(0, length, count) for length, count in Counter(prompts).items()]
    logits = len(prompts) * s.vocabulary * (2 * WIDE + s.item_bytes)
    left = tokens * (s.position_bytes + 2 * s.hidden * s.item_bytes)
    copies = sum(compute_copies(s, rank) for rank in ranks)
    return copies + left + max(block_bytes(s, tokens, runs), logits)


def rows_at_once(s: Sizes, draw: Draw) -> int:
    """Rows that keys and values leave room for; one always runs."""
    free = draw.kv_bytes_max - draw.prompt * s.position_bytes
    fit = free // max(1, draw.tokens_max * s.position_bytes)
    return max(1, min(draw.rows, ROWS_MAX, fit))


def _scoring(s: Sizes, prompt: int) -> int:
    """A whole prompt in one pass, and its logits."""
    whole = (Run(0, prompt, 1),)
    head = head_bytes(s, min(prompt, HEAD_ROWS), 1)
    return prompt * s.hidden * 2 * s.item_bytes + max(block_bytes(s, prompt, whole), head)


def _block_of_prompt(s: Sizes, prompt: int) -> int:
    if s.path == "generic":
        return block_bytes(s, prompt, (Run(0, prompt, 1),))
    block = min(prompt, PROMPT_BLOCK)
    scores = s.heads * block * prompt
    at_once = max(SCORES_MAX, scores // s.kv_heads)
    behind = min(scores, at_once) * (4 * WIDE + 2 * s.item_bytes)
    return max(block_bytes(s, block, (Run(0, block, 1),)), behind)


def _held_by_rows(s: Sizes, draw: Draw, rows: int) -> int:
    """Keys and values behind the prompt's own. What grows is copied: half as much again."""
    whole = draw.prompt + draw.tokens_max
    if s.path == "generic":  # every row has the prompt's too, and grows by a layer's copy
        return rows * whole * (s.position_bytes + s.position_bytes // s.layers)
    if draw.rows == 1:  # in a pool of slots, the prompt copied
        return SLOTS_MIN * _room(whole, draw.prompt + 1) * s.position_bytes * 3 // 2
    return rows * _room(draw.tokens_max, 1) * s.position_bytes * 3 // 2


def _room(positions: int, first: int) -> int:
    """Positions that a cache has in the end: it doubles."""
    room = max(ROOM_MIN, first)
    while room < positions:
        room *= 2
    return room


def row_bytes(s: Sizes, *, cuts: bool) -> int:
    """Of one row in one step: logits, probabilities in float64, and their sorting."""
    wide = 9 * 8 if cuts else 4 * 8
    return s.vocabulary * (2 * WIDE + s.item_bytes + wide) + 8 * s.inner * WIDE


# --- what would fit --------------------------------------------------------------------------------


def longest_fitting(s: Sizes, batch: Batch, available: int) -> int:
    """Tokens of the longest single datum that fits; 0 if none does."""
    low, high = 0, max(batch.lengths, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if batch_bytes(s, replace(batch, lengths=(middle,))) <= available:
            low = middle
        else:
            high = middle - 1
    return low
