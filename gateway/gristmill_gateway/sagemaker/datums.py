"""Training data of the wire as datums: every fault is named by datum index and key. Pure."""

from typing import Any, Final

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import Datum, LossName, Tensor
from gristmill_gateway.sagemaker.documents import array, choice, members, shown
from gristmill_gateway.sagemaker.model_facts import SessionFacts
from gristmill_gateway.sagemaker.tensors import read_tensor, token_ids

CHUNKS_MAX: Final = limits.DATUM_TOKENS_MAX
INPUT_KEYS: Final = (
    "target_tokens", "weights", "advantages", "logprobs", "ref_log_prob", "temperature",
)  # fmt: skip
_RL_KEYS: Final = ("target_tokens", "weights", "advantages", "logprobs")
REQUIRED_KEYS: Final[dict[LossName, tuple[str, ...]]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": _RL_KEYS,
    "ppo": _RL_KEYS,
    "cispo": _RL_KEYS,
}


def read_datums(value: object, path: str, loss: LossName, facts: SessionFacts) -> list[Datum]:
    """The datums of a pass. Raises InvalidRequestError."""
    items = array(value, path, limits.DATUMS_PER_OPERATION_MAX, 1)
    datums: list[Datum] = []
    total = 0
    for index, item in enumerate(items):
        datum = read_datum(item, f"{path}[{index}]", loss, facts)
        total += datum.tokens.size
        if total > limits.OPERATION_TOKENS_MAX:
            raise InvalidRequestError(
                f"{path} holds more than {limits.OPERATION_TOKENS_MAX} tokens at element {index}; send "
                "fewer datums at once"
            )
        datums.append(datum)
    return datums


def read_datum(value: object, path: str, loss: LossName, facts: SessionFacts) -> Datum:
    found = members(value, path, required=("modelInput",), optional=("lossFnInputs",))
    tokens = read_model_input(found["modelInput"], f"{path}.modelInput", facts)
    _check_length(tokens, f"{path}.modelInput", facts)
    inputs = found.get("lossFnInputs", {})
    where = f"{path}.lossFnInputs"
    if not isinstance(inputs, dict):
        raise InvalidRequestError(f"{where} is {shown(inputs)}; it must be an object of tensors")
    for key in REQUIRED_KEYS[loss]:
        if inputs.get(key) is None:
            raise InvalidRequestError(f"{where}.{key} is required by {loss} and missing")
    # In the order of INPUT_KEYS, so that the same inputs always hash alike.
    known = {key: inputs[key] for key in INPUT_KEYS if inputs.get(key) is not None}
    unknown = [key for key in inputs if key not in INPUT_KEYS]
    if unknown:
        raise InvalidRequestError(
            f"{where}: {shown(unknown[0])} is not supported; keys are {', '.join(INPUT_KEYS)}"
        )
    tensors = {
        key: _read_input(inner, f"{where}.{key}", key, tokens.size, facts)
        for key, inner in known.items()
    }
    return Datum(tokens, tensors)


def _read_input(value: object, path: str, key: str, length: int, facts: SessionFacts) -> Tensor:
    integral = key == "target_tokens"
    packed, values = read_tensor(value, path, integral=integral)
    if packed.size != length:
        raise InvalidRequestError(
            f"{path} has {packed.size} values, and the datum has {length} tokens; send one for each token"
        )
    if integral:
        return token_ids(values, f"{path}.data", facts.vocabulary_size)
    if key == "temperature" and min(packed.tolist()) <= 0:
        raise InvalidRequestError(f"{path} holds {min(packed.tolist())}; temperatures are above 0")
    return packed


def read_model_input(value: object, path: str, facts: SessionFacts) -> Tensor:
    """int64 (N,) with N >= 1: the tokens of all chunks in order. Raises InvalidRequestError."""
    found = members(value, path, required=("chunks",))
    chunks = array(found["chunks"], f"{path}.chunks", CHUNKS_MAX, 1)
    tokens: list[Any] = []
    for index, chunk in enumerate(chunks):
        where = f"{path}.chunks[{index}]"
        parts = members(chunk, where, required=("tokens", "type"))
        choice(parts["type"], f"{where}.type", ("encoded_text",))
        ids = array(parts["tokens"], f"{where}.tokens", limits.DATUM_TOKENS_MAX)
        packed = token_ids(ids, f"{where}.tokens", facts.vocabulary_size)
        if len(chunks) == 1 and ids:
            return packed
        tokens += ids
    if not tokens:
        raise InvalidRequestError(f"{path} holds no token; send at least one")
    return token_ids(tokens, path, facts.vocabulary_size)


def _check_length(tokens: Tensor, path: str, facts: SessionFacts) -> None:
    most = min(limits.DATUM_TOKENS_MAX, facts.context_length or limits.DATUM_TOKENS_MAX)
    if tokens.size > most:
        raise InvalidRequestError(
            f"{path} has {tokens.size} tokens, and the context of base model {facts.model!r} holds {most}; "
            "shorten it"
        )
