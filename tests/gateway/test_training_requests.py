"""Training requests: what they become, and every fault by the name of its field."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import (
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveState,
    SaveWeights,
)
from gristmill_gateway.sagemaker.documents import read_object
from gristmill_gateway.sagemaker.model_facts import SessionFacts
from gristmill_gateway.sagemaker.runtime import body_hash
from gristmill_gateway.sagemaker.training_requests import (
    Identity,
    TrainingRequest,
    read_training_request,
    readable_identity,
)

FACTS = SessionFacts(
    model="tiny", vocabulary_size=100, context_length=8, location="acme/data/run-1"
)
TOKENS = [7, 11, 13]
RL = ("target_tokens", "weights", "advantages", "logprobs")


def tensor_data(data: list[Any], dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"data": data, "dtype": dtype, **more}


def datum(tokens: Any = None, **inputs: Any) -> dict[str, Any]:
    """A cross_entropy datum of three tokens; a changed input of None is left out."""
    loss_inputs: dict[str, Any] = {
        "target_tokens": tensor_data([11, 13, 17], "int64", shape=[3]),
        "weights": tensor_data([0, 1, 0.5], shape=[3]),
    }
    chunks = [{"tokens": TOKENS if tokens is None else tokens, "type": "encoded_text"}]
    kept = {key: value for key, value in (loss_inputs | inputs).items() if value is not None}
    return {"modelInput": {"chunks": chunks}, "lossFnInputs": kept}


def rl_datum(**inputs: Any) -> dict[str, Any]:
    filled = {"advantages": tensor_data([1, -1, 0.5]), "logprobs": tensor_data([-1, -2, -0.1])}
    return datum(**(filled | inputs))


def a_pass(*datums: Any, loss: str = "cross_entropy", **more: Any) -> dict[str, Any]:
    return {"forwardBackward": {"lossFnName": loss, "datumList": list(datums), **more}}


def step(**fields: Any) -> dict[str, Any]:
    return {"optimizerStep": {"adamParamsConfig": {"learningRate": 1e-4, **fields}}}


def request(config: Any, **fields: Any) -> dict[str, Any]:
    return {"sequenceNumber": 1, "operationConfig": config, **fields}


def read(config: Any, **fields: Any) -> TrainingRequest:
    return read_training_request(request(config, **fields), FACTS)


# --- translation ---------------------------------------------------------------------------------


def test_a_pass_becomes_packed_datums() -> None:
    config = a_pass(datum(), rl_datum(), loss="cross_entropy")
    found = read(config, clientToken="a-B-9")
    assert (found.number, found.client_token) == (1, "a-B-9")
    operation = found.operation
    assert isinstance(operation, ForwardBackward)
    assert (operation.loss, operation.loss_config) == ("cross_entropy", {})
    first, second = operation.datums
    assert first.tokens.tolist() == TOKENS
    assert first.tokens.shape == (3,)
    assert list(first.loss_inputs) == ["target_tokens", "weights"]
    assert first.loss_inputs["target_tokens"].tolist() == [11, 13, 17]
    assert first.loss_inputs["weights"].tolist() == [0.0, 1.0, 0.5]
    assert list(second.loss_inputs) == list(RL)


def test_chunks_are_joined_in_order() -> None:
    value = datum()
    value["modelInput"]["chunks"] = [
        {"tokens": [7], "type": "encoded_text"},
        {"tokens": [], "type": "encoded_text"},
        {"tokens": [11, 13], "type": "encoded_text"},
    ]
    operation = read({"forward": {"lossFnName": "cross_entropy", "datumList": [value]}}).operation
    assert isinstance(operation, Forward)
    assert operation.datums[0].tokens.tolist() == TOKENS


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "float16", "bfloat16"])
def test_every_dtype_is_widened(dtype: str) -> None:
    floats = read(a_pass(datum(weights=tensor_data([1, 0, 2], dtype)))).operation
    assert isinstance(floats, ForwardBackward)
    weights = floats.datums[0].loss_inputs["weights"]
    assert (weights.dtype, weights.tolist()) == ("float32", [1.0, 0.0, 2.0])
    if dtype.startswith("int"):
        targets = read(a_pass(datum(target_tokens=tensor_data([1, 0, 2], dtype)))).operation
        assert isinstance(targets, ForwardBackward)
        assert targets.datums[0].loss_inputs["target_tokens"].dtype == "int64"


@pytest.mark.parametrize("shape", [[3], [1, 3], [3, 1], None])
def test_a_shape_that_holds_one_value_for_each_token_is_flattened(shape: Any) -> None:
    value = datum(weights=tensor_data([1, 1, 1], shape=shape))
    operation = read(a_pass(value)).operation
    assert isinstance(operation, ForwardBackward)
    assert operation.datums[0].loss_inputs["weights"].shape == (3,)


def test_clip_bounds_are_handed_on() -> None:
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1}
    operation = read(a_pass(rl_datum(), loss="ppo", lossFnConfig=config)).operation
    assert isinstance(operation, ForwardBackward)
    assert operation.loss_config == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.0}


def test_absent_optimizer_fields_are_the_services_defaults() -> None:
    assert read(step()).operation == OptimStep(
        learning_rate=1e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.0,
        grad_clip_norm=1.0,
        lora_plus_lr_ratio=1.0,
    )
    filled = step(
        beta1=0, beta2=0.5, eps=1e-3, weightDecay=1, gradClipNorm=None, loraPlusLrRatio=16
    )
    assert read(filled).operation == OptimStep(
        learning_rate=1e-4,
        beta1=0.0,
        beta2=0.5,
        eps=1e-3,
        weight_decay=1.0,
        grad_clip_norm=1.0,
        lora_plus_lr_ratio=16.0,
    )


def test_saves_and_loads() -> None:
    assert read({"saveWeights": {}}).operation == SaveWeights(
        location="acme/data/run-1", merge=False, description=""
    )
    assert read(
        {"saveWeights": {"mergeWeights": True, "description": "ü"}}
    ).operation == SaveWeights(location="acme/data/run-1", merge=True, description="ü")
    assert read({"saveState": {"description": "x" * 1024}}).operation == SaveState(
        location="acme/data/run-1", description="x" * 1024
    )
    load = read({"loadState": {"modelPackageArn": "arn:x", "loadOptimizer": True}}).operation
    assert isinstance(load, LoadState)
    assert (load.checkpoint.name, load.checkpoint.id, load.with_optimizer) == ("arn:x", "", True)


def test_a_null_member_is_an_absent_one() -> None:
    config = {kind: None for kind in ("forward", "optimizerStep", "loadState")} | {"saveState": {}}
    assert isinstance(read(config, clientToken=None).operation, SaveState)


def test_the_same_request_hashes_alike_and_another_does_not() -> None:
    one = read(a_pass(rl_datum(), loss="ppo"), sequenceNumber=1).operation
    turned = rl_datum()
    turned["lossFnInputs"] = dict(reversed(turned["lossFnInputs"].items()))
    two = read(a_pass(turned, loss="ppo"), sequenceNumber=2, clientToken="x").operation
    other = read(a_pass(rl_datum(weights=tensor_data([0, 1, 0.25])), loss="ppo")).operation
    assert body_hash(one) == body_hash(two) != body_hash(other)


# --- faults --------------------------------------------------------------------------------------

D = "operationConfig.forwardBackward.datumList"
A = "operationConfig.optimizerStep.adamParamsConfig"
LOAD = {"modelPackageArn": "arn:x", "loadOptimizer": True}
NAN = math.nan
BAD: list[tuple[str, Any, str]] = [
    ("no member", {}, "operationConfig has 0 of its members set"),
    ("two members", {"saveState": {}, "saveWeights": {}}, "saveState, saveWeights"),
    ("unknown member", {"train": {}}, "operationConfig.train is not a member"),
    ("not an object", [], "operationConfig is a JSON array"),
    ("null", None, "request.operationConfig is required"),
    ("no loss", {"forward": {"datumList": [datum()]}}, "operationConfig.forward.lossFnName is required"),
    ("unknown loss", a_pass(datum(), loss="dpo"), "lossFnName is 'dpo'"),
    ("a loss of the engine alone", a_pass(rl_datum(), loss="dro"), "lossFnName is 'dro'"),
    ("sparse targets", a_pass(datum(target_rows=tensor_data([0, 1, 2, 3], "int64"))), "'target_rows' is not supported"),
    ("loss is a number", a_pass(datum(), loss=3), "lossFnName is 3"),  # type: ignore[arg-type]
    ("no datums", a_pass(), "datumList has 0 elements"),
    ("too many datums", a_pass(*[datum()] * 1025), "datumList has 1025 elements"),
    ("datum list is an object", {"forwardBackward": {"lossFnName": "ppo", "datumList": {}}}, "datumList is a JSON object"),
    ("datum is null", a_pass(datum(), None), f"{D}[1] is a JSON null"),
    ("unknown datum key", a_pass(datum() | {"weight": 1.0}), f"{D}[0].weight is not a member"),
    ("no input", a_pass({"lossFnInputs": {}}), f"{D}[0].modelInput is required"),
    ("no chunks", a_pass(datum() | {"modelInput": {"chunks": []}}), f"{D}[0].modelInput.chunks has 0"),
    ("empty input", a_pass(datum(tokens=[])), f"{D}[0].modelInput holds no token"),
    ("image chunk", a_pass(datum() | {"modelInput": {"chunks": [{"tokens": [1], "type": "image"}]}}), "type is 'image'"),
    ("chunk without type", a_pass(datum() | {"modelInput": {"chunks": [{"tokens": [1]}]}}), "chunks[0].type is required"),
    ("token is a text", a_pass(datum(), datum(tokens=[7, "11", 13])), f"{D}[1].modelInput.chunks[0].tokens[1] is '11'"),
    ("token is a float", a_pass(datum(tokens=[7, 11.0, 13])), "tokens[1] is 11.0"),
    ("token is a boolean", a_pass(datum(tokens=[7, True, 13])), "tokens[1] is true"),
    ("token is null", a_pass(datum(tokens=[7, None, 13])), "tokens[1] is null"),
    ("negative token", a_pass(datum(tokens=[7, -1, 13])), "tokens[1] is -1"),
    ("token outside", a_pass(datum(tokens=[7, 11, 100])), "tokens[2] is 100, which is no token of the base model; ids are 0 to 99"),
    ("token over 64 bits", a_pass(datum(tokens=[7, 2**64, 13])), "tokens[1] does not fit"),
    ("too long", a_pass(datum(tokens=[1] * 9)), "has 9 tokens, and the context of base model 'tiny' holds 8"),
    ("no inputs", a_pass({"modelInput": datum()["modelInput"]}), "lossFnInputs.target_tokens is required by cross_entropy"),
    ("inputs are a list", a_pass(datum() | {"lossFnInputs": [1]}), f"{D}[0].lossFnInputs is a JSON array"),
    ("no weights", a_pass(datum(weights=None)), "lossFnInputs.weights is required by cross_entropy"),
    ("rl without advantages", a_pass(rl_datum(), rl_datum(advantages=None), loss="cispo"), f"{D}[1].lossFnInputs.advantages is required by cispo"),
    ("rl without logprobs", a_pass(rl_datum(logprobs=None), loss="importance_sampling"), "lossFnInputs.logprobs is required"),
    ("unknown key", a_pass(datum(old_logprobs=tensor_data([1, 1, 1]))), "'old_logprobs' is not supported"),
    ("bare list", a_pass(datum(weights=[1, 1, 1])), f"{D}[0].lossFnInputs.weights is a JSON array"),
    ("no dtype", a_pass(datum(weights={"data": [1, 1, 1]})), "weights.dtype is required"),
    ("unknown dtype", a_pass(datum(weights=tensor_data([1, 1, 1], "float64"))), "weights.dtype is 'float64'"),
    ("dtype is a list", a_pass(datum(weights={"data": [1, 1, 1], "dtype": ["float32"]})), "weights.dtype is a JSON array"),
    ("float targets", a_pass(datum(target_tokens=tensor_data([1, 2, 3], "float32"))), "target_tokens.dtype is float32"),
    ("unknown tensor key", a_pass(datum(weights=tensor_data([1, 1, 1], order="C"))), "weights.order is not a member"),
    ("nested data", a_pass(datum(weights=tensor_data([[1, 1, 1]]))), "weights.data[0] is a JSON array"),
    ("data is a text", a_pass(datum(weights={"data": "AAAA", "dtype": "float32"})), "weights.data is 'AAAA'"),
    ("short", a_pass(datum(), datum(weights=tensor_data([1, 1]))), f"{D}[1].lossFnInputs.weights has 2 values, and the datum has 3 tokens"),
    ("long", a_pass(datum(target_tokens=tensor_data([1, 2, 3, 4], "int64"))), "target_tokens has 4 values"),
    ("empty", a_pass(datum(weights=tensor_data([]))), "weights has 0 values"),
    ("shape of another size", a_pass(datum(weights=tensor_data([1, 1, 1], shape=[4]))), "weights.shape [4] holds 4 values, and data has 3"),
    ("shape is a number", a_pass(datum(weights=tensor_data([1, 1, 1], shape=3))), "weights.shape is 3"),
    ("shape holds a text", a_pass(datum(weights=tensor_data([1, 1, 1], shape=["3"]))), "weights.shape[0] is '3'"),
    ("shape is negative", a_pass(datum(weights=tensor_data([1, 1, 1], shape=[-1, -3]))), "weights.shape[0] is -1"),
    ("nan", a_pass(datum(), datum(weights=tensor_data([1, NAN, 1]))), f"{D}[1].lossFnInputs.weights.data[1] is nan"),
    ("infinity", a_pass(rl_datum(advantages=tensor_data([math.inf, 0, 0])), loss="ppo"), "advantages.data[0] is inf"),
    ("over float32", a_pass(datum(weights=tensor_data([1e39, 1, 1]))), "weights.data[0] is 1e+39"),
    ("integer over float64", a_pass(datum(weights=tensor_data([1, 10**400, 1]))), "weights.data[1] is an integer of more than 40 digits"),
    ("over float16", a_pass(datum(weights=tensor_data([1, 1, 70000], "float16"))), "does not fit float16"),
    ("over int32", a_pass(datum(target_tokens=tensor_data([1, 2, 2**31], "int32"))), "does not fit int32"),
    ("weight is a boolean", a_pass(datum(weights=tensor_data([1, True, 1]))), "weights.data[1] is true"),
    ("float in int64", a_pass(datum(weights=tensor_data([1, 0.5, 1], "int64"))), "weights.data[1] is 0.5"),
    ("target outside", a_pass(datum(target_tokens=tensor_data([1, 2, 100], "int64"))), "target_tokens.data[2] is 100"),
    ("ignored target", a_pass(datum(target_tokens=tensor_data([-100, 2, 3], "int64"))), "target_tokens.data[0] is -100"),
    ("temperature 0", a_pass(datum(temperature=tensor_data([1, 0, 1]))), "temperature holds 0.0"),
    ("config of a loss without any", a_pass(datum(), lossFnConfig={"clip_low_threshold": 0.8}), "clip_low_threshold is not a member"),
    ("unknown config", a_pass(rl_datum(), loss="ppo", lossFnConfig={"beta": 0.1}), "lossFnConfig.beta is not a member"),
    ("clip low", a_pass(rl_datum(), loss="ppo", lossFnConfig={"clip_low_threshold": 1.1}), "clip_low_threshold is 1.1"),
    ("clip high", a_pass(rl_datum(), loss="ppo", lossFnConfig={"clip_high_threshold": 0.9}), "clip_high_threshold is 0.9"),
    ("config is a list", a_pass(rl_datum(), loss="ppo", lossFnConfig=[1]), "lossFnConfig is a JSON array"),
    ("no adam", {"optimizerStep": {}}, "adamParamsConfig is required"),
    ("no rate", {"optimizerStep": {"adamParamsConfig": {}}}, f"{A}.learningRate is required"),
    ("rate 0", step(learningRate=0), f"{A}.learningRate is 0"),
    ("rate large", step(learningRate=0.011), f"{A}.learningRate is 0.011"),
    ("rate text", step(learningRate="1e-4"), "learningRate is '1e-4'"),
    ("rate boolean", step(learningRate=True), "learningRate is true"),
    ("rate nan", step(learningRate=NAN), "learningRate is nan"),
    ("beta1 1", step(beta1=1), "beta1 is 1"),
    ("beta2 negative", step(beta2=-0.1), "beta2 is -0.1"),
    ("eps 0", step(eps=0), "eps is 0"),
    ("eps large", step(eps=0.1), "eps is 0.1"),
    ("decay", step(weightDecay=1.5), "weightDecay is 1.5"),
    ("clip norm", step(gradClipNorm=101), "gradClipNorm is 101"),
    ("lora plus", step(loraPlusLrRatio=0.5), "loraPlusLrRatio is 0.5"),
    ("amsgrad", step(amsgrad=True), "amsgrad is not a member"),
    ("merge text", {"saveWeights": {"mergeWeights": "yes"}}, "mergeWeights is 'yes'"),
    ("merge of a state", {"saveState": {"mergeWeights": True}}, "mergeWeights is not a member"),
    ("long description", {"saveState": {"description": "x" * 1025}}, "description has 1025 characters"),
    ("description number", {"saveState": {"description": 3}}, "description is 3"),
    ("surrogate", {"saveState": {"description": "\ud800"}}, "surrogate"),
    ("load without arn", {"loadState": {"loadOptimizer": True}}, "modelPackageArn is required"),
    ("load without flag", {"loadState": {"modelPackageArn": "a"}}, "loadOptimizer is required"),
    ("load flag", {"loadState": LOAD | {"loadOptimizer": 1}}, "loadOptimizer is 1"),
    ("empty arn", {"loadState": LOAD | {"modelPackageArn": ""}}, "modelPackageArn has 0 characters"),
    ("long arn", {"loadState": LOAD | {"modelPackageArn": "a" * 2049}}, "modelPackageArn has 2049"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "text"), BAD, ids=[row[0] for row in BAD])
def test_a_fault_is_refused_by_the_name_of_its_field(name: str, config: Any, text: str) -> None:
    body = request(config)
    before = copy.deepcopy(body)
    with pytest.raises(InvalidRequestError) as caught:
        read_training_request(body, FACTS)
    assert text in caught.value.message, caught.value.message
    assert len(caught.value.message) < 500
    assert repr(body) == repr(before)
    identity = readable_identity(body)
    assert identity is not None
    assert identity.breaks_accumulation == (
        isinstance(config, dict) and "forwardBackward" in config
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sequenceNumber": 0}, "sequenceNumber is 0"),
        ({"sequenceNumber": -1}, "sequenceNumber is -1"),
        ({"sequenceNumber": 1.0}, "sequenceNumber is 1.0"),
        ({"sequenceNumber": True}, "sequenceNumber is true"),
        ({"sequenceNumber": "1"}, "sequenceNumber is '1'"),
        ({"sequenceNumber": 2**53}, "sequenceNumber is 9007199254740992"),
        ({"sequenceNumber": None}, "request.sequenceNumber is required"),
        ({"clientToken": ""}, "clientToken is ''"),
        ({"clientToken": "a_b"}, "clientToken is 'a_b'"),
        ({"clientToken": "a" * 129}, "clientToken is 'aaa"),
        ({"clientToken": "a\n"}, "clientToken"),
        ({"clientToken": 7}, "clientToken is 7"),
        ({"seed": 7}, "request.seed is not a member"),
    ],
)
def test_a_fault_around_the_operation_is_refused(fields: dict[str, Any], text: str) -> None:
    body = request(step(), **fields)
    with pytest.raises(InvalidRequestError) as caught:
        read_training_request(body, FACTS)
    assert text in caught.value.message, caught.value.message
    readable = "sequenceNumber" not in fields
    assert (readable_identity(body) is not None) == readable


def test_the_identity_of_a_refused_request_keeps_a_valid_token_alone() -> None:
    body = request(a_pass(), sequenceNumber=5, clientToken="good-1")
    assert readable_identity(body) == Identity(
        number=5, client_token="good-1", breaks_accumulation=True
    )
    body = request({"forward": {}}, sequenceNumber=5, clientToken="bad token")
    assert readable_identity(body) == Identity(
        number=5, client_token=None, breaks_accumulation=False
    )


def test_too_many_tokens_in_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OPERATION_TOKENS_MAX", 7)
    read(a_pass(datum(), datum()))
    with pytest.raises(InvalidRequestError, match=r"more than 7 tokens at element 2"):
        read(a_pass(datum(), datum(), datum()))


def test_an_unknown_vocabulary_and_context_are_not_checked() -> None:
    facts = SessionFacts(model="m", vocabulary_size=0, context_length=0, location="l")
    value = datum(
        tokens=[10**9] * 9,
        weights=tensor_data([1] * 9),
        target_tokens=tensor_data([5] * 9, "int64"),
    )
    read_training_request(request(a_pass(value)), facts)


# --- documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not JSON"),
        (b"[1]", "a JSON array, not an object"),
        (b"null", "a JSON null, not an object"),
        (b"7", "a JSON number, not an object"),
        (b'"x"', "a JSON string, not an object"),
        (b"9" * 5000, "not JSON"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_object(body)
    assert text in caught.value.message


def test_a_nan_of_a_python_client_leaves_the_rest_readable() -> None:
    """Such a body is no JSON, but it is what json.dumps writes, and its number must be closed."""
    body = json.dumps(request(a_pass(datum(weights=tensor_data([NAN, math.inf, 1]))))).encode()
    document = read_object(body)
    assert readable_identity(document) is not None
    with pytest.raises(InvalidRequestError, match=r"weights.data\[0\] is nan"):
        read_training_request(document, FACTS)
    assert read_object(b'{"a": 1e400}') == {"a": math.inf}


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["forward", "datumList", "modelInput", "chunks", "tokens", "data", "dtype", "x"]),
        inner, max_size=4),
))  # fmt: skip
def test_any_json_is_read_or_refused(value: Any) -> None:
    for config in (value, {"forward": value}, {"loadState": value}, a_pass(value), step(eps=value)):
        try:
            read_training_request(request(config), FACTS)
        except InvalidRequestError as error:
            assert error.message.encode()  # noqa: PT017 # A refusal is one of two good ends.
