"""The shape of the tree: what lies where, how long it is, and what it may not say."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {
    "contracts": {"gristmill_contracts"},
    "sessions": {"gristmill_sessions"},
    "operator": {"gristmill_operator"},
    "worker": {"gristmill_worker"},
    "billing": {"gristmill_meter", "gristmill_ledger"},
    "gateway": {"gristmill_gateway"},
    "cli": {"gristmill_cli"},
}
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400


def tracked(*patterns: str) -> list[Path]:
    """Files under version control, and new ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def package_modules() -> list[Path]:
    return [
        path
        for root, packages in SOURCE_ROOTS.items()
        for package in sorted(packages)
        for path in sorted((ROOT / root / package).rglob("*.py"))
    ]


def long_functions(source: str) -> list[tuple[str, int]]:
    """Name and length of every function that is too long; a decorator is no part of its function."""
    return [
        (node.name, length)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_holds_its_packages_and_no_module(root: str) -> None:
    folder = ROOT / root
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == SOURCE_ROOTS[root]
    assert sorted(path.name for path in folder.glob("*.py")) == []


def test_python_still_finds_its_own_operator_module() -> None:
    import operator

    assert operator.__file__ is not None
    assert not Path(operator.__file__).is_relative_to(ROOT / "operator")


def test_tests_are_no_packages() -> None:
    inits = {path.relative_to(ROOT) for path in tracked("tests/*__init__.py")}
    assert inits == {Path("tests/support/gristmill_testing/__init__.py")}


def test_functions_fit_on_a_screen() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name} has {length} lines"
        for path in package_modules()
        for name, length in long_functions(path.read_text())
    ]
    assert found == []


def test_a_long_function_would_be_found() -> None:
    body = "".join(f"    x = {n}\n" for n in range(FUNCTION_LINES_MAX))
    assert long_functions(f"def long():\n{body}") == [("long", FUNCTION_LINES_MAX + 1)]


def test_files_hold_one_noun_each() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in package_modules()
    }
    assert {name: n for name, n in lengths.items() if n > FILE_LINES_MAX} == {}


FORBIDDEN_TEXT = [
    pytest.param(r"pypi\.org|pythonhosted\.org|--(extra-)?index-url|find-links", id="an index"),
    pytest.param(r"(?<![\w.])(/work|/home/\w+|/Users/\w+|/root)/\w", id="a path of one machine"),
    pytest.param(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError", id="unfinished work"),
]


@pytest.mark.parametrize("pattern", FORBIDDEN_TEXT)
def test_no_file_names(pattern: str) -> None:
    this = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        if path != this and path.suffix not in {".png", ".gguf", ".safetensors"}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def test_pins_are_names_and_versions_alone() -> None:
    for path in tracked("requirements/*.txt"):
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.!_]+", line), f"{path}: {line}"
