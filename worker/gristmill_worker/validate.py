"""What an operation must satisfy before anything runs. The first fault is named with datum and key."""

import math
from itertools import pairwise

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import (
    ITEM_BYTES,
    ComputeLogprobs,
    Datum,
    Forward,
    ForwardBackward,
    LossName,
    Operation,
    OptimStep,
    Sample,
    Tensor,
)
from gristmill_worker.facts import ModelFacts
from gristmill_worker.losses import CONFIG_KEYS, INPUT_KEYS, REQUIRED_CONFIG, REQUIRED_INPUTS


def check_operation(operation: Operation, facts: ModelFacts) -> None:
    """Raises InvalidRequestError."""
    if isinstance(operation, Forward | ForwardBackward):
        _check_config(operation.loss, operation.loss_config)
        if not operation.datums:
            raise InvalidRequestError("the operation has no datums; send at least one")
        if operation.loss == "dpo" and len(operation.datums) % 2:
            raise InvalidRequestError(
                f"dpo has {len(operation.datums)} datums; send pairs, each chosen one before its rejected one"
            )
        for index, datum in enumerate(operation.datums):
            check_datum(index, datum, operation.loss, facts)
    elif isinstance(operation, OptimStep):
        _check_optim(operation)
    elif isinstance(operation, ComputeLogprobs):
        check_prompt(operation.prompt, facts.context_length, facts)
    elif isinstance(operation, Sample):
        _check_sample(operation, facts)


def check_prompt(prompt: Tensor, length_max: int, facts: ModelFacts) -> None:
    """`prompt` int64 (P,), 1 <= P <= length_max, ids in the vocabulary."""
    _check_layout("the prompt", prompt, "int64")
    if len(prompt.shape) != 1 or prompt.size == 0:
        raise InvalidRequestError(f"the prompt has shape {prompt.shape}; send one row of tokens")
    if prompt.size > length_max:
        raise InvalidRequestError(
            f"the prompt has {prompt.size} tokens and the model's context of "
            f"{facts.context_length} leaves {length_max}; shorten it"
        )
    _check_ids("the prompt", prompt, facts)


def check_datum(index: int, datum: Datum, loss: LossName, facts: ModelFacts) -> None:
    where = f"datum {index}"
    _check_layout(f"{where}: tokens", datum.tokens, "int64")
    length = datum.tokens.size
    if len(datum.tokens.shape) != 1 or length == 0:
        raise InvalidRequestError(f"{where}: tokens have shape {datum.tokens.shape}, not (N,)")
    if length > facts.context_length:
        raise InvalidRequestError(
            f"{where}: {length} tokens do not fit the context of {facts.context_length}"
        )
    _check_ids(f"{where}: tokens", datum.tokens, facts)
    missing = [key for key in REQUIRED_INPUTS[loss] if key not in datum.loss_inputs]
    if missing:
        raise InvalidRequestError(f"{where}: {loss} needs {', '.join(missing)}")
    shapes = _input_shapes(datum, loss)
    for key, value in datum.loss_inputs.items():
        _check_input(where, key, value, shapes.get(key, (length,)))
    _check_width(where, datum, loss)
    _check_ids(f"{where}: target_tokens", datum.loss_inputs["target_tokens"], facts)


def _input_shapes(datum: Datum, loss: LossName) -> dict[str, tuple[int, ...]]:
    """Of those inputs that need not hold one value for each token."""
    length, targets = datum.tokens.size, datum.loss_inputs["target_tokens"].shape
    if "target_rows" in datum.loss_inputs:
        flat = targets[:1]
        return {"target_rows": (length + 1,), "target_tokens": flat, "weights": flat}
    if loss != "cross_entropy" or len(targets) != 2 or targets[1] == 0:
        return {}
    wide = (length, targets[1])
    return {"target_tokens": wide, "weights": wide}


def _check_width(where: str, datum: Datum, loss: LossName) -> None:
    """How many targets a token has; sparse ones in rows from 0 to the number of targets."""
    targets, sparse = datum.loss_inputs["target_tokens"], datum.loss_inputs.get("target_rows")
    width = targets.shape[1] if len(targets.shape) == 2 else 1
    if sparse is not None:
        if loss != "cross_entropy":
            raise InvalidRequestError(f"{where}: {loss} takes one target a token, no target_rows")
        rows = [int(entry) for entry in sparse.tolist()]
        sizes = [end - start for start, end in pairwise(rows)]
        if rows[0] != 0 or rows[-1] != targets.size or min(sizes) < 0:
            raise InvalidRequestError(
                f"{where}: target_rows must rise from 0 to the number of targets, {targets.size}"
            )
        width = max(sizes)
    if width > limits.TARGETS_PER_TOKEN_MAX:
        raise InvalidRequestError(
            f"{where}: a token has {width} targets; send at most {limits.TARGETS_PER_TOKEN_MAX}"
        )


