"""A group: the samples of one prompt on their way, from its prompt's first block to its last row's end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from gristmill_contracts.operations import Sample, SampledSequence, SampleResult, tensor
from gristmill_worker import chat
from gristmill_worker.adapter import Adapter
from gristmill_worker.base_model import BaseModel, Cache
from gristmill_worker.prefixes import Owner
from gristmill_worker.scoring import TopK
from gristmill_worker.text import Detokenizer, first_stop
from gristmill_worker.validate import check_prompt


@dataclass(slots=True, kw_only=True)
class Row:
    """One continuation as it grows."""

    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None
    matcher: Detokenizer | None = None
    """Decodes with special tokens, to find stop strings; None if there are none."""


Watch = Callable[[int, int, list[Row]], bool]
"""Called after each token with the prompt's length, how much of it was cached, and the rows that got
a token; False ends the group."""


@dataclass(slots=True, kw_only=True)
class Group:
    """`done` is called once, with what came out and the engine's seconds that the group used."""

    uid: str
    op: Sample
    owner: Owner
    adapter: Adapter | None
    prompt: list[int]
    rows: list[Row]
    length_max: int
    """Tokens that a row may have."""
    done: Callable[[SampleResult | Exception, float], None]
    watch: Watch | None = None
    keys: list[bytes] = field(default_factory=list)
    cache: Cache | None = None
    ran: int = 0
    """Tokens of the prompt that the cache holds."""
    cached: int = 0
    """Of those: found in the prefix cache."""
    hidden: list[Tensor] = field(default_factory=list)
    """Of the prompt's blocks, where it is to be scored."""
    logits: Tensor | None = None
    """(1, V) behind the prompt."""
    prompt_logprobs: tuple[object, TopK | None] | None = None
    begun: int = 0
    """Rows that were admitted."""
    alone: bool = False
    """Whether its prompt runs in a pass of its own: one with others failed."""
    seconds: float = 0.0
    over: bool = False

    @property
    def scores_prompt(self) -> bool:
        return self.op.include_prompt_logprobs or self.op.topk_prompt_logprobs > 0

    @property
    def ended(self) -> bool:
        return all(row.ended is not None for row in self.rows)


def prompt_tokens(base: BaseModel, op: Sample) -> list[int]:
    """The prompt's ids. Raises InvalidRequestError for one that leaves no room for a token."""
    if op.prompt is not None:
        return [int(token) for token in op.prompt.tolist()]
    ids = chat.render(base.tokenizer, op.messages or [])
    check_prompt(tensor("int64", ids), base.facts.context_length - 1, base.facts)
    return ids


def new_rows(base: BaseModel, op: Sample) -> list[Row]:
    def matcher() -> Detokenizer | None:
        return Detokenizer(base.tokenizer, skip_special=False) if op.params.stop else None

    return [Row(sample=index, matcher=matcher()) for index in range(op.num_samples)]


def ending(base: BaseModel, group: Group, row: Row) -> str | None:
    """Why the row ends with its newest token; None if it goes on."""
    stops_nowhere = group.op.params.stop == []
    if row.tokens[-1] in base.facts.eos_token_ids and not stops_nowhere:
        return "stop"
    if row.matcher is not None:
        stops = group.op.params.stop or []
        longest = max(map(len, stops))
        before = max(0, len(row.matcher.text) - longest + 1)
        if (
            row.matcher.push(row.tokens[-1])
            and first_stop(row.matcher.text, stops, before) is not None
        ):
            return "stop"
    return "length" if len(row.tokens) >= group.length_max else None


def result_of(base: BaseModel, group: Group) -> SampleResult:
    """Of whatever ran: rows that were left early end by length."""
    logprobs, topk = group.prompt_logprobs or (None, None)
    return SampleResult(
        sequences=[_sequence(base, group.op, row) for row in group.rows],
        prompt_logprobs=logprobs if group.op.include_prompt_logprobs else None,  # type: ignore[arg-type]
        topk_prompt_logprobs=topk,
        prompt_tokens=len(group.prompt),
        cached_tokens=group.cached,
    )


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
