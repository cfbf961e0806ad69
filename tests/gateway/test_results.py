"""Results in the words of the wire: no NaN, no infinity, and the loss that chunks can be folded from."""

import json
import math

import msgspec
import pytest

from gristmill_contracts.http import OperationView, Problem
from gristmill_contracts.operations import (
    ComputeLogprobsResult,
    ForwardResult,
    SampledSequence,
    SampleResult,
    tensor,
)
from gristmill_contracts.usage import Counts
from gristmill_gateway.sagemaker.arns import Scope
from gristmill_gateway.sagemaker.results import (
    LOWEST,
    finite,
    pass_metrics,
    sampling_answer,
    sampling_result,
    training_answer,
    values_in,
)

SCOPE = Scope("us-west-2", "100000000001")


def test_the_loss_is_the_mean_over_datums_so_that_chunks_fold() -> None:
    """Two datums with losses 2 and 4: one call must say what two calls fold to."""
    whole = pass_metrics({"loss_sum": 6.0, "datums": 2.0, "tokens": 3.0})
    first = pass_metrics({"loss_sum": 2.0, "datums": 1.0, "tokens": 2.0})
    second = pass_metrics({"loss_sum": 4.0, "datums": 1.0, "tokens": 1.0})
    assert whole["actor/pg_loss"] == (first["actor/pg_loss"] + second["actor/pg_loss"]) / 2
    assert whole["global_token_num"] == first["global_token_num"] + second["global_token_num"]


@pytest.mark.parametrize("datums", [0.0, -0.0])
def test_a_loss_without_datums_is_left_out(datums: float) -> None:
    assert pass_metrics({"loss_sum": 1.0, "datums": datums}) == {}
    assert pass_metrics({"loss_sum": math.nan, "datums": 1.0}) == {}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.5, 1.5), (-math.inf, LOWEST), (math.inf, -LOWEST), (math.nan, LOWEST)],
)
def test_every_number_is_one_that_json_has(value: float, expected: float) -> None:
    assert finite(value) == expected
    assert json.loads(msgspec.json.encode(finite(value))) == expected


def test_scores_begin_with_null_and_prompt_logprobs_with_a_number() -> None:
    logprobs = tensor("float32", [math.nan, -1.0, -math.inf])
    scored = ComputeLogprobsResult(logprobs=logprobs, topk=None)
    assert sampling_result(scored, None) == {"logprobs": [None, -1.0, LOWEST]}
    sequence = SampledSequence(
        tokens=tensor("int64", [5]),
        logprobs=tensor("float32", [-1.0]),
        stop_reason="length",
        text=None,
    )
    sampled = SampleResult(
        sequences=[sequence, sequence],
        prompt_logprobs=logprobs,
        topk_prompt_logprobs=[[], [(3, -0.5)], [(4, -math.inf)]],
        prompt_tokens=3,
    )
    answer = sampling_result(sampled, Counts(prefill=3, cached_prefill=3, sample=2))
    assert answer["promptLogprobs"] == [0.0, -1.0, LOWEST]
    assert answer["topkPromptLogprobs"][0] == []
    assert answer["topkPromptLogprobs"][2] == [{"tokenId": 4, "logprob": LOWEST}]
    assert [each["tokenUsage"]["prefill"] for each in answer["sequences"]] == [3, 0]
    assert answer["sequences"][0]["stopReason"] == "length"
    assert values_in(sampled) >= 4


def test_an_end_that_is_no_completion_says_why() -> None:
    for state, status in (("Failed", "Failed"), ("Skipped", "Skipped"), ("Refused", "Failed")):
        view = OperationView(
            stream="train",
            number=1,
            kind="optim_step",
            state=state,  # type: ignore[arg-type]
            error=Problem(code="operation_failed", message="no gradient"),
        )
        assert training_answer(view, SCOPE) == {"status": status, "errorDetails": "no gradient"}
    silent = OperationView(stream="log", number=1, kind="sample", state="Skipped")
    answer = sampling_answer(silent)
    assert answer["status"] == "Failed", "this plane has no Skipped"
    assert answer["errorDetails"]


def test_a_pass_tells_its_tokens_twice() -> None:
    result = ForwardResult(
        outputs=[{"logprobs": tensor("float32", [-0.5, math.nan])}],
        metrics={"loss_sum": 1.0, "datums": 1.0, "tokens": 2.0},
    )
    view = OperationView(
        stream="train",
        number=1,
        kind="forward",
        state="Completed",
        result=result,
        counts=Counts(train=2),
    )
    answer = training_answer(view, SCOPE)
    assert answer["tokenUsage"] == {"trainingTokens": 2}
    inner = answer["operationResult"]["forward"]
    assert inner["tokenUsage"] == {"trainingTokens": 2}
    assert inner["lossFnOutputs"][0]["logprobs"]["data"] == [-0.5, LOWEST]
    assert values_in(result) == 2
