"""Write what the chart is made of from its sources; --check only compares.

values.schema.json and docs/reference/chart-values.md from the comments of values.yaml; files/crds and
files/policies from crds/; files/dashboards from dashboard.py. A comment above a value is its text. Comment lines `# @word argument` bound it:

    @enum A B        one of these strings
    @pattern REGEX   of a string
    @min N, @max N   of a number
    @items TYPE ...  of a list's members
    @free            a map whose keys are Kubernetes' or the user's own: any are taken
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from dashboard import dashboard

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts/gristmill"
VALUES = CHART / "values.yaml"
NOTE = "This page is made from the chart's values.yaml by `make chart`.\n"


@dataclass(kw_only=True)
class Value:
    """One key of values.yaml. `children` is None for a leaf."""

    path: tuple[str, ...]
    default: Any
    text: str
    bounds: dict[str, list[str]] = field(default_factory=dict)
    children: list["Value"] | None = None


def comment_above(lines: list[str], line: int) -> tuple[str, dict[str, list[str]]]:
    """Text and bounds of the comment lines that end right above `line` (from 0)."""
    words: list[str] = []
    bounds: dict[str, list[str]] = {}
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    for each in lines[first:line]:
        text = each.lstrip().removeprefix("#").strip()
        if text.startswith("@"):
            word, *arguments = text[1:].split(" ")
            bounds[word] = arguments
        else:
            words.append(text)
    return " ".join(words), bounds


def read(text: str) -> list[Value]:
    """The values of a values.yaml, in order."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    return list(_mapping(node, text.splitlines(), yaml.safe_load(text), ()))


def _mapping(
    node: yaml.MappingNode, lines: list[str], defaults: Any, above: tuple[str, ...]
) -> Iterator[Value]:
    for key, value in node.value:
        text, bounds = comment_above(lines, key.start_mark.line)
        path, default = (*above, key.value), defaults[key.value]
        found = Value(path=path, default=default, text=text, bounds=bounds)
        if isinstance(value, yaml.MappingNode) and "free" not in bounds:
            found.children = list(_mapping(value, lines, default, path))
        yield found


# --- schema --------------------------------------------------------------------------------------


def schema(values: list[Value], *, top: bool = False) -> dict[str, Any]:
    properties = {value.path[-1]: schema_of(value) for value in values}
    if top:
        # Helm passes these on to subcharts and parents; they are no value of ours.
        properties["global"]["additionalProperties"] = True
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema_of(value: Value) -> dict[str, Any]:
    made: dict[str, Any] = {"description": value.text} if value.text else {}
    if value.children is not None:
        return made | schema(value.children)
    if "free" in value.bounds:
        return made | {"type": "object"}
    made["type"] = _type(value)
    if "enum" in value.bounds:
        made["enum"] = value.bounds["enum"]
    if "pattern" in value.bounds:
        made["pattern"] = value.bounds["pattern"][0]
    for word, key in (("min", "minimum"), ("max", "maximum")):
        if word in value.bounds:
            made[key] = int(value.bounds[word][0])
    if made["type"] == "array":
        types = value.bounds["items"]
        made["items"] = {"type": types if len(types) > 1 else types[0]}
    return made


def _type(value: Value) -> str:
    names = {bool: "boolean", int: "integer", str: "string", list: "array"}
    found = names.get(type(value.default))
    if found is None:
        raise SystemExit(
            f"values.yaml: {'.'.join(value.path)} needs `@free` or a default of a plain type"
        )
    if found == "array" and "items" not in value.bounds:
        raise SystemExit(f"values.yaml: the list {'.'.join(value.path)} needs `@items`")
    return found


def schema_file() -> str:
    made = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart gristmill",
        **schema(read(VALUES.read_text()), top=True),
    }
    return json.dumps(made, indent=2) + "\n"


# --- reference -----------------------------------------------------------------------------------


def leaves(values: list[Value]) -> Iterator[Value]:
    for value in values:
        if value.children is None:
            yield value
        else:
            yield from leaves(value.children)


def bounds_text(value: Value) -> str:
    parts = []
    if "enum" in value.bounds:
        parts.append("One of " + ", ".join(f"`{each}`" for each in value.bounds["enum"]) + ".")
    if "min" in value.bounds or "max" in value.bounds:
        low, high = (value.bounds.get(word, ["any"])[0] for word in ("min", "max"))
        parts.append(f"{low} to {high}.")
    return " ".join(parts)


def shown(default: Any) -> str:
    if default in ("", [], {}) and not isinstance(default, bool):
        return "empty"
    return f"`{json.dumps(default) if not isinstance(default, str) else default}`"


def reference_page() -> str:
    parts = [
        f"# Values of the chart\n\n`helm show values charts/gristmill` prints the same. {NOTE}"
        "A name that is not in here, and a value of the wrong kind, is refused by `helm install`. Two whole examples lie in\n"
        "[charts/gristmill/ci](../../charts/gristmill/ci).\n"
    ]
    for top in read(VALUES.read_text()):
        rows = list(leaves([top]))
        parts.append(f"\n## {top.path[0]}\n\n")
        if top.text and top.children is not None:
            parts.append(f"{top.text}\n\n")
        parts.append("| value | default | meaning |\n|---|---|---|\n")
        for row in rows:
            text = " ".join(filter(None, [row.text, bounds_text(row)])).replace("|", "\\|")
            parts.append(f"| `{'.'.join(row.path)}` | {shown(row.default)} | {text} |\n")
    return "".join(parts)


# --- copies --------------------------------------------------------------------------------------


def copies() -> dict[Path, str]:
    """What lies in the chart, by path, and is a copy of something outside."""
    folders = {
        ROOT / "crds": CHART / "files/crds",
        ROOT / "crds/policies": CHART / "files/policies",
    }
    return {
        target / path.name: path.read_text()
        for source, target in folders.items()
        for path in sorted(source.glob("*.yaml"))
    }


def left_over(wanted: dict[Path, str]) -> list[Path]:
    folders = (CHART / "files/crds", CHART / "files/policies")
    return [path for folder in folders for path in folder.glob("*.yaml") if path not in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    only_compare = parser.parse_args().check
    wanted = {
        CHART / "values.schema.json": schema_file(),
        ROOT / "docs/reference/chart-values.md": reference_page(),
        CHART / "files/dashboards/platform.json": dashboard(),
        **copies(),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    removed = left_over(wanted)
    for path in [*stale, *removed]:
        if only_compare:
            print(f"{path.relative_to(ROOT)} is out of date: run `make chart`")
        elif path in removed:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
    return 1 if only_compare and (stale or removed) else 0


if __name__ == "__main__":
    sys.exit(main())
