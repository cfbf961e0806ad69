"""Samples as OpenAI chat completions, whole and in chunks. Pure.

The gateway has no tokenizer: `logprobs` names tokens as `token_id:<id>`, as vLLM does on request.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gristmill_contracts.http import Problem, StreamChunk
from gristmill_contracts.operations import SampledSequence, SampleResult
from gristmill_gateway.sagemaker.results import finite

Shape = dict[str, Any]  # Any: OpenAI's JSON

DONE: Final = b"data: [DONE]\n\n"


def completion(
    result: SampleResult, *, answer_id: str, model: str, created_s: int, logprobs: bool
) -> Shape:
    """A `chat.completion`."""
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": sequence.text or ""},
                "finish_reason": sequence.stop_reason,
                "logprobs": _sequence_logprobs(sequence) if logprobs else None,
            }
            for index, sequence in enumerate(result.sequences)
        ],
        "usage": usage(
            result.prompt_tokens,
            sum(sequence.tokens.size for sequence in result.sequences),
            result.cached_tokens,
        ),
    }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Shape:
    """The prompt counts once, however many samples are drawn; a part of it may come from a cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def first_chunk(head: Shape) -> Shape:
    """head: id, created and model."""
    return _chunk(head, {"role": "assistant", "content": ""}, None, None)


def text_chunk(head: Shape, chunk: StreamChunk, *, logprobs: bool) -> Shape:
    told = chunk_logprobs(chunk.tokens, chunk.logprobs) if logprobs else None
    return _chunk(head, {"content": chunk.text}, None, told)


def last_chunk(head: Shape, finish_reason: str, budget: Problem | None = None) -> Shape:
    """budget: why a budget cut the answer short; told in a field of its own, which clients pass over."""
    chunk = _chunk(head, {}, finish_reason, None)
    if budget is not None:
        chunk["budget"] = {"code": budget.code, "message": budget.message}
    return chunk


def usage_chunk(head: Shape, counted: Shape) -> Shape:
    """OpenAI's shape: the chunk with the usage has no choices."""
    return {**head, "object": "chat.completion.chunk", "choices": [], "usage": counted}


def event(shape: Shape) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(shape) + b"\n\n"


def error_event(message: str, kind: str) -> bytes:
    return event({"error": {"message": message, "type": kind, "code": kind}})


def chunk_logprobs(tokens: Sequence[float], logprobs: Sequence[float]) -> Shape:
    return {
        "content": [
            {
                "token": f"token_id:{token}",
                "logprob": finite(logprob),
                "bytes": None,
                "top_logprobs": [],
            }
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
    }


def _sequence_logprobs(sequence: SampledSequence) -> Shape:
    return chunk_logprobs(sequence.tokens.tolist(), sequence.logprobs.tolist())


def _chunk(head: Shape, delta: Shape, finish_reason: str | None, logprobs: Shape | None) -> Shape:
    choice = {
        "index": 0,
        "delta": delta,
        "finish_reason": finish_reason,
        "logprobs": logprobs,
    }
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}
