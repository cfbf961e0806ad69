"""Sampling requests: what they become, and every fault by the name of its field."""

import math
from typing import Any

import pytest

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import (
    ComputeLogprobs,
    LoadWeightsForSampling,
    Sample,
    SampleOperation,
    SamplingParams,
)
from gristmill_gateway.sagemaker.model_facts import SessionFacts
from gristmill_gateway.sagemaker.sampling_requests import read_sampling_request

FACTS = SessionFacts(model="tiny", vocabulary_size=100, context_length=8, location="l")
PROMPT = {"chunks": [{"tokens": [7, 11], "type": "encoded_text"}]}
SEED = 4711


def prompt(size: int) -> dict[str, Any]:
    return {"chunks": [{"tokens": [1] * size, "type": "encoded_text"}]}


def sample(params: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    config = {
        "prompt": PROMPT,
        "numSamples": 1,
        "samplingParams": {"maxTokens": 5, **(params or {})},
    }
    return {"sample": config | fields}


def read(config: Any) -> SampleOperation:
    return read_sampling_request({"operationConfig": config}, FACTS, SEED)


def test_a_sample_with_nothing_named_draws_plainly_with_a_fresh_seed() -> None:
    operation = read(sample())
    assert isinstance(operation, Sample)
    assert operation.prompt is not None
    assert operation.prompt.tolist() == [7, 11]
    assert operation.params == SamplingParams(
        max_tokens=5, temperature=1.0, top_k=-1, top_p=1.0, seed=SEED, stop=None
    )
    assert (operation.num_samples, operation.adapter, operation.messages) == (1, None, None)
    assert (operation.include_prompt_logprobs, operation.topk_prompt_logprobs) == (False, 0)
    assert not operation.include_text


def test_every_field_is_handed_on() -> None:
    params = {"temperature": 0, "topK": 3, "topP": 0.5, "seed": 0, "stop": ["a", "b"]}
    operation = read(
        sample(
            params,
            numSamples=1000,
            includePromptLogprobs=True,
            topkPromptLogprobs=20,
            modelPackageArn="arn:x",
        )
    )
    assert isinstance(operation, Sample)
    assert operation.params == SamplingParams(
        max_tokens=5, temperature=0.0, top_k=3, top_p=0.5, seed=0, stop=["a", "b"]
    )
    assert (operation.num_samples, operation.topk_prompt_logprobs) == (1000, 20)
    assert operation.adapter is not None
    assert operation.adapter.name == "arn:x"


def test_fewer_tokens_than_the_services_minimum_are_accepted() -> None:
    operation = read(sample({"maxTokens": 1}))
    assert isinstance(operation, Sample)
    assert operation.params.max_tokens == 1


def test_an_empty_list_of_stops_is_as_good_as_none() -> None:
    operation = read(sample({"stop": []}))
    assert isinstance(operation, Sample)
    assert operation.params.stop is None


def test_top_p_of_0_keeps_the_likeliest_token() -> None:
    operation = read(sample({"topP": 0}))
    assert isinstance(operation, Sample)
    assert 0 < operation.params.top_p < 1e-6


def test_scoring_and_binding() -> None:
    scored = read({"computeLogprobs": {"prompt": prompt(8), "modelPackageArn": ""}})
    assert isinstance(scored, ComputeLogprobs)
    assert (scored.prompt.size, scored.adapter, scored.topk) == (8, None, 0)
    bound = read({"loadWeightsForSampling": {"modelPackageArn": "arn:x"}})
    assert isinstance(bound, LoadWeightsForSampling)
    assert bound.adapter.name == "arn:x"


S = "operationConfig.sample"
BAD: list[tuple[str, Any, str]] = [
    ("no member", {}, "operationConfig has 0"),
    ("two members", {"sample": {}, "computeLogprobs": {}}, "sample, computeLogprobs"),
    ("no prompt", {"sample": {"numSamples": 1, "samplingParams": {"maxTokens": 1}}}, f"{S}.prompt is required"),
    ("empty prompt", sample(prompt=prompt(0)), f"{S}.prompt holds no token"),
    ("prompt fills the context", sample(prompt=prompt(8)), "has 8 tokens, and the context of base model 'tiny' leaves room for 7"),
    ("scored prompt too long", {"computeLogprobs": {"prompt": prompt(9)}}, "leaves room for 8"),
    ("token outside", sample(prompt={"chunks": [{"tokens": [100], "type": "encoded_text"}]}), "tokens[0] is 100"),
    ("0 samples", sample(numSamples=0), f"{S}.numSamples is 0"),
    ("1001 samples", sample(numSamples=1001), f"{S}.numSamples is 1001"),
    ("samples boolean", sample(numSamples=True), "numSamples is true"),
    ("no params", sample(samplingParams=None), "samplingParams is required"),
    ("no max tokens", sample(samplingParams={}), "maxTokens is required"),
    ("0 tokens", sample({"maxTokens": 0}), "maxTokens is 0"),
    ("too many tokens", sample({"maxTokens": 131_073}), "maxTokens is 131073"),
    ("float tokens", sample({"maxTokens": 5.0}), "maxTokens is 5.0"),
    ("temperature", sample({"temperature": 2.1}), "temperature is 2.1"),
    ("negative temperature", sample({"temperature": -0.1}), "temperature is -0.1"),
    ("temperature nan", sample({"temperature": math.nan}), "temperature is nan"),
    ("top p", sample({"topP": 95}), "topP is 95"),
    ("top k 0", sample({"topK": 0}), "topK is 0"),
    ("top k -2", sample({"topK": -2}), "topK is -2"),
    ("top k huge", sample({"topK": 2**31}), "topK is 2147483648"),
    ("seed negative", sample({"seed": -1}), "seed is -1"),
    ("seed huge", sample({"seed": 2**63}), "seed is 9223372036854775808"),
    ("seed text", sample({"seed": "1"}), "seed is '1'"),
    ("stop text", sample({"stop": "x"}), "stop is a JSON string"),
    ("stop ids", sample({"stop": [1]}), "stop[0] is 1"),
    ("empty stop", sample({"stop": ["a", ""]}), "stop[1] has 0 characters"),
    ("long stop", sample({"stop": ["a" * 257]}), "stop[0] has 257"),
    ("many stops", sample({"stop": ["a"] * 65}), "stop has 65 elements"),
    ("unknown param", sample({"minP": 0.1}), "minP is not a member"),
    ("logprobs text", sample(includePromptLogprobs="yes"), "includePromptLogprobs is 'yes'"),
    ("topk 21", sample(topkPromptLogprobs=21), "topkPromptLogprobs is 21"),
    ("topk negative", sample(topkPromptLogprobs=-1), "topkPromptLogprobs is -1"),
    ("arn number", sample(modelPackageArn=7), "modelPackageArn is 7"),
    ("bind to nothing", {"loadWeightsForSampling": {}}, "modelPackageArn is required"),
    ("bind to empty", {"loadWeightsForSampling": {"modelPackageArn": ""}}, "modelPackageArn has 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "text"), BAD, ids=[row[0] for row in BAD])
def test_a_fault_is_refused_by_the_name_of_its_field(name: str, config: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(config)
    assert text in caught.value.message, caught.value.message


def test_this_plane_takes_no_token_and_no_number() -> None:
    for extra in ({"clientToken": "a"}, {"sequenceNumber": 1}):
        with pytest.raises(InvalidRequestError, match="is not a member"):
            read_sampling_request({"operationConfig": sample(), **extra}, FACTS, SEED)