def _check_input(where: str, key: str, value: Tensor, expected: tuple[int, ...]) -> None:
    if key not in INPUT_KEYS:
        raise InvalidRequestError(f"{where}: unknown loss input {key}; known: {INPUT_KEYS}")
    _check_layout(f"{where}: {key}", value, "int64" if key.startswith("target_") else "float32")
    if value.shape != expected:
        raise InvalidRequestError(f"{where}: {key} has shape {value.shape}, not {expected}")
    if key == "weights" and not all(map(math.isfinite, value.tolist())):
        raise InvalidRequestError(f"{where}: weights holds a value that is not finite")
    if key == "temperature" and not all(0 < entry < math.inf for entry in value.tolist()):
        raise InvalidRequestError(f"{where}: temperature must be above 0 and finite")


def _check_layout(what: str, value: Tensor, dtype: str) -> None:
    if value.dtype != dtype:
        raise InvalidRequestError(f"{what} is {value.dtype}; send {dtype}")
    if len(value.data) != math.prod(value.shape) * ITEM_BYTES[value.dtype]:
        raise InvalidRequestError(
            f"{what}: {len(value.data)} bytes do not fill shape {value.shape}"
        )


def _check_ids(what: str, value: Tensor, facts: ModelFacts) -> None:
    ids = value.tolist()
    wrong = next((entry for entry in ids if not 0 <= entry < facts.vocabulary_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{what}: token id {wrong} is outside the vocabulary of {facts.vocabulary_size}"
        )


def _check_config(loss: LossName, config: dict[str, float]) -> None:
    unknown = [key for key in config if key not in CONFIG_KEYS[loss]]
    if unknown:
        raise InvalidRequestError(f"{loss} does not take {', '.join(unknown)} in its loss config")
    missing = [key for key in REQUIRED_CONFIG.get(loss, ()) if key not in config]
    if missing:
        raise InvalidRequestError(f"{loss} needs {', '.join(missing)} in its loss config")
    beta, pairs = config.get("beta", 1.0), config.get("pairs", 1.0)
    if not 0 <= beta <= limits.LOSS_BETA_MAX:
        raise InvalidRequestError(f"beta is {beta}; it must lie in [0, {limits.LOSS_BETA_MAX}]")
    if not (math.isfinite(pairs) and pairs >= 1):
        raise InvalidRequestError(f"pairs is {pairs}; it is the number of pairs in all requests")
    low = config.get("clip_low_threshold", 0.0)
    high = config.get("clip_high_threshold", max(low, 1.0))
    if not (math.isfinite(low) and math.isfinite(high) and 0 <= low <= high):
        raise InvalidRequestError(f"clip thresholds {low} and {high} are not 0 <= low <= high")


def _check_optim(step: OptimStep) -> None:
    bounds = {
        "learning_rate": (0.0, limits.LEARNING_RATE_MAX),
        "beta1": (0.0, limits.BETA_MAX),
        "beta2": (0.0, limits.BETA_MAX),
        "eps": (limits.EPS_MIN, limits.EPS_MAX),
        "weight_decay": (0.0, limits.WEIGHT_DECAY_MAX),
        "grad_clip_norm": (0.0, limits.GRAD_CLIP_NORM_MAX),
        "lora_plus_lr_ratio": (limits.LORA_PLUS_RATIO_MIN, limits.LORA_PLUS_RATIO_MAX),
    }
    for name, (low, high) in bounds.items():
        value = getattr(step, name)
        if not low <= value <= high:
            raise InvalidRequestError(f"{name} is {value}; it must lie in [{low}, {high}]")


def _check_sample(sample: Sample, facts: ModelFacts) -> None:
    if (sample.prompt is None) == (sample.messages is None):
        raise InvalidRequestError("a sample takes either a prompt or messages")
    if sample.prompt is not None:
        check_prompt(sample.prompt, facts.context_length - 1, facts)
    if not 1 <= sample.num_samples <= limits.SAMPLES_PER_PROMPT_MAX:
        raise InvalidRequestError(f"num_samples is {sample.num_samples}")
    params = sample.params
    if params.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {params.max_tokens}; ask for at least 1")
    if not 0 <= params.temperature <= limits.TEMPERATURE_MAX:
        raise InvalidRequestError(f"temperature {params.temperature} is not in [0, 2]")
    if not 0 < params.top_p <= 1 or (params.top_k < 1 and params.top_k != -1):
        raise InvalidRequestError(f"top_p {params.top_p} or top_k {params.top_k} is out of range")
    if params.stop is not None and not all(params.stop):
        raise InvalidRequestError("a stop string is empty")
