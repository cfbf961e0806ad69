"""stub for now"""

from __future__ import annotations

from pathlib import Path


def built(binaries: Path) -> tuple[Path, ...]:
    return ()


def package_folders() -> tuple[Path, ...]:
    return ()


def pinned_references(archives: tuple[Path, ...]) -> dict[str, str]:
    return {}
