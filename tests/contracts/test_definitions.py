"""The files of crds/ say what the contracts say."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "crds").glob("*.yaml"))
LOOKAROUND = re.compile(r"\(\?[=!<]|\\[1-9]")
"""What Python's patterns have and the server's do not."""


def test_the_definitions_are_current() -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / "scripts/crds.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def schemas(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, value
    for name, below in value.get("properties", {}).items():
        yield from schemas(below, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if inner in value:
            yield from schemas(value[inner], f"{path}[]")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_text_list_map_and_number_is_bounded(file: Path) -> None:
    definition = yaml.safe_load(file.read_text())["spec"]
    schema = definition["versions"][0]["schema"]["openAPIV3Schema"]
    bounds = {
        "string": {"maxLength", "enum", "format"},
        "integer": {"maximum", "enum"},
        "array": {"maxItems"},
    }
    unbounded = [
        path
        for name in ("spec", "status")
        for path, below in schemas(schema["properties"][name], name)
        if (below["type"] in bounds and not below.keys() & bounds[below["type"]])
        or ("additionalProperties" in below and "maxProperties" not in below)
    ]
    assert unbounded == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_pattern_needs_more_than_the_server_has(file: Path) -> None:
    schema = yaml.safe_load(file.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    patterns = [below["pattern"] for _, below in schemas(schema, "") if "pattern" in below]
    assert patterns
    assert [each for each in patterns if LOOKAROUND.search(each)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_rule_says_a_remedy(file: Path) -> None:
    """A message is `what is wrong; what to do` or `: what to do`."""
    text = file.read_text()
    schema = yaml.safe_load(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = [
        rule
        for _, below in schemas(schema, "")
        for rule in below.get("x-kubernetes-validations", [])
    ]
    assert rules
    for rule in rules:
        assert re.search(r"[;:] ", rule.get("messageExpression", rule["message"])), rule
