"""Checks JSON against the shapes of the installed botocore's service models, both ways.

botocore itself never checks an answer, and of a request only types and minima; this checks members,
required ones, types, lengths, ranges, enums and patterns.
"""

import math
import re
from functools import cache
from typing import Any

import botocore.session
from botocore.model import OperationModel, ServiceModel, Shape


@cache
def service(name: str) -> ServiceModel:
    """The model of a service, as `sagemaker` or `sagemakertrainingsessionruntime`."""
    return botocore.session.get_session().get_service_model(name)


def operation(service_name: str, name: str) -> OperationModel:
    return service(service_name).operation_model(name)


def output_problems(service_name: str, name: str, answer: Any) -> list[str]:
    """Where an answer does not fit its operation's output shape; empty = it fits."""
    shape = operation(service_name, name).output_shape
    if shape is None:
        return [] if answer == {} else [f"{name} answers nothing, not {answer!r}"]
    return shape_problems(shape, answer)


def error_codes(service_name: str, name: str) -> set[str]:
    """The errors an operation models."""
    return {shape.name for shape in operation(service_name, name).error_shapes}


def shape_problems(shape: Shape, value: Any, path: str = "") -> list[str]:
    """Every place where a JSON value does not fit a shape."""
    check = _CHECKS.get(shape.type_name)
    if check is None:
        return [f"{path}: shapes of type {shape.type_name} are not known to this check"]
    found: list[str] = check(shape, value, path)
    return found


def _structure(shape: Any, value: Any, path: str) -> list[str]:
    if getattr(shape, "is_document_type", False):
        return []  # Any JSON.
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no structure"]
    found = [f"{path}.{name}: missing" for name in shape.required_members if name not in value]
    names = {member.serialization.get("name", name): name for name, member in shape.members.items()}
    for key, inner in value.items():
        if key not in names:
            found.append(f"{path}.{key}: unknown member")
        else:
            found += shape_problems(shape.members[names[key]], inner, f"{path}.{key}")
    if getattr(shape, "is_tagged_union", False) and len(value) != 1:
        found.append(f"{path}: a union holds exactly one of {sorted(names)}, not {sorted(value)}")
    return found


def _list(shape: Any, value: Any, path: str) -> list[str]:
    if not isinstance(value, list):
        return [f"{path}: {value!r} is no list"]
    found = _size(shape, len(value), path)
    for index, inner in enumerate(value):
        found += shape_problems(shape.member, inner, f"{path}[{index}]")
    return found


def _map(shape: Any, value: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no map"]
    found = _size(shape, len(value), path)
    for key, inner in value.items():
        found += shape_problems(shape.key, key, f"{path} key {key!r}")
        found += shape_problems(shape.value, inner, f"{path}[{key!r}]")
    return found


def _string(shape: Any, value: Any, path: str) -> list[str]:
    if not isinstance(value, str):
        return [f"{path}: {value!r} is no string"]
    found = _size(shape, len(value), path)
    if shape.enum and value not in shape.enum:
        found.append(f"{path}: {value!r} is none of {shape.enum}")
    pattern = shape.metadata.get("pattern")
    # Python's `re` has no \p classes; those patterns are checked by length alone.
    if pattern and "\\p{" not in pattern and not re.fullmatch(pattern, value, re.DOTALL):
        found.append(f"{path}: {value!r} does not match {pattern}")
    return found


def _integer(shape: Any, value: Any, path: str) -> list[str]:
    if not isinstance(value, int) or isinstance(value, bool):
        return [f"{path}: {value!r} is no integer"]
    bits = 31 if shape.type_name == "integer" else 63
    if not -(2**bits) <= value < 2**bits:
        return [f"{path}: {value!r} does not fit into {bits + 1} bits"]
    return _size(shape, value, path)


def _number(shape: Any, value: Any, path: str) -> list[str]:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return [f"{path}: {value!r} is no finite number"]
    return _size(shape, value, path)


def _boolean(_shape: Any, value: Any, path: str) -> list[str]:
    return [] if isinstance(value, bool) else [f"{path}: {value!r} is no boolean"]


def _size(shape: Any, size: float, path: str) -> list[str]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    found = [f"{path}: {size} is below {low}"] if low is not None and size < low else []
    return found + ([f"{path}: {size} is above {high}"] if high is not None and size > high else [])


_CHECKS: dict[str, Any] = {
    "structure": _structure,
    "list": _list,
    "map": _map,
    "string": _string,
    "integer": _integer,
    "long": _integer,
    "float": _number,
    "double": _number,
    "timestamp": _number,
    "boolean": _boolean,
}
