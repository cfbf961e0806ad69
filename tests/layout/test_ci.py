"""`.ci/run` says what the tests say: it fails where any of them does."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_ci(folder: Path, failing_target: str) -> subprocess.CompletedProcess[str]:
    """The real script, over a `make` that writes its targets down and fails at one of them."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    make = folder / "bin/make"
    make.parent.mkdir()
    make.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> "{folder}/targets"\n'
        'echo "==== 7 passed in 0.1s ===="\n'
        f'for target; do [ "$target" != "{failing_target}" ] || exit 2; done\n'
    )
    make.chmod(0o755)
    return subprocess.run(
        [folder / ".ci/run"],
        env={**os.environ, "PATH": f"{make.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_runs_the_rules_and_every_test(tmp_path: Path) -> None:
    answer = run_ci(tmp_path, failing_target="nothing")
    assert answer.returncode == 0, answer.stderr
    made = (tmp_path / "targets").read_text().splitlines()
    assert sorted(made) == ["cluster-programs", "lint types imports", "test", "test-cluster"]
    in_order = [each for each in made if each != "cluster-programs"]  # it runs beside the others
    assert in_order == ["lint types imports", "test", "test-cluster"]


def test_its_last_line_adds_up_what_the_runs_of_pytest_counted(tmp_path: Path) -> None:
    answer = run_ci(tmp_path, failing_target="nothing")
    assert answer.stdout.splitlines()[-1] == "==== 14 passed in 0.20s ===="


@pytest.mark.parametrize(
    "target", ["lint", "types", "imports", "test", "test-cluster", "cluster-programs"]
)
def test_it_fails_where_a_target_does(tmp_path: Path, target: str) -> None:
    assert run_ci(tmp_path, failing_target=target).returncode != 0


def test_what_failed_once_is_tried_again_and_counted_as_it_ended(tmp_path: Path) -> None:
    """The first `make test` fails two tests, the second one, of these two alone, passes."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    make = tmp_path / "bin/make"
    make.parent.mkdir()
    make.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> "{tmp_path}/targets"\n'
        '[ "$1" = test ] || exit 0\n'
        '[ -z "$2" ] || { echo "==== 2 passed, 5 deselected in 1.0s ===="; exit 0; }\n'
        'echo "==== 2 failed, 5 passed, 1 skipped in 2.0s ===="; exit 1\n'
    )
    make.chmod(0o755)
    answer = subprocess.run(
        [tmp_path / ".ci/run"],
        env={**os.environ, "PATH": f"{make.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == (
        "==== 7 passed, 1 skipped, 1 second try in 3.00s ===="
    )


def test_a_failing_test_fails_make_test(tmp_path: Path) -> None:
    """The recipe of `make test`, on a planted test and with an environment that is set up already."""
    planted = tmp_path / "test_planted.py"
    planted.write_text("def test_planted() -> None:\n    assert False\n")
    # What an outer make exports would make this one tell of folders, or run something else.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    recipe = subprocess.run(
        ["make", "--dry-run", "test", "WORKERS=0", f"ARGS={planted}"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    ).stdout.splitlines()[-1]  # fmt: skip
    assert "pytest" in recipe
    assert str(planted) in recipe
    answer = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", recipe], cwd=ROOT, capture_output=True, check=False
    )
    assert answer.returncode == 1
