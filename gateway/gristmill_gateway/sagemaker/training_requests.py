"""Training requests of the wire as operations of ours. Pure.

Defaults of the optimizer are the service's own (api-models-aws), which differ from the SDK's: the SDK
sends what it means.
"""

import re
from dataclasses import dataclass
from typing import Any, Final, cast

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.ids import CheckpointId
from gristmill_contracts.operations import (
    CheckpointRef,
    Forward,
    ForwardBackward,
    LoadState,
    LossName,
    OptimStep,
    SaveState,
    SaveWeights,
    TrainOperation,
)
from gristmill_contracts.optimizer_defaults import SAGEMAKER
from gristmill_gateway.sagemaker.datums import REQUIRED_KEYS, read_datums
from gristmill_gateway.sagemaker.documents import (
    Document,
    boolean,
    choice,
    integer,
    members,
    number,
    one_of,
    shown,
    text,
)
from gristmill_gateway.sagemaker.model_facts import SessionFacts

OPERATION_CONFIG: Final = "operationConfig"
PASSES: Final = ("forward", "forwardBackward")
KINDS: Final = (*PASSES, "optimizerStep", "saveWeights", "saveState", "loadState")
CLIP_KEYS: Final = {"clip_low_threshold": (0.0, 1.0), "clip_high_threshold": (1.0, 10.0)}
CLIPPED_LOSSES: Final = ("ppo", "cispo")
ARN_CHARS_MAX: Final = 2048
_CLIENT_TOKEN: Final = re.compile(rf"[a-zA-Z0-9-]{{1,{limits.CLIENT_TOKEN_CHARS_MAX}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """operation: a loadState still names its checkpoint by ARN alone, with an empty id."""

    number: int
    client_token: str | None
    operation: TrainOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What of a refused request must still be told to the meter."""

    number: int
    client_token: str | None
    breaks_accumulation: bool


def read_training_request(document: Document, facts: SessionFacts) -> TrainingRequest:
    """Raises InvalidRequestError naming the first fault."""
    found = members(
        document,
        "request",
        required=("sequenceNumber", OPERATION_CONFIG),
        optional=("clientToken",),
    )
    sequence = integer(found["sequenceNumber"], "sequenceNumber", 1, limits.SEQUENCE_NUMBER_MAX)
    token = found.get("clientToken")
    if token is not None and not (isinstance(token, str) and _CLIENT_TOKEN.fullmatch(token)):
        raise InvalidRequestError(
            f"clientToken is {shown(token)}; it must be 1 to {limits.CLIENT_TOKEN_CHARS_MAX} letters, "
            "digits and hyphens"
        )
    operation = read_training_operation(found[OPERATION_CONFIG], facts)
    return TrainingRequest(number=sequence, client_token=token, operation=operation)


def readable_identity(document: Document) -> Identity | None:
    """Number and token of a request that was refused; None if it has no valid number."""
    sequence = document.get("sequenceNumber")
    if type(sequence) is not int or not 1 <= sequence <= limits.SEQUENCE_NUMBER_MAX:
        return None
    token = document.get("clientToken")
    valid = isinstance(token, str) and _CLIENT_TOKEN.fullmatch(token)
    config = document.get(OPERATION_CONFIG)
    breaks = isinstance(config, dict) and config.get("forwardBackward") is not None
    return Identity(
        number=sequence, client_token=token if valid else None, breaks_accumulation=breaks
    )


def read_training_operation(value: object, facts: SessionFacts) -> TrainOperation:
    kind, config = one_of(value, OPERATION_CONFIG, KINDS)
    path = f"{OPERATION_CONFIG}.{kind}"
    if kind in PASSES:
        return _read_pass(kind, config, path, facts)
    if kind == "optimizerStep":
        found = members(config, path, required=("adamParamsConfig",))
        return read_optim_step(found["adamParamsConfig"], f"{path}.adamParamsConfig")
    if kind == "loadState":
        return _read_load_state(config, path)
    return _read_save(kind, config, path, facts)


def _read_pass(
    kind: str, config: object, path: str, facts: SessionFacts
) -> Forward | ForwardBackward:
    found = members(config, path, required=("lossFnName", "datumList"), optional=("lossFnConfig",))
    loss = cast(LossName, choice(found["lossFnName"], f"{path}.lossFnName", tuple(REQUIRED_KEYS)))
    loss_config = _read_loss_config(found.get("lossFnConfig", {}), f"{path}.lossFnConfig", loss)
    datums = read_datums(found["datumList"], f"{path}.datumList", loss, facts)
    if kind == "forward":
        return Forward(loss=loss, loss_config=loss_config, datums=datums)
    return ForwardBackward(loss=loss, loss_config=loss_config, datums=datums)


def _read_loss_config(value: Any, path: str, loss: LossName) -> dict[str, float]:
    keys = tuple(CLIP_KEYS) if loss in CLIPPED_LOSSES else ()
    found = members(value, path, optional=keys)
    return {
        key: number(found[key], f"{path}.{key}", *CLIP_KEYS[key]) for key in keys if key in found
    }


def read_optim_step(value: object, path: str) -> OptimStep:
    """Absent fields are the service's defaults: they change nothing from one release to the next."""
    optional = ("beta1", "beta2", "eps", "weightDecay", "gradClipNorm", "loraPlusLrRatio")
    found = members(value, path, required=("learningRate",), optional=optional)

    def read(name: str, default: float, low: float, high: float) -> float:
        return number(found.get(name, default), f"{path}.{name}", low, high)

    rate = number(
        found["learningRate"], f"{path}.learningRate", 0, limits.LEARNING_RATE_MAX, above_low=True
    )
    return OptimStep(
        learning_rate=rate,
        beta1=read("beta1", SAGEMAKER.beta1, 0, limits.BETA_MAX),
        beta2=read("beta2", SAGEMAKER.beta2, 0, limits.BETA_MAX),
        eps=read("eps", SAGEMAKER.eps, limits.EPS_MIN, limits.EPS_MAX),
        weight_decay=read("weightDecay", SAGEMAKER.weight_decay, 0, limits.WEIGHT_DECAY_MAX),
        grad_clip_norm=read("gradClipNorm", SAGEMAKER.grad_clip_norm, 0, limits.GRAD_CLIP_NORM_MAX),
        lora_plus_lr_ratio=read(
            "loraPlusLrRatio",
            SAGEMAKER.lora_plus_lr_ratio,
            limits.LORA_PLUS_RATIO_MIN,
            limits.LORA_PLUS_RATIO_MAX,
        ),
    )


def _read_save(
    kind: str, config: object, path: str, facts: SessionFacts
) -> SaveWeights | SaveState:
    optional = ("description", "mergeWeights") if kind == "saveWeights" else ("description",)
    found = members(config, path, optional=optional)
    description = text(
        found.get("description", ""), f"{path}.description", limits.DESCRIPTION_CHARS_MAX
    )
    if kind == "saveState":
        return SaveState(location=facts.location, description=description)
    merge = boolean(found.get("mergeWeights", False), f"{path}.mergeWeights")
    return SaveWeights(location=facts.location, merge=merge, description=description)


def _read_load_state(config: object, path: str) -> LoadState:
    found = members(config, path, required=("modelPackageArn", "loadOptimizer"))
    arn = text(found["modelPackageArn"], f"{path}.modelPackageArn", ARN_CHARS_MAX, 1)
    return LoadState(
        checkpoint=unresolved(arn),
        with_optimizer=boolean(found["loadOptimizer"], f"{path}.loadOptimizer"),
    )


def unresolved(arn: str) -> CheckpointRef:
    """A checkpoint known by name alone."""
    return CheckpointRef(id=CheckpointId(""), path="", name=arn)
