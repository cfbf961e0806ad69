"""Values and variables in the documentation are ones that the chart and the SDK take."""

import re
from pathlib import Path

import pytest
import yaml

from gristmill_cli.environment import sdk_environment
from gristmill_contracts.credentials import AccessKey, AccessKeySpec
from gristmill_contracts.resources import Metadata
from gristmill_contracts.tenant import Tenant
from gristmill_testing.chart import CHART, ROOT, helm

TUTORIAL = ROOT / "docs/tutorial/first-cluster.md"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "charts/README.md", ROOT / "README.md"])
VALUES = set(yaml.safe_load((CHART / "values.yaml").read_text()))
TAKEN = ["--api-versions=monitoring.coreos.com/v1", "--kube-version=1.37.2"]


def blocks_of_values() -> list[tuple[str, str]]:
    """(page, YAML) of every block whose keys are all values of the chart."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            first = next(iter(yaml.safe_load_all(block)))
            if isinstance(first, dict) and set(first) <= VALUES:
                found.append((page.name, block))
    return found


def commands() -> list[tuple[str, list[str]]]:
    """(page, its --set arguments) of every helm install and upgrade."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"helm (?:install|upgrade) gristmill (.*)", text):
            # What follows a backtick is prose again.
            sets = re.findall(r"--set '?([\w.]+=[^\s'`]+)'?", line)
            found.append((page.name, [f"--set={each}" for each in sets]))
    return found


def test_there_are_some() -> None:
    assert len(blocks_of_values()) >= 3
    assert len(commands()) >= 3


@pytest.mark.parametrize(("page", "block"), blocks_of_values())
def test_the_chart_takes_the_values_on_a_page(page: str, block: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(block)
    answer = helm("template", "gristmill", str(CHART), "-f", str(tmp_path / "values.yaml"), *TAKEN)
    assert answer.returncode == 0, f"{page}: {answer.stderr}"


@pytest.mark.parametrize(("page", "sets"), commands())
def test_the_chart_takes_the_command_on_a_page(page: str, sets: list[str]) -> None:
    answer = helm("template", "gristmill", str(CHART), *sets, *TAKEN)
    assert answer.returncode == 0, f"{page}: {answer.stderr}"


def test_every_value_that_a_page_names_exists() -> None:
    leaves = set(
        re.findall(
            r"^\| `([\w.]+)` \|",
            (ROOT / "docs/reference/chart-values.md").read_text(),
            re.MULTILINE,
        )
    )
    tops = "|".join(sorted(VALUES - {"global", "test", "image"}))
    unknown = [
        (page.name, name)
        for page in PAGES
        for name in re.findall(rf"`((?:{tops})(?:\.[A-Za-z]+)+)[`:]", page.read_text())
        if not any(leaf == name or leaf.startswith(f"{name}.") for leaf in leaves)
        and not name.endswith((".md", ".yaml", ".py", ".crt"))
    ]
    assert unknown == []


def test_the_tutorial_sets_what_gristmill_env_sets() -> None:
    tenant = Tenant(metadata=Metadata(name="research", namespace=""))
    key = AccessKey(
        metadata=Metadata(name="laptop"),
        spec=AccessKeySpec(access_key_id="A" * 20, secret_access_key="s" * 43, tenant="research"),
    )
    wanted = sdk_environment(
        "http://127.0.0.1:8450", tenant, key, config=Path("c"), data_dir=Path("d")
    )
    exported = set(re.findall(r"([A-Z][A-Z0-9_]{5,})=", TUTORIAL.read_text()))
    assert set(wanted) - exported == {"GRISTMILL_DATA_DIR"}
