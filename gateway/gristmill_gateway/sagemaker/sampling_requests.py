"""Sampling requests of the wire as operations of ours. Pure, but for the seed that the caller draws."""

from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import (
    CheckpointRef,
    ComputeLogprobs,
    LoadWeightsForSampling,
    Sample,
    SampleOperation,
    SamplingParams,
    Tensor,
)
from gristmill_gateway.sagemaker.datums import read_model_input
from gristmill_gateway.sagemaker.documents import (
    Document,
    array,
    boolean,
    integer,
    members,
    number,
    one_of,
    text,
)
from gristmill_gateway.sagemaker.model_facts import SessionFacts
from gristmill_gateway.sagemaker.training_requests import (
    ARN_CHARS_MAX,
    OPERATION_CONFIG,
    unresolved,
)

KINDS: Final = ("sample", "computeLogprobs", "loadWeightsForSampling")
TOP_K_MAX: Final = 2**31 - 1
TOP_P_MIN: Final = 1e-9
"""topP 0 is allowed on the wire and keeps the likeliest token alone, as the smallest number does."""


def read_sampling_request(document: Document, facts: SessionFacts, seed: int) -> SampleOperation:
    """seed: for a sample that names none. Raises InvalidRequestError naming the first fault.

    Packages are still named by ARN alone, with an empty id.
    """
    found = members(document, "request", required=(OPERATION_CONFIG,))
    kind, config = one_of(found[OPERATION_CONFIG], OPERATION_CONFIG, KINDS)
    path = f"{OPERATION_CONFIG}.{kind}"
    if kind == "sample":
        return _read_sample(config, path, facts, seed)
    if kind == "computeLogprobs":
        found = members(config, path, required=("prompt",), optional=("modelPackageArn",))
        prompt = _read_prompt(found["prompt"], f"{path}.prompt", facts, room=0)
        return ComputeLogprobs(prompt=prompt, topk=0, adapter=_adapter(found, path))
    found = members(config, path, required=("modelPackageArn",))
    arn = text(found["modelPackageArn"], f"{path}.modelPackageArn", ARN_CHARS_MAX, 1)
    return LoadWeightsForSampling(adapter=unresolved(arn))


def _read_sample(config: object, path: str, facts: SessionFacts, seed: int) -> Sample:
    found = members(
        config,
        path,
        required=("prompt", "numSamples", "samplingParams"),
        optional=("includePromptLogprobs", "topkPromptLogprobs", "modelPackageArn"),
    )
    return Sample(
        prompt=_read_prompt(found["prompt"], f"{path}.prompt", facts, room=1),
        messages=None,
        num_samples=integer(
            found["numSamples"], f"{path}.numSamples", 1, limits.SAMPLES_PER_PROMPT_MAX
        ),
        params=_read_params(found["samplingParams"], f"{path}.samplingParams", seed),
        include_prompt_logprobs=boolean(
            found.get("includePromptLogprobs", False), f"{path}.includePromptLogprobs"
        ),
        topk_prompt_logprobs=integer(
            found.get("topkPromptLogprobs", 0),
            f"{path}.topkPromptLogprobs",
            0,
            limits.TOPK_PROMPT_LOGPROBS_MAX,
        ),
        include_text=False,
        adapter=_adapter(found, path),
    )


def _read_prompt(value: object, path: str, facts: SessionFacts, *, room: int) -> Tensor:
    """room: tokens that must still fit behind the prompt."""
    prompt = read_model_input(value, path, facts)
    most = min(limits.DATUM_TOKENS_MAX, facts.context_length or limits.DATUM_TOKENS_MAX) - room
    if prompt.size > most:
        raise InvalidRequestError(
            f"{path} has {prompt.size} tokens, and the context of base model {facts.model!r} leaves room "
            f"for {most}; shorten it"
        )
    return prompt


def _read_params(value: object, path: str, seed: int) -> SamplingParams:
    optional = ("temperature", "topP", "topK", "seed", "stop")
    found = members(value, path, required=("maxTokens",), optional=optional)
    top_p = number(found.get("topP", 1.0), f"{path}.topP", 0, 1)
    return SamplingParams(
        # The service's minimum of 512 is not held up: fewer tokens cost its clients less.
        max_tokens=integer(found["maxTokens"], f"{path}.maxTokens", 1, limits.SAMPLE_TOKENS_MAX),
        temperature=number(
            found.get("temperature", 1.0), f"{path}.temperature", 0, limits.TEMPERATURE_MAX
        ),
        top_k=read_top_k(found.get("topK", -1), f"{path}.topK"),
        top_p=max(top_p, TOP_P_MIN),
        seed=integer(found.get("seed", seed), f"{path}.seed", 0, limits.SEED_MAX),
        stop=read_stop(found.get("stop", []), f"{path}.stop"),
    )


def read_top_k(value: object, path: str) -> int:
    top_k = integer(value, path, -1, TOP_K_MAX)
    if top_k == 0:
        raise InvalidRequestError(f"{path} is 0; it must be -1 (off), or 1 or more")
    return top_k


def read_stop(value: object, path: str) -> list[str] | None:
    """None for an empty list: end tokens still end a sample, which the engine's own empty list would deny."""
    items = array(value, path, limits.STOP_STRINGS_MAX)
    found = [
        text(item, f"{path}[{index}]", limits.STOP_STRING_CHARS_MAX, 1)
        for index, item in enumerate(items)
    ]
    return found or None


def _adapter(found: Document, path: str) -> CheckpointRef | None:
    """The package a sample is bound to. The SDK writes an unbound one as an empty text, too."""
    if found.get("modelPackageArn", "") == "":
        return None
    return unresolved(text(found["modelPackageArn"], f"{path}.modelPackageArn", ARN_CHARS_MAX))
