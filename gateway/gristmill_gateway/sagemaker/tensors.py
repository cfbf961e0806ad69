"""JSON arrays as packed tensors, checked on the way: types, lengths, ranges. Pure.

Numbers of a million-token request pass here, so checks run over whole arrays, and a loop looks for the
culprit only once there is one.
"""

import math
from typing import Any, Final

import numpy as np

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import Tensor, tensor
from gristmill_gateway.sagemaker.documents import integer, members, shown

INTEGER_DTYPES: Final = ("int64", "int32")
FLOAT_DTYPES: Final = ("float32", "float16", "bfloat16")
SHAPE_AXES_MAX: Final = 8
_FLOAT16_MAX: Final = 65504.0
_INT32: Final = (-(2**31), 2**31 - 1)


def token_ids(values: list[Any], path: str, vocabulary_size: int) -> Tensor:
    """int64 (N,): ids in the vocabulary; vocabulary_size 0 = not known."""
    packed = _integers(values, path)
    if packed.size:
        ids = np.frombuffer(packed.data, dtype="<i8")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocabulary_size and high >= vocabulary_size):
            index = int(np.argmax((ids < 0) | (ids >= (vocabulary_size or 2**62))))
            bound = f"0 to {vocabulary_size - 1}" if vocabulary_size else "0 or more"
            raise InvalidRequestError(
                f"{path}[{index}] is {values[index]}, which is no token of the base model; ids are {bound}"
            )
    return packed


def read_tensor(value: object, path: str, *, integral: bool) -> tuple[Tensor, list[Any]]:
    """A wire TensorData as a flat tensor, widened to int64 or float32, and its values as sent."""
    found = members(value, path, required=("data", "dtype"), optional=("shape",))
    data, dtype = found["data"], found["dtype"]
    if not isinstance(data, list):
        raise InvalidRequestError(
            f"{path}.data is {shown(data)}; it must be a flat array of numbers"
        )
    if dtype not in (*INTEGER_DTYPES, *FLOAT_DTYPES):
        raise InvalidRequestError(
            f"{path}.dtype is {shown(dtype)}; it must be one of "
            f"{', '.join((*INTEGER_DTYPES, *FLOAT_DTYPES))}"
        )
    if integral and dtype not in INTEGER_DTYPES:
        raise InvalidRequestError(
            f"{path}.dtype is {dtype}, and token ids are integers; send int64"
        )
    if "shape" in found:
        _check_shape(found["shape"], f"{path}.shape", len(data))
    if dtype in INTEGER_DTYPES:
        packed = _integers(data, f"{path}.data")
        _check_range(packed, f"{path}.data", dtype, *_INT32) if dtype == "int32" else None
        return (packed if integral else _floats(data, f"{path}.data")), data
    packed = _floats(data, f"{path}.data")
    if dtype == "float16":
        _check_range(packed, f"{path}.data", dtype, -_FLOAT16_MAX, _FLOAT16_MAX)
    return packed, data


def _check_shape(value: object, path: str, length: int) -> None:
    if not isinstance(value, list) or len(value) > SHAPE_AXES_MAX:
        raise InvalidRequestError(
            f"{path} is {shown(value)}; it must be an array of at most {SHAPE_AXES_MAX} sizes"
        )
    sizes = [integer(size, f"{path}[{i}]", 0, 2**31 - 1) for i, size in enumerate(value)]
    if math.prod(sizes) != length:
        raise InvalidRequestError(
            f"{path} {sizes} holds {math.prod(sizes)} values, and data has {length}; send the shape of the "
            "data, or none"
        )


def _integers(values: list[Any], path: str) -> Tensor:
    if set(map(type, values)) - {int}:
        index = next(i for i, value in enumerate(values) if type(value) is not int)
        raise InvalidRequestError(
            f"{path}[{index}] is {shown(values[index])}; it must be an integer"
        )
    try:
        return tensor("int64", values)
    except OverflowError as error:
        index = next(i for i, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise InvalidRequestError(f"{path}[{index}] does not fit into 64 bits") from error


def _floats(values: list[Any], path: str) -> Tensor:
    """float32; what is no finite float32 is refused."""
    if set(map(type, values)) - {int, float}:
        index = next(i for i, value in enumerate(values) if type(value) not in (int, float))
        raise InvalidRequestError(f"{path}[{index}] is {shown(values[index])}; it must be a number")
    try:
        packed = tensor("float32", values)
    except OverflowError:
        packed = tensor("float32", [_float(value) for value in values])
    finite = np.isfinite(np.frombuffer(packed.data, dtype="<f4"))
    if not finite.all():
        index = int(np.argmin(finite))
        raise InvalidRequestError(
            f"{path}[{index}] is {shown(values[index])}, which is no finite 32-bit number"
        )
    return packed


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_range(packed: Tensor, path: str, dtype: str, low: float, high: float) -> None:
    values = packed.tolist()
    index = next((i for i, value in enumerate(values) if not low <= value <= high), None)
    if index is not None:
        raise InvalidRequestError(f"{path}[{index}] is {values[index]}, which does not fit {dtype}")
