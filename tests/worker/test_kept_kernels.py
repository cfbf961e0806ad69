"""What is compiled stays for the next start, and nobody else can have put it there."""

import os
from pathlib import Path

import pytest

from gristmill_worker import kept_kernels
from gristmill_worker.kept_kernels import FOLDER_VARIABLE, FOLDERS_MAX, divide_folder, kind

ONE_CPU = "processor\t: {at}\nmodel name\t: X\ncpu MHz\t\t: {mhz}\nflags\t\t: fpu {flags}\n\n"


def told(root: Path) -> dict[str, str]:
    environment = {FOLDER_VARIABLE: str(root)}
    divide_folder(environment)
    return environment


def test_torch_keeps_what_it_compiles_in_a_private_folder_of_this_machine(tmp_path: Path) -> None:
    root = tmp_path / "state" / "kernels"
    first = told(root)
    (folder,) = root.iterdir()
    assert first == {
        FOLDER_VARIABLE: str(folder), "TRITON_CACHE_DIR": str(folder / "triton")
    }  # fmt: skip
    assert [each.stat().st_mode & 0o777 for each in (root, folder)] == [0o700, 0o700]
    (folder / "kernel.so").write_bytes(b"code")
    assert told(root) == first
    assert (folder / "kernel.so").read_bytes() == b"code"


def test_where_torch_was_told_nothing_its_own_folder_stays() -> None:
    nothing: dict[str, str] = {}
    divide_folder(nothing)
    assert nothing == {}


@pytest.mark.parametrize("which", ["the root", "the machine's", "a link", "a file"])
def test_nothing_is_loaded_from_where_others_may_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    root = tmp_path / "kernels"
    folder = Path(told(root)[FOLDER_VARIABLE])
    if which == "the root":
        root.chmod(0o707)
    elif which == "the machine's":
        folder.chmod(0o707)
    elif which == "a link":
        folder.rename(tmp_path / "theirs")
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.rmdir()
        folder.write_bytes(b"")
    assert told(root) == {}
    assert [each.message for each in caplog.records] == ["kernels_not_kept"]


def test_a_volume_that_the_pods_group_was_given_still_serves(tmp_path: Path) -> None:
    """As kubelet does with a volume that it mounts again."""
    root = tmp_path / "kernels"
    first = told(root)
    for each in (root, *root.iterdir()):
        each.chmod(0o2770)
    assert told(root) == first


def test_the_folder_is_the_processors_and_torchs() -> None:
    def of(flags: str, torch: str = "2.1", mhz: int = 800, at: int = 0) -> str:
        return kind(ONE_CPU.format(flags=flags, mhz=mhz, at=at) + "processor\t: 9\n", torch)

    assert of("avx2") == of("avx2", mhz=3000, at=4)
    assert len({of("avx2"), of("avx2 avx512f"), of("avx2", torch="2.2")}) == 3


def test_kinds_of_machine_that_were_not_seen_for_long_are_dropped(tmp_path: Path) -> None:
    root = tmp_path / "kernels"
    folder = Path(told(root)[FOLDER_VARIABLE])
    for age in range(1, 8):
        old = root / f"machine-{age}"
        old.mkdir()
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    told(root)
    left = {each.name for each in root.iterdir()}
    assert left == {folder.name, *(f"machine-{age}" for age in range(1, FOLDERS_MAX))}


def test_a_folder_that_grew_too_large_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_kernels, "BYTES_MAX", 1 << 20)
    folder = Path(told(tmp_path / "kernels")[FOLDER_VARIABLE])
    (folder / "deep").mkdir()
    with (folder / "deep" / "kernel.so").open("wb") as file:
        file.truncate(1 << 19)
    told(tmp_path / "kernels")
    assert (folder / "deep" / "kernel.so").exists()
    with (folder / "deep" / "kernel.so").open("wb") as file:
        file.truncate(2 << 20)
    told(tmp_path / "kernels")
    assert list(folder.iterdir()) == []
