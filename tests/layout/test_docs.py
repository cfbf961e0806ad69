"""What README and docs say exists: commands, files, anchors, and a test for every claim."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[a-z]*/README.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that headings get on GitHub."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


def links(page: Path) -> list[str]:
    return [first or second for first, second in LINK.findall(prose(page))]


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links(page):
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        missing = not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        )
        if missing or not target.is_relative_to(ROOT):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n[gone](nowhere.md) [here](#a) [not here](#b)\n")
    assert broken_links(page)[0] == "nowhere.md"
    assert "#b" in broken_links(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_commands_in_the_docs_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", page.read_text(), re.MULTILINE))
    assert named - targets == set()


def claims() -> list[str]:
    """Rows of README's table of claims."""
    section = README.read_text().partition("## What is claimed, and where it is shown")[2]
    rows = re.findall(r"^\|(?! claim \||-)(.+)\|$", section.partition("\n## ")[0], re.MULTILINE)
    return [str(row) for row in rows]


def test_there_are_claims() -> None:
    assert len(claims()) >= 8


@pytest.mark.parametrize("row", claims())
def test_every_claim_links_to_a_test_that_exists(row: str) -> None:
    named = [first or second for first, second in LINK.findall(row)]
    assert named, f"no test is linked: {row}"
    for link in named:
        path, _, _ = link.partition("#")
        assert re.match(r"(tests/.*test_\w+\.py|benchmarks/\w+\.py)$", path), link
        assert (ROOT / path).is_file(), link


def test_the_generated_pages_are_current() -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / "scripts/reference.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_page_of_the_wire_names_every_operation_that_is_answered() -> None:
    from gristmill_gateway import s3
    from gristmill_gateway.sagemaker.control_operations import OPERATIONS

    page = (ROOT / "docs/reference/sagemaker-wire.md").read_text()
    assert {name for name in [*OPERATIONS, *s3._HANDLERS] if f"`{name}`" not in page} == set()
