"""Our results in the words of the wire. Pure.

No NaN and no infinity leaves: JSON has none, and the SDK's types refuse a null wherever a number is
expected. The first prompt token has no log-probability: `promptLogprobs` begins with 0.0 (the SDK
raises on a null there), `topkPromptLogprobs` with [], and `computeLogprobs` alone with a null.
"""

import math
from typing import Any, Final

import numpy as np

from gristmill_contracts.http import OperationView
from gristmill_contracts.metric_names import sagemaker_name
from gristmill_contracts.operations import (
    ComputeLogprobsResult,
    ForwardResult,
    OptimStepResult,
    Result,
    SampledSequence,
    SampleResult,
    SaveResult,
    Tensor,
)
from gristmill_contracts.usage import Counts
from gristmill_gateway.sagemaker import arns
from gristmill_gateway.sagemaker.arns import PackageName, Scope

Shape = dict[str, Any]  # Any: a shape of the service model as JSON

LOSS_OUTPUT_TYPE: Final = "float32"
LOWEST: Final = -3.4028234663852886e38
"""Stands for minus infinity: the smallest finite float32."""
MEMBERS: Final = {
    "forward": "forward",
    "forward_backward": "forwardBackward",
    "optim_step": "optimizerStep",
    "save_weights": "saveWeights",
    "save_state": "saveState",
    "load_state": "loadState",
    "sample": "sample",
    "compute_logprobs": "computeLogprobs",
    "load_weights_for_sampling": "loadWeightsForSampling",
}


def training_answer(view: OperationView, scope: Scope) -> Shape:
    """GetTrainingOperationResultOutput of an operation that ended."""
    answer = _ended(view)
    if answer["status"] == "Completed":
        answer["operationResult"] = {MEMBERS[view.kind]: training_result(view, scope)}
        if isinstance(view.result, ForwardResult):
            answer["tokenUsage"] = _training_usage(view.counts)
    return answer


def sampling_answer(view: OperationView) -> Shape:
    """GetSamplingOperationResultOutput of an operation that ended. It has no Skipped."""
    answer = _ended(view)
    if answer["status"] == "Completed":
        answer["operationResult"] = {MEMBERS[view.kind]: sampling_result(view.result, view.counts)}
    elif answer["status"] == "Skipped":
        answer["status"] = "Failed"
    return answer


def _ended(view: OperationView) -> Shape:
    if view.state == "Completed":
        return {"status": "Completed"}
    status = "Skipped" if view.state == "Skipped" else "Failed"
    message = view.error.message if view.error is not None else f"the operation is {view.state}"
    return {"status": status, "errorDetails": message}


def training_result(view: OperationView, scope: Scope) -> Shape:
    result = view.result
    if isinstance(result, ForwardResult):
        return {
            "lossFnOutputType": LOSS_OUTPUT_TYPE,
            "lossFnOutputs": [
                {name: _tensor_data(inner) for name, inner in output.items()}
                for output in result.outputs
            ],
            "metrics": pass_metrics(result.metrics),
            "tokenUsage": _training_usage(view.counts),
        }
    if isinstance(result, OptimStepResult):
        return {"metrics": _metrics(result.metrics)}
    if isinstance(result, SaveResult):
        package = PackageName(result.group, result.version)
        return {"modelPackageArn": arns.package_arn(scope, package)}
    return {}


def pass_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The loss is the mean over datums of each one's sum, for the SDK averages chunks by datums."""
    found = _metrics({k: v for k, v in metrics.items() if k not in ("loss_sum", "datums")})
    datums = metrics.get("datums", 0.0)
    loss = metrics.get("loss_sum", math.nan) / datums if datums else math.nan
    return ({"actor/pg_loss": loss} if math.isfinite(loss) else {}) | found


def _metrics(metrics: dict[str, float]) -> dict[str, float]:
    named = {sagemaker_name(name): value for name, value in metrics.items()}
    return {name: value for name, value in named.items() if math.isfinite(value)}


def sampling_result(result: Result | None, counts: Counts | None) -> Shape:
    if isinstance(result, SampleResult):
        prefill = counts.prefill if counts is not None else result.prompt_tokens
        answer: Shape = {
            "sequences": [
                _sequence(sequence, prefill if index == 0 else 0)
                for index, sequence in enumerate(result.sequences)
            ]
        }
        if result.prompt_logprobs is not None:
            answer["promptLogprobs"] = _after_first(result.prompt_logprobs, 0.0)
        if result.topk_prompt_logprobs is not None:
            answer["topkPromptLogprobs"] = [
                [{"tokenId": token, "logprob": finite(logprob)} for token, logprob in row]
                for row in result.topk_prompt_logprobs
            ]
        return answer
    if isinstance(result, ComputeLogprobsResult):
        return {"logprobs": _after_first(result.logprobs, None)}
    return {}


def _sequence(sequence: SampledSequence, prefill: int) -> Shape:
    return {
        "stopReason": sequence.stop_reason,
        "tokens": sequence.tokens.tolist(),
        "logprobs": finite_list(sequence.logprobs),
        "tokenUsage": {"prefill": prefill, "decode": sequence.tokens.size},
    }


def _after_first(logprobs: Tensor, first: float | None) -> list[float | None]:
    """All but the first, which is not defined."""
    rest = finite_list(logprobs)[1:]
    return [first, *rest] if logprobs.size else []


def _tensor_data(value: Tensor) -> Shape:
    data = finite_list(value) if value.dtype == "float32" else value.tolist()
    return {"data": data, "dtype": value.dtype, "shape": list(value.shape)}


def values_in(result: Result | None) -> int:
    """About how many numbers a result has: how long it takes to write."""
    if isinstance(result, ForwardResult):
        return sum(inner.size for output in result.outputs for inner in output.values())
    if isinstance(result, SampleResult):
        rows = len(result.topk_prompt_logprobs or ())
        return rows + 2 * sum(sequence.tokens.size for sequence in result.sequences)
    return result.logprobs.size if isinstance(result, ComputeLogprobsResult) else 0


def finite_list(value: Tensor) -> list[float]:
    """The values of a float32 tensor, each one a number that JSON has."""
    values = value.tolist()
    if np.isfinite(np.frombuffer(value.data, dtype="<f4")).all():
        return values  # type: ignore[return-value] # float32 makes a list of floats.
    return [finite(entry) for entry in values]


def finite(value: float) -> float:
    """The nearest number that JSON has."""
    if math.isfinite(value):
        return value
    return -LOWEST if value > 0 else LOWEST


def _training_usage(counts: Counts | None) -> Shape:
    return {"trainingTokens": counts.train if counts is not None else 0}
