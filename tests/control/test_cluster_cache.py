"""What is built is kept by a hash of what it is made from, and made once."""

import os
import time
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("GRISTMILL_CLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "cluster"))
    import cache as module

    return module


def fill(folder: Path) -> None:
    (folder / "made").write_text("x")


def test_the_key_follows_content_names_and_words(cache: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    first = cache.key_of([file], "flag")
    assert cache.key_of([file], "flag") == first
    assert cache.key_of([file], "other") != first
    file.write_text("2")
    assert cache.key_of([file], "flag") != first


def test_a_thing_is_made_once(cache: ModuleType) -> None:
    folder = cache.made("thing", "k", fill)
    assert (folder / "made").read_text() == "x"

    def never(_: Path) -> None:
        raise AssertionError("made twice")

    assert cache.made("thing", "k", never) == folder


def test_what_failed_half_way_is_not_there(cache: ModuleType) -> None:
    def half(folder: Path) -> None:
        fill(folder)
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError):
        cache.made("thing", "k", half)
    assert not (cache.root() / "thing-k").exists()
    assert cache.made("thing", "k", fill).exists()


def test_what_nobody_uses_goes(cache: ModuleType) -> None:
    old, new = cache.made("thing", "old", fill), cache.made("thing", "new", fill)
    long_ago = time.time() - 30 * 86400
    os.utime(old, (long_ago, long_ago))
    assert cache.prune() == [old]
    assert new.exists()
