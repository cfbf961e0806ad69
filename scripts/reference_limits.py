"""Write docs/reference/limits.md from gristmill_contracts.limits; --check only compares."""

import argparse
import ast
import sys
from pathlib import Path

from gristmill_contracts import limits

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/limits.md"
HEAD = """# Limits

Every bound has a name and a unit. This page is made from `gristmill_contracts.limits` by `make docs`.
"""
TABLE = "| name | value | meaning |\n|---|---|---|\n"


def rows(source: str) -> list[tuple[int, str, str]]:
    """(line, name, the string below it) of every constant, in order."""
    body = ast.parse(source).body
    found = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            found.append((node.lineno, node.target.id, text))
    return found


def shown(name: str) -> str:
    """The value, with powers of two spelt out where they are whole units of bytes."""
    value = getattr(limits, name)
    if "BYTES" in name:
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size and value % size == 0:
                return f"{value // size} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def page() -> str:
    source = Path(limits.__file__).read_text()
    headings = {
        number: line.strip("# -")
        for number, line in enumerate(source.splitlines(), 1)
        if line.startswith("# ---")
    }
    parts = [HEAD]
    for line, name, text in rows(source):
        for number in [number for number in headings if number < line]:
            parts.append(f"\n## {headings.pop(number).capitalize()}\n\n{TABLE}")
        parts.append(f"| `{name}` | {shown(name)} | {text.replace('|', '/')} |\n")
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() != page():
        print(f"{PAGE} is out of date: run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
