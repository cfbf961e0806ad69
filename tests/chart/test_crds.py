"""Definitions and admission policies travel with the release, so that an upgrade brings them."""

from typing import Any

import pytest
import yaml

from gristmill_testing.chart import CHART, ROOT, helm, render

ACCOUNTS = "system:serviceaccount:gristmill-system:"
KEEP = "helm.sh/resource-policy"


def sources(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects of the files in a folder, by kind and name."""
    return {
        (each["kind"], each["metadata"]["name"]): each
        for path in sorted((ROOT / folder).glob("*.yaml"))
        for each in yaml.safe_load_all(path.read_text())
        if each
    }


def rendered(values: dict[str, Any], kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (each["kind"], each["metadata"]["name"]): each
        for each in render(values)
        if each["kind"].startswith(kind)
    }


def test_the_definitions_are_those_of_the_repository_and_are_kept() -> None:
    found = rendered({}, "CustomResourceDefinition")
    assert {name for _, name in found} == {
        f"{plural}.gristmill.dev"
        for plural in ("trainingsessions", "tenants", "basemodels", "ratecards")
    }
    for key, definition in found.items():
        assert definition["metadata"].pop("annotations") == {KEEP: "keep"}
        assert definition == sources("crds")[key]


def test_definitions_need_not_be_kept_or_installed() -> None:
    going = rendered({"crds.keep": False}, "CustomResourceDefinition")
    assert len(going) == 4
    assert not any("annotations" in each["metadata"] for each in going.values())
    assert rendered({"crds.enabled": False}, "CustomResourceDefinition") == {}


def test_helms_own_folder_of_definitions_is_not_used() -> None:
    assert not (CHART / "crds").exists(), "Helm never upgrades what lies in crds/"


def test_the_policies_are_those_of_the_repository() -> None:
    assert rendered({}, "ValidatingAdmissionPolicy") == sources("crds/policies")
    assert rendered({"admissionPolicies.enabled": False}, "ValidatingAdmissionPolicy") == {}


def test_the_policies_name_the_accounts_of_this_release() -> None:
    assert f"{ACCOUNTS}gristmill-operator" in yaml.safe_dump_all(
        sources("crds/policies").values(), width=10_000
    )
    answer = helm("template", "gristmill", str(CHART), "-n", "elsewhere")
    assert answer.returncode == 0
    assert "system:serviceaccount:elsewhere:gristmill-operator" in answer.stdout
    assert ACCOUNTS not in answer.stdout


@pytest.mark.parametrize("folder", ["crds", "crds/policies"])
def test_there_is_something_to_copy(folder: str) -> None:
    assert sources(folder)
