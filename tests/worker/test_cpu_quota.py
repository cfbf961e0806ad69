"""Threads follow the control group, version 1 and 2."""

from pathlib import Path

import pytest

from gristmill_worker import cpu_quota


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        pytest.param({"cpu.max": "200000 100000\n"}, 2, id="v2"),
        pytest.param({"cpu.max": "150000 100000\n"}, 2, id="v2, a CPU and a half"),
        pytest.param({"cpu.max": "max 100000\n"}, 8, id="v2, no limit"),
        pytest.param({"cpu.max": "5000 100000\n"}, 1, id="v2, less than one"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3, id="v1"
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            8,
            id="v1, no limit",
        ),
        pytest.param({"cpu.max": "garbage\n"}, 8, id="unreadable"),
        pytest.param({}, 8, id="none"),
    ],
)
@pytest.mark.usefixtures("eight_cpus")
def test_threads_are_what_the_group_grants(
    files: dict[str, str], threads: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota.thread_count(0, tmp_path) == threads
    assert cpu_quota.thread_count(5, tmp_path) == 5
