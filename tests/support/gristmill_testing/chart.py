"""The chart, rendered by the helm that the test cluster is built with."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts/gristmill"
NAMESPACE = "gristmill-system"
Object = dict[str, Any]


@functools.cache
def helm_program() -> str | None:
    """$GRISTMILL_HELM, else the test cluster's, else the first in the PATH."""
    if named := os.environ.get("GRISTMILL_HELM"):
        return named
    program = "import programs; folder = programs.ready(); print(folder / 'helm' if folder else '')"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "tests/cluster",
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or shutil.which("helm")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm, away from any cluster."""
    program = helm_program()
    if program is None:
        refuse = pytest.fail if os.environ.get("GRISTMILL_CLUSTER_REQUIRED") else pytest.skip
        refuse("no helm: `make cluster-programs` makes one, or name it in GRISTMILL_HELM")
    environment = {**os.environ, "KUBECONFIG": "/nonexistent"}
    return subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """`{"gateway.replicas": 3}` as arguments of helm."""
    return [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]


def attempt(values: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """`helm template` with these values, whatever comes of it."""
    extra = ["--api-versions=monitoring.coreos.com/v1", "--kube-version=1.37.2"]
    return helm("template", "gristmill", str(CHART), "-n", NAMESPACE, *extra, *arguments_of(values))


def render(values: Mapping[str, Any] | None = None) -> list[Object]:
    """Every object of the release, hooks included."""
    return _rendered(
        tuple(sorted((name, json.dumps(value)) for name, value in (values or {}).items()))
    )


@functools.cache
def _rendered(values: tuple[tuple[str, str], ...]) -> list[Object]:
    answer = attempt({name: yaml.safe_load(value) for name, value in values})
    assert answer.returncode == 0, answer.stderr
    return [each for each in yaml.safe_load_all(answer.stdout) if each]


def find(objects: Sequence[Object], kind: str, name: str) -> Object:
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} objects {kind} {name}"
    return found[0]


def kinds(objects: Sequence[Object]) -> set[tuple[str, str]]:
    return {(each["kind"], each["metadata"]["name"]) for each in objects}


def pod_specs(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """(kind and name of what holds it, pod spec) of everything that runs."""
    for each in objects:
        spec = each.get("spec", {})
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Pod":
            yield name, spec
        elif "template" in spec:
            yield name, spec["template"]["spec"]


def container(objects: Sequence[Object], component: str) -> Object:
    """The one container of one of our Deployments."""
    spec = find(objects, "Deployment", f"gristmill-{component}")["spec"]["template"]["spec"]
    assert len(spec["containers"]) == 1
    return dict(spec["containers"][0])


def environment_of(each: Object) -> dict[str, str]:
    """Variables of a container; those from a field have the field's path."""
    return {
        variable["name"]: variable["value"]
        if "value" in variable
        else variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in each["env"]
    }
