"""Drawing continuations with a KV cache: one prefill for all samples of a prompt."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from gristmill_contracts.operations import Sample, SampledSequence, SampleResult, tensor
from gristmill_worker import chat
from gristmill_worker.adapter import Adapter
from gristmill_worker.base_model import BaseModel, Cache
from gristmill_worker.chance import uniform
from gristmill_worker.choose import distribution, pick
from gristmill_worker.scoring import score_prompt
from gristmill_worker.text import Detokenizer, first_stop
from gristmill_worker.validate import check_prompt

DECODE_ROWS_MAX: Final = 64
"""Samples decoded at once; more of them take turns over the same prefill."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One continuation as it grows."""

    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None
    matcher: Detokenizer | None = None
    """Decodes with special tokens, to find stop strings; None if there are none."""


Watch = Callable[[int, list[Row]], bool]
"""Called after each token with the prompt's length and the rows that got one; False ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    prompt: list[int]
    cache: Cache
    logits: Tensor
    """(1, V) float32, behind the last prompt token."""
    hidden: Tensor
    """(P, h)."""


def prompt_tokens(base: BaseModel, op: Sample) -> list[int]:
    """The prompt's ids. Raises InvalidRequestError for one that leaves no room for a token."""
    if op.prompt is not None:
        return [int(token) for token in op.prompt.tolist()]
    ids = chat.render(base.tokenizer, op.messages or [])
    check_prompt(tensor("int64", ids), base.facts.context_length - 1, base.facts)
    return ids


@torch.inference_mode()
def sample(
    base: BaseModel, adapter: Adapter | None, op: Sample, watch: Watch | None = None
) -> SampleResult:
    """Run the whole group. Logprobs are the model's own at temperature 1, nothing truncated."""
    with base.selected(adapter):
        start = _prefill(base, prompt_tokens(base, op))
        logprobs, topk = None, None
        if op.include_prompt_logprobs or op.topk_prompt_logprobs:
            tokens = torch.tensor(start.prompt, device=base.device)
            logprobs, topk = score_prompt(base, start.hidden, tokens, op.topk_prompt_logprobs)
        rows = [_new_row(base, op, index) for index in range(op.num_samples)]
        groups = range(0, len(rows), DECODE_ROWS_MAX)
        for at in groups:
            cache = start.cache if len(groups) == 1 else start.cache.copy()
            _decode(base, op, start, rows[at : at + DECODE_ROWS_MAX], cache, watch)
    return SampleResult(
        sequences=[_sequence(base, op, row) for row in rows],
        prompt_logprobs=logprobs if op.include_prompt_logprobs else None,
        topk_prompt_logprobs=topk,
        prompt_tokens=len(start.prompt),
    )


def _prefill(base: BaseModel, prompt: list[int]) -> Prefilled:
    cache = base.new_cache()
    hidden = base.hidden_cached(torch.tensor([prompt], device=base.device), cache)[0]
    logits = base.head.decode_logits(hidden[-1:])
    return Prefilled(prompt=prompt, cache=cache, logits=logits, hidden=hidden)


def _new_row(base: BaseModel, op: Sample, index: int) -> Row:
    matcher = Detokenizer(base.tokenizer, skip_special=False) if op.params.stop else None
    return Row(sample=index, matcher=matcher)


def _decode(  # noqa: PLR0917
    base: BaseModel,
    op: Sample,
    start: Prefilled,
    rows: list[Row],
    cache: Cache,
    watch: Watch | None,
) -> None:
    """Extend every row until it ends. Rows that ended leave the batch."""
    room = base.facts.context_length - len(start.prompt)
    length_max = min(op.params.max_tokens, room)
    logits = start.logits.expand(len(rows), -1)
    cache.repeat(len(rows))
    live = rows
    while True:
        ids = _choose(logits, op, live)
        chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[:, None])[:, 0]
        for row, token, logprob in zip(live, ids.tolist(), chosen.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.ended = _ending(base, op, row, length_max)
        wanted = watch is None or watch(len(start.prompt), live)
        kept = [index for index, row in enumerate(live) if row.ended is None]
        if not kept or not wanted:
            return
        if len(kept) < len(live):
            at = torch.tensor(kept, device=base.device)
            cache.select(at)
            ids = ids[at]
            live = [live[index] for index in kept]
        logits = base.head.decode_logits(base.hidden_cached(ids[:, None], cache)[:, 0])


def _choose(logits: Tensor, op: Sample, live: list[Row]) -> Tensor:
    """(B, V) -> (B,) ids."""
    params = op.params
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    draws = [uniform(params.seed, row.sample, len(row.tokens)) for row in live]
    weights = distribution(logits, params.temperature, params.top_k, params.top_p)
    return pick(weights, torch.tensor(draws, dtype=torch.float64, device=logits.device))


def _ending(base: BaseModel, op: Sample, row: Row, length_max: int) -> str | None:
    """Why the row ends with its newest token; None if it goes on."""
    if row.tokens[-1] in base.facts.eos_token_ids:
        return "stop"
    if row.matcher is not None:
        stops = op.params.stop or []
        longest = max(map(len, stops))
        before = max(0, len(row.matcher.text) - longest + 1)
        if (
            row.matcher.push(row.tokens[-1])
            and first_stop(row.matcher.text, stops, before) is not None
        ):
            return "stop"
    return "length" if len(row.tokens) >= length_max else None


def _sequence(base: BaseModel, op: Sample, row: Row) -> SampledSequence:
    return SampledSequence(
        tokens=tensor("int64", row.tokens),
        logprobs=tensor("float32", row.logprobs),
        stop_reason="stop" if row.ended == "stop" else "length",
        text=_text(base, op, row) if op.include_text else None,
    )


def _text(base: BaseModel, op: Sample, row: Row) -> str:
    """Decoded without special tokens, cut before a stop string."""
    text: str = base.tokenizer.decode(
        row.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    at = first_stop(text, op.params.stop or [])
    return text if at is None else text[:at]
