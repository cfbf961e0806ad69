"""The most tokens that an operation may use, known before it runs. Pure."""

from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.operations import Operation, Sample, count_before
from gristmill_contracts.usage import Counts

TEMPLATE_TOKENS: Final = 64
MESSAGE_TOKENS: Final = 16
"""What a chat template may add to a stream's prompt, once and around each message. A stream whose prompt
turns out to be longer ends before anything of it leaves."""


def worst_counts(operation: Operation, context_length: int) -> Counts:
    """Exact for training. `context_length` 0 = not known: a prompt of messages counts as the longest."""
    if not isinstance(operation, Sample):
        return count_before(operation)
    longest = context_length or limits.DATUM_TOKENS_MAX
    prompt = longest if operation.prompt is None else operation.prompt.size
    tokens = min(operation.params.max_tokens, longest)
    return Counts(
        prefill=prompt,
        cached_prefill=prompt * (operation.num_samples - 1),
        sample=tokens * operation.num_samples,
    )


def stream_prompt(operation: Sample, worst: Counts) -> Counts:
    """What a stream's prompt is taken to have at most: a token of text has a byte at least."""
    if operation.messages is None:
        return Counts(prefill=worst.prefill)
    written = sum(len(m.content.encode()) + MESSAGE_TOKENS for m in operation.messages)
    return Counts(prefill=min(worst.prefill, written + TEMPLATE_TOKENS))
