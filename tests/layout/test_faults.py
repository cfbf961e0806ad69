"""The page of proofs: the tests that it names exist, and each fault that others met has one of its name."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/proof.md"
FAULTS = range(2, 70, 2)
NOT_HERE = {56}
"""Tax: nothing computes any."""
NAMED = re.compile(r"\[`(test_\w+)`\]\(\.\./\.\./(tests/[\w/]+\.py)\)")
DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)


def rows() -> dict[int, list[tuple[str, str]]]:
    """Fault -> its tests as (name, path)."""
    found = re.findall(r"^\| F(\d\d) \|[^|]+\|([^|]+)\|$", PAGE.read_text(), re.MULTILINE)
    return {int(number): NAMED.findall(cell) for number, cell in found}


def faults_of(name: str) -> set[int]:
    """test_f24_f34_something -> 24 and 34."""
    prefix = re.match(r"test((?:_f\d\d)+)_", name)
    return set() if prefix is None else {int(each[1:]) for each in prefix[1].split("_")[1:]}


def test_every_fault_has_a_row_with_a_test_of_its_name() -> None:
    table = rows()
    assert sorted(table) == list(FAULTS)
    assert {number for number, tests in table.items() if not tests} == NOT_HERE
    for number, tests in table.items():
        for name, _path in tests:
            assert number in faults_of(name), (number, name)


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 60
    for name, path in named:
        assert name in DEFINED.findall((ROOT / path).read_text()), (name, path)


def test_every_test_that_is_named_after_a_fault_is_of_a_row() -> None:
    table = rows()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in DEFINED.findall(path.read_text()):
            assert {n for n in faults_of(name) if not table.get(n)} == set(), (name, path)


def test_names_are_read_as_meant() -> None:
    assert faults_of("test_f24_f34_a_failed_commit_stores_nothing") == {24, 34}
    assert faults_of("test_f4_short") == faults_of("test_forward_changes_nothing") == set()
