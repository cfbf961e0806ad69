"""OpenAI chat bodies as samples of ours. Pure, but for the seed that the caller draws.

What would change the answer and is not supported is refused; what cannot (a user's id, metadata) is
accepted and left alone.
"""

from dataclasses import dataclass
from typing import Any, Final

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import ChatMessage, CheckpointRef, Sample, SamplingParams
from gristmill_gateway.sagemaker.documents import (
    Document,
    array,
    boolean,
    choice,
    integer,
    members,
    number,
    shown,
    text,
)
from gristmill_gateway.sagemaker.model_facts import SessionFacts
from gristmill_gateway.sagemaker.sampling_requests import (
    TOP_P_MIN,
    read_stop,
    read_top_k,
)

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_TOKENS_DEFAULT: Final = 4096
"""Where neither the client nor the model says how much there is room for."""
_READ: Final = (
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n",
    "stop", "seed", "logprobs", "stream", "stream_options",
)  # fmt: skip
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "ignore_eos": (False,),
    "echo": (False,),
}
"""What is accepted with a value that changes nothing."""
_IGNORED: Final = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)
_NAME_CHARS_MAX: Final = 256
_CONTENT_CHARS_MAX: Final = limits.CHAT_BODY_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """model: as the client called it, to be repeated; empty if it did not."""

    sample: Sample
    model: str
    logprobs: bool
    stream: bool
    include_usage: bool


def read_chat(
    document: Document, facts: SessionFacts, adapter: CheckpointRef | None, seed: int
) -> ChatRequest:
    """seed: for a request that names none. Raises InvalidRequestError naming the first fault."""
    _check_unsupported(document)
    found = members(document, "body", ("messages",), (*_READ, *_NEUTRAL, *_IGNORED))
    options = members(found.get("stream_options", {}), "stream_options", (), ("include_usage",))
    sample = Sample(
        prompt=None,
        messages=_read_messages(found["messages"]),
        num_samples=integer(found.get("n", 1), "n", 1, limits.SAMPLES_PER_PROMPT_MAX),
        params=_read_params(found, facts, seed),
        include_prompt_logprobs=False,
        topk_prompt_logprobs=0,
        include_text=True,
        adapter=adapter,
    )
    return ChatRequest(
        sample=sample,
        model=text(found.get("model", ""), "model", _NAME_CHARS_MAX),
        logprobs=boolean(found.get("logprobs", False), "logprobs"),
        stream=boolean(found.get("stream", False), "stream"),
        include_usage=boolean(options.get("include_usage", False), "stream_options.include_usage"),
    )


def _check_unsupported(document: Document) -> None:
    for name, neutral in _NEUTRAL.items():
        value = document.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(
                f"{name} is {shown(value)}, which is not supported here; leave it out"
            )


def _read_params(found: Document, facts: SessionFacts, seed: int) -> SamplingParams:
    stop = found.get("stop")
    top_p = number(found.get("top_p", 1.0), "top_p", 0, 1)
    temperature = number(found.get("temperature", 1.0), "temperature", 0, limits.TEMPERATURE_MAX)
    return SamplingParams(
        max_tokens=_read_max_tokens(found, facts),
        temperature=temperature,
        top_k=read_top_k(found.get("top_k", -1), "top_k"),
        top_p=max(top_p, TOP_P_MIN),
        seed=integer(found.get("seed", seed), "seed", 0, limits.SEED_MAX),
        stop=None if stop is None else read_stop([stop] if isinstance(stop, str) else stop, "stop"),
    )


def _read_max_tokens(found: Document, facts: SessionFacts) -> int:
    name = "max_completion_tokens" if "max_completion_tokens" in found else "max_tokens"
    default = min(facts.context_length or MAX_TOKENS_DEFAULT, limits.SAMPLE_TOKENS_MAX)
    return integer(found.get(name, default), name, 1, limits.SAMPLE_TOKENS_MAX)


def _read_messages(value: object) -> list[ChatMessage]:
    items = array(value, "messages", limits.CHAT_MESSAGES_MAX, 1)
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(items)]


def _read_message(value: object, path: str) -> ChatMessage:
    found = members(value, path, ("role", "content"), ("name", "tool_call_id", "refusal"))
    role = choice(found["role"], f"{path}.role", ROLES)
    # The templates of open models know no developer; OpenAI means by it what they call system.
    return ChatMessage(
        "system" if role == "developer" else role,
        _read_content(found["content"], f"{path}.content"),
    )


def _read_content(value: object, path: str) -> str:
    if not isinstance(value, list):
        return text(value, path, _CONTENT_CHARS_MAX)
    parts = []
    for index, part in enumerate(array(value, path, limits.CHAT_MESSAGES_MAX, 1)):
        found = members(part, f"{path}[{index}]", ("type", "text"))
        choice(found["type"], f"{path}[{index}].type", ("text",))
        parts.append(text(found["text"], f"{path}[{index}].text", _CONTENT_CHARS_MAX))
    return "".join(parts)
