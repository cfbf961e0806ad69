"""What the chart takes and what it refuses, with words that help."""

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from gristmill_testing.chart import CHART, ROOT, arguments_of, attempt, helm, kinds, render


def test_it_lints_without_a_warning() -> None:
    answer = helm("lint", "--strict", str(CHART))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "[WARNING]" not in answer.stdout


def test_schema_reference_and_copies_are_current() -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / "scripts/chart.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def paths(value: Any, above: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [above]
    return [above, *(p for key, child in value.items() for p in paths(child, f"{above}.{key}"))]


def test_every_value_has_a_place_in_the_schema_that_takes_no_other_name() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def closed(part: dict[str, Any], values: dict[str, Any], path: str) -> list[str]:
        if "properties" not in part:
            return []
        assert set(part["properties"]) == set(values), path
        found = [] if part["additionalProperties"] is False else [path]
        return found + [
            each
            for name, child in part["properties"].items()
            if isinstance(values[name], dict)
            for each in closed(child, values[name], f"{path}.{name}")
        ]

    assert closed(schema, defaults, "") == [".global"]


MISSPELT = [
    "gatway",
    "gateway.replica",
    "gateway.ingress.hostname",
    "gateway.httpRoute.ownGateway.class",
    "ledger.database.existingsecret",
    "ledger.persistence.storageClass",
    "operator.image.sha",
    "networkPolicy.dns.port",
    "monitoring.rules.enable",
    "sessions.weights.nodePath",
    "crds.install",
]


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_value_is_refused_by_name(name: str) -> None:
    answer = attempt({name: "x"})
    assert answer.returncode != 0
    assert f"additional properties '{name.rpartition('.')[2]}' not allowed" in answer.stderr


WRONG = [
    ("gateway.replicas", 0, "minimum"),
    ("gateway.replicas", "3", "integer"),
    ("operator.image.digest", "sha256:abc", "pattern"),
    ("image.pullPolicy", "Sometimes", "one of"),
    ("gateway.logLevel", "TRACE", "one of"),
    ("networkPolicy.dns.ports", ["53"], "integer"),
    ("ledger.persistence.size", "20 GB", "pattern"),
    ("crds.enabled", "yes", "boolean"),
]


@pytest.mark.parametrize(("name", "value", "word"), WRONG)
def test_a_value_of_the_wrong_kind_is_refused(name: str, value: Any, word: str) -> None:
    answer = attempt({name: value})
    assert answer.returncode != 0
    assert name.replace(".", "/") in answer.stderr
    assert word in answer.stderr


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"ledger.replicas": 2}, "SQLite has one writer: set ledger.database.existingSecret"),
    (
        {"ledger.replicas": 2, "ledger.database.existingSecret": "db"},
        "set ledger.persistence.accessModes to [ReadWriteMany]",
    ),
    (
        {"ca.existingConfigMap": "a", "ca.existingSecret": "b"},
        "name the bundle in one of them",
    ),
    ({"gateway.ingress.enabled": True}, "needs gateway.ingress.host"),
    ({"gateway.httpRoute.enabled": True}, "needs gateway.httpRoute.hostnames"),
    (
        {"gateway.httpRoute.enabled": True, "gateway.httpRoute.hostnames": ["a.example"]},
        "needs gateway.httpRoute.parentRefs",
    ),
    ({"gateway.httpRoute.ownGateway.enabled": True}, "ownGateway.className"),
    ({"test.model": "tiny"}, "test.namespace is empty"),
]


@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS)
def test_values_that_contradict_one_another_are_refused_with_the_remedy(
    values: dict[str, Any], words: str
) -> None:
    answer = attempt(values)
    assert answer.returncode != 0
    assert words in answer.stderr


def test_an_old_cluster_is_refused() -> None:
    answer = helm("template", "gristmill", str(CHART), "--kube-version=1.32.0")
    assert answer.returncode != 0
    assert "1.33" in answer.stderr


def test_it_renders_without_asking_a_cluster() -> None:
    texts = [path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file()]
    assert texts
    assert not any("lookup " in text for text in texts)


def test_names_do_not_depend_on_the_release() -> None:
    answer = helm("template", "mill-2", str(CHART), "-n", "elsewhere")
    names = {
        (each["kind"], each["metadata"]["name"])
        for each in yaml.safe_load_all(answer.stdout)
        if each
    }
    assert names == kinds(render())


def test_objects_of_the_users_are_rendered_too() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: 'in-{{ .Release.Namespace }}'}"
    mapping = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plain"}}
    objects = render({"extraObjects": [text, mapping]})
    assert {("ConfigMap", "in-gristmill-system"), ("ConfigMap", "plain")} <= kinds(objects)


@pytest.mark.parametrize("path", sorted((CHART / "ci").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_of_values_renders(path: Any) -> None:
    served = "--api-versions=monitoring.coreos.com/v1"
    answer = helm("template", "gristmill", str(CHART), "-f", str(path), served)
    assert answer.returncode == 0, answer.stderr
    assert len([each for each in yaml.safe_load_all(answer.stdout) if each]) > 40


NOTES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"global.imageRegistry": "registry.example.com", "image.tag": "1.2.3"},
        [
            "kubectl -n gristmill-system wait --for=condition=Available deployment",
            "kubectl apply -f tenant.yaml",
            "kubectl wait tenant/research --for=condition=Ready",
            "kubectl apply -n gm-research -f session.yaml",
            "registry.example.com/gristmill-worker:1.2.3",
            "port-forward service/gristmill-gateway 8450:8450",
            "networkPolicy.apiServer.cidrs is 0.0.0.0/0",
            "networkPolicy.cluster names not all of podCIDRs, serviceCIDRs and nodeCIDRs",
        ],
    ),
    (
        {"gateway.ingress.enabled": True, "gateway.ingress.host": "mill.example.com"},
        ["Clients call https://mill.example.com"],
    ),
    (
        {"monitoring.serviceMonitor.enabled": True},
        ["networkPolicy.metricsFrom is empty"],
    ),
]


@pytest.mark.parametrize(("values", "words"), NOTES)
def test_the_notes_say_what_to_do_next(values: dict[str, Any], words: list[str]) -> None:
    answer = helm(
        "install", "gristmill", str(CHART), "-n", "gristmill-system", "--dry-run=client",
        *arguments_of(values),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    notes = answer.stdout.partition("\nNOTES:\n")[2]
    assert [each for each in words if each not in notes] == []
