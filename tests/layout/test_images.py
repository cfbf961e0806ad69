"""The Dockerfile for users and the images that the test cluster makes without Docker say the same."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "images/Dockerfile"
TOLD = """
import json, images, parts
print(json.dumps({
    "images": {part.name: images.config(part) for part in parts.PARTS},
    "requirements": images.requirements(),
    "from_volume": images.FROM_VOLUME,
    "constraints": str(images.CONSTRAINTS),
    "environment": parts.ENVIRONMENT,
}))
"""


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    """What the test cluster's images are made of."""
    output = subprocess.run(
        [sys.executable, "-c", TOLD],
        cwd=ROOT / "tests/cluster",
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    told: dict[str, Any] = json.loads(output)
    return told


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Stage -> its instructions and their arguments, continued lines joined, a stage's base before its own."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = list(found.get(base, []))
        else:
            current.append((word, rest.strip()))
    return found


def last(stage: list[tuple[str, str]], word: str) -> str:
    return [rest for instruction, rest in stage if instruction == word][-1]


def environment(stage: list[tuple[str, str]]) -> dict[str, str]:
    pairs = " ".join(rest for word, rest in stage if word == "ENV").split()
    return dict(pair.split("=", 1) for pair in pairs)


STAGES = stages(DOCKERFILE.read_text())
PARTS = ("operator", "gateway", "ledger", "meter", "worker")


def test_there_is_a_target_for_each_image(ours: dict[str, Any]) -> None:
    assert set(STAGES) == {"wheel", "base", *ours["images"]} == {"wheel", "base", *PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_user_entry_point_and_environment_are_the_same(ours: dict[str, Any], part: str) -> None:
    config = ours["images"][part]
    assert last(STAGES[part], "USER") == config["User"]
    assert int(config["User"].split(":")[0]) >= 10001
    assert json.loads(last(STAGES[part], "ENTRYPOINT")) == config["Entrypoint"]
    assert last(STAGES[part], "WORKDIR") == config["WorkingDir"]
    assert ours["environment"].items() <= environment(STAGES[part]).items()


@pytest.mark.parametrize("part", PARTS)
def test_each_installs_the_one_wheel_with_its_extra_at_the_pins(part: str) -> None:
    install = last(STAGES[part], "RUN")
    assert "--mount=from=wheel,source=/wheels" in install
    assert f'"$(echo /wheels/gristmill-*.whl)[{part}]"' in install
    assert ("COPY", "requirements/constraints.txt /etc/gristmill/constraints.txt") in STAGES[part]
    assert "/etc/gristmill/constraints.txt" in install
    assert last(STAGES["wheel"], "RUN") == "pip wheel --no-deps --wheel-dir=/wheels /src"


def test_the_worker_has_the_compiler_that_its_kernels_want() -> None:
    added = [rest for word, rest in STAGES["worker"] if word == "RUN" and "apt-get install" in rest]
    assert [re.search(r"--no-install-recommends (\S+)", rest)[1] for rest in added] == ["g++"]  # type: ignore[index]


def test_the_clusters_images_have_the_packages_of_all_extras_at_the_same_pins(
    ours: dict[str, Any],
) -> None:
    assert ours["constraints"] == str(ROOT / "requirements/constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        *project["dependencies"],
        *(line for part in PARTS for line in project["optional-dependencies"][part]),
    }
    left_out = wanted - set(ours["requirements"])
    assert {re.split(r"[<>=]", line)[0] for line in left_out} == set(ours["from_volume"])
    assert set(ours["requirements"]) < wanted


def test_the_context_holds_what_the_wheel_is_made_from() -> None:
    ignore = (ROOT / "images/Dockerfile.dockerignore").read_text().splitlines()
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    roots = {package.split("/")[0] for package in wheel["packages"]}
    assert {line[1:] for line in ignore if line.startswith("!")} == {
        *roots, "pyproject.toml", "README.md", "LICENSE", "requirements/constraints.txt",
    }  # fmt: skip
