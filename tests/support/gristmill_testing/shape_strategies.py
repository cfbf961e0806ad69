"""Hypothesis strategies that make inputs from botocore shapes: mostly well-formed, often just not."""

from typing import Any

from botocore.model import Shape
from hypothesis import strategies as st

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.text(alphabet="\ud800\x00\n/.:ü%", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any JSON, and what Python's parser lets through besides: NaN, infinities, lone surrogates."""


def inputs(shape: Shape, seeds: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies for an operation's input shape. seeds: values by member name that lead further in."""
    return _structure(shape, seeds) | JUNK.filter(lambda value: isinstance(value, dict))


def _value(name: str, shape: Any, seeds: dict[str, list[Any]]) -> st.SearchStrategy[Any]:
    choices = [_plain(shape, seeds), _plain(shape, seeds), JUNK]
    if name in seeds:
        choices = [st.sampled_from(seeds[name])] * 6 + choices
    return st.one_of(choices)


def _plain(shape: Any, seeds: dict[str, list[Any]]) -> st.SearchStrategy[Any]:
    if shape.type_name == "structure":
        return _structure(shape, seeds)
    low, high = shape.metadata.get("min", 0), shape.metadata.get("max", 40)
    if shape.type_name == "list":
        return st.lists(_value("", shape.member, seeds), max_size=min(high, 5))
    if shape.type_name == "map":
        return st.dictionaries(st.text(max_size=9), _value("", shape.value, seeds), max_size=3)
    if shape.type_name == "string" and shape.enum:
        return st.sampled_from(shape.enum)
    scalars: dict[str, st.SearchStrategy[Any]] = {
        "string": st.text(alphabet="aZ9-/:.", min_size=low, max_size=max(low, min(high, 64))),
        "integer": st.integers(low, high) | st.integers(),
        "boolean": st.booleans(),
    }
    return scalars.get(shape.type_name, st.floats() | st.integers(0, 2**34))


def _structure(shape: Any, seeds: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    members = {name: _value(name, member, seeds) for name, member in shape.members.items()}
    required = {name: members.pop(name) for name in shape.required_members}
    whole = st.fixed_dictionaries(required, optional=members)
    unknown = st.dictionaries(st.text(max_size=8), JUNK, max_size=1)
    partial = st.fixed_dictionaries({}, optional=required | members)
    merged = st.tuples(partial, unknown).map(lambda pair: pair[0] | pair[1])
    return st.one_of(whole, whole, whole, merged)
