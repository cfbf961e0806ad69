"""The reference page of the custom resources, from their definitions. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

Schema = dict[str, Any]  # Any: JSON

INTRODUCTION: Final = (
    "# Custom resources\n\nGroup `gristmill.dev`, version `v1alpha1`. In a cluster `kubectl explain` tells the same, "
    "and on one machine `gristmill apply` takes the same manifests ([samples](../../recipes/manifests/README.md)). "
    "This page is made from the contracts by `make crds`.\n"
)


def reference(definitions: Sequence[Schema]) -> str:
    return INTRODUCTION + "".join(_kind(each["spec"]) for each in definitions)


def _kind(spec: Schema) -> str:
    names, version = spec["names"], spec["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    where = "in a namespace" if spec["scope"] == "Namespaced" else "cluster-wide"
    parts = [
        f"\n## {names['kind']}\n\n{schema['description']} Short name `{names['shortNames'][0]}`, {where}.\n",
        "\n| field | type | default | meaning |\n|---|---|---|---|\n",
    ]
    for part in ("spec", "status"):
        required = part in schema.get("required", ())
        parts += _rows(schema["properties"][part], part, required=required)
    rules = [text for path, rule in _rules(schema, "") for text in [_rule(path, rule)]]
    parts.append(
        "\nRefused beside what is out of these bounds:\n\n"
        + "".join(f"- {each}\n" for each in rules)
    )
    return "".join(parts)


def _rows(schema: Schema, path: str, *, required: bool) -> Iterator[str]:
    default = "required" if required else _default(schema.get("default"))
    text = str(schema["description"]).replace("|", "\\|")
    yield f"| `{path}` | {_type(schema)} | {default} | {text} |\n"
    inner, mark = (schema["items"], "[]") if "items" in schema else (schema, "")
    needed = inner.get("required", ())
    for name, below in inner.get("properties", {}).items():
        yield from _rows(below, f"{path}{mark}.{name}", required=name in needed)


def _default(value: object) -> str:
    """Objects take the defaults of their fields, which stand below them."""
    if value is None or value == {}:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{each}`" if each != "" else "empty" for each in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        return f"list of {_type(schema['items'])}, at most {schema['maxItems']}"
    if "additionalProperties" in schema:
        return f"map, at most {schema['maxProperties']}"
    if kind == "integer":
        return f"{schema.get('minimum', 'any')} to {schema['maximum']}"
    if kind == "string":
        return "time" if schema.get("format") else f"text, at most {schema['maxLength']}"
    return str(kind)


def _rules(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield path, rule
    for name, below in schema.get("properties", {}).items():
        yield from _rules(below, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from _rules(schema["items"], f"{path}[]")


def _rule(path: str, rule: Schema) -> str:
    shown = f"`{path}`: " if path not in ("", "spec") else ""
    return f"{shown}{rule['message']}."
