"""Operators come and go, versions change, people delete what they should not: sessions live through it."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gristmill_testing.cluster import WRITES, Cluster, eventually
from gristmill_testing.operator_lives import settle
from gristmill_testing.operator_world import (
    ACCOUNT,
    IMAGE,
    OperatorWorld,
    operator_world,
    reset,
    session,
)
from gristmill_testing.waiting_volumes import CLASS, make_volumes

Json = dict[str, Any]
CONVERGED_S = 30.0
LOOKS = 100
"""How often a condition of another's has to survive."""
FAST: Json = {"qps": "300", "burst": "300", "log_level": "WARNING"}
LASTING: Json = {**FAST, "lease_s": "60", "lease_renew_s": "45"}
"""A crowded machine must not cost the Lease where that is not what a test is about."""
DOWN_S = float(os.environ.get("GRISTMILL_DOWN_S", "300"))
"""How long nobody looks after the sessions in G6, at least: longer than a Lease lasts."""


@pytest.fixture(scope="module")
def shared(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("life")
    make_volumes(control_cluster, 300, "life")
    with operator_world(control_cluster, folder) as made:
        made.start_operator(**FAST)
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        reset(made)


@pytest.fixture
def world(shared: OperatorWorld) -> OperatorWorld:
    settle(shared, **LASTING)
    return shared


def make(world: OperatorWorld, names: list[str], namespace: str = "gm-acme", **spec: Any) -> None:
    text = "\n---\n".join(json.dumps(session(each, namespace, **spec)) for each in names)
    world.cluster.apply(text, timeout=60)


def statuses(world: OperatorWorld, namespace: str = "gm-acme") -> dict[str, Json]:
    found = world.cluster.objects("trainingsessions", namespace)
    return {each["metadata"]["name"]: each.get("status") or {} for each in found}


def wait_states(
    world: OperatorWorld, wanted: dict[str, str], seconds: float = 60, namespace: str = "gm-acme"
) -> None:
    """Until each session has its state; "" = it is gone."""

    def late() -> dict[str, str]:
        found = statuses(world, namespace)
        states = {
            name: found[name].get("state", "None") if name in found else "" for name in wanted
        }
        return {name: state for name, state in states.items() if state != wanted[name]}

    last: dict[str, str] = {}

    def probe() -> bool:
        last.clear()
        last.update(late())
        return not last

    try:
        eventually("all states", probe, seconds, 0.4)
    except AssertionError:
        raise AssertionError(f"after {seconds:g} s: {last}") from None


def kubectl(world: OperatorWorld, *arguments: str) -> str:
    return world.cluster.kubectl(*arguments, "--namespace=gm-acme", timeout=60)


def running(world: OperatorWorld, names: list[str], seconds: float = 90) -> None:
    wait_states(world, dict.fromkeys(names, "Running"), seconds)


def clear(world: OperatorWorld) -> None:
    kubectl(world, "delete", "trainingsessions", "--all", "--wait=false")
    eventually("no session", lambda: not statuses(world), 90)


def orphans(world: OperatorWorld, namespace: str = "gm-acme") -> list[str]:
    """Pods whose session is gone."""
    alive = {
        each["metadata"]["uid"] for each in world.cluster.objects("trainingsessions", namespace)
    }
    return [
        pod["metadata"]["name"]
        for pod in world.pods(namespace=namespace)
        if not {each["uid"] for each in pod["metadata"].get("ownerReferences", ())} & alive
    ]


@pytest.mark.waiting
@pytest.mark.timeout(1800)
def test_g6_what_happened_while_the_operator_was_dead_is_put_right_in_30_s(
    world: OperatorWorld,
) -> None:
    """G6: kill -9; sessions and pods are made, changed, stopped and deleted; start."""
    groups = {
        kind: [f"{kind}{number}" for number in range(6)]
        for kind in ("kept", "hit", "stop", "drop", "turn")
    }
    old = [name for names in groups.values() for name in names]
    world.stop_operators()
    world.start_operator(**FAST)  # its successor has to wait for its end
    make(world, old)
    running(world, old)
    kept = {name: world.pod_uids(name) for name in groups["kept"]}
    world.operators[-1].kill()
    killed = time.monotonic()
    pods = [f"{name}-a1-0" for name in (*groups["hit"], *groups["drop"][:3])]
    kubectl(world, "delete", "pods", *pods, "--wait=false")
    kubectl(world, "delete", "trainingsessions", *groups["drop"], "--wait=false")
    kubectl(
        world, "annotate", "trainingsessions", *groups["stop"], "gristmill.dev/stop-requested=now"
    )
    kubectl(world, "annotate", "trainingsessions", *groups["turn"], "gristmill.dev/restart=now")
    kubectl(world, "label", "pods", "kept0-a1-0", "someone=else")
    # A name that is used again for another session.
    kubectl(world, "patch", "trainingsession", "drop5", "--type=merge", "--patch={}")
    made = [f"made{number}" for number in range(6)]
    make(world, made)
    time.sleep(max(0.0, DOWN_S - (time.monotonic() - killed)))
    world.start_operator(ready=False, **FAST)
    expected = dict.fromkeys([*groups["kept"], *groups["hit"], *groups["turn"], *made], "Running")
    expected |= dict.fromkeys(groups["stop"], "Stopped")
    expected |= dict.fromkeys(groups["drop"], "")

    def settled() -> bool:
        found = statuses(world)
        if {
            name: found[name].get("state") if name in found else "" for name in expected
        } != expected:
            return False
        second = all(found[name]["attempt"] == 2 for name in (*groups["hit"], *groups["turn"]))
        ready = all(
            found[name]["workers"].get("ready") == 1
            for name in (*groups["hit"], *groups["turn"], *made)
        )
        return second and ready and not orphans(world)

    eventually("converged", settled, CONVERGED_S)
    assert {name: world.pod_uids(name) for name in groups["kept"]} == kept
    counts = Counter(pod["metadata"]["labels"]["gristmill.dev/session"] for pod in world.pods())
    assert set(counts.values()) == {1}
    assert not set(counts) & {*groups["stop"], *groups["drop"]}
    clear(world)


@pytest.mark.waiting
def test_a_session_expires_at_the_end_of_its_lifetime(world: OperatorWorld) -> None:
    """Counted from its first start; what ran is gone then, and the reason is told."""
    make(world, ["aged"], limits={"lifetimeSeconds": 60})
    running(world, ["aged"])
    wait_states(world, {"aged": "Expired"}, 120)
    assert world.condition("aged", "Expired")["reason"] == "LifetimeReached"
    eventually("no pods", lambda: not world.pods("aged"), 30)
    eventually("it is told", lambda: "Expired" in reasons(world, "aged"), 20)


def reasons(world: OperatorWorld, name: str) -> set[str]:
    """Of its Events."""
    return {each["reason"] for each in world.events(name)}


def test_g10_an_operator_with_other_defaults_restarts_no_pod(world: OperatorWorld) -> None:
    """G10: a new version over 20 Running sessions: another meter image, other templates."""
    names = [f"n{number}" for number in range(20)]
    make(world, names)
    running(world, names)
    before = {name: world.pod_uids(name) for name in names}
    world.stop_operators()
    new_meter = "registry.example.com/gristmill-meter@sha256:" + "d" * 64
    world.start_operator(
        **LASTING, meter_image=new_meter, meter_memory="256Mi", meter_cpu="50m",
        pod_environment='{"NEW": "1"}', image_pull_policy="Always", worker_tmp_size="1Gi",
        storage_class=CLASS,
    )  # fmt: skip
    make(world, ["fresh"])
    running(world, ["fresh"])

    eventually("each was looked at", lambda: passes(world) >= 21, 30)
    assert {name: world.pod_uids(name) for name in names} == before
    images = {
        each["name"]: each["image"] for each in world.pods("fresh")[0]["spec"]["initContainers"]
    }
    assert images["meter"] == new_meter, "the settings did change something"
    assert world.session("n0")["status"]["pinned"]["meterImage"] != new_meter
    # A volume keeps the class that some settings named, whatever the next ones name.
    restart(world, "n0", "once")
    world.stop_operators()
    world.start_operator(**LASTING)
    restart(world, "n0", "again")
    clear(world)


def restart(world: OperatorWorld, name: str, word: str) -> None:
    attempt = world.session(name)["status"]["attempt"]
    kubectl(
        world, "annotate", "trainingsession", name, f"gristmill.dev/restart={word}", "--overwrite"
    )

    def is_back() -> bool:
        status = world.session(name)["status"]
        assert status["state"] == "Running", status
        return bool(status["attempt"] == attempt + 1 and status["workers"].get("ready") == 1)

    eventually(f"{name} is back", is_back, 60)


def test_g12_a_namespace_that_was_deleted_while_nobody_ran_goes(world: OperatorWorld) -> None:
    """G12: a finalizer and no operator: Terminating for ever. Here gone in 60 s after the start."""
    namespace = world.tenant("doomed")
    names = [f"d{number}" for number in range(5)]
    make(world, names, namespace)
    wait_states(world, dict.fromkeys(names, "Running"), 60, namespace)
    world.stop_operators()
    world.cluster.kubectl("delete", "tenant", "doomed", "--wait=false")
    world.cluster.delete("namespace", namespace)
    eventually("pods are gone", lambda: not world.cluster.objects("pods", namespace), 30)
    assert len(world.cluster.objects("trainingsessions", namespace)) == 5
    world.start_operator(**LASTING)
    world.cluster.wait_gone("namespace", namespace, seconds=60)


def test_g14_definitions_that_are_deleted_and_made_again_cost_nothing(
    world: OperatorWorld,
) -> None:
    """G14: a controller that deleted the tenants' namespaces with their volumes."""
    make(world, ["survivor"], storage={"size": "1Gi", "retain": "Retain"})
    running(world, ["survivor"])
    kinds = ("trainingsessions", "tenants", "basemodels", "ratecards")
    saved = {
        kind: [
            {
                **each,
                "apiVersion": "gristmill.dev/v1alpha1",
                "metadata": {
                    key: each["metadata"][key]
                    for key in ("name", "namespace", "annotations", "labels")
                    if key in each["metadata"]
                },
            }
            for each in world.cluster.objects(kind)
        ]
        for kind in kinds
    }
    kinds_of = {
        "trainingsessions": "TrainingSession",
        "tenants": "Tenant",
        "basemodels": "BaseModel",
    }
    definitions = [
        world.cluster.get("customresourcedefinition", f"{kind}.gristmill.dev") for kind in kinds
    ]
    claim = world.cluster.get("persistentvolumeclaim", "survivor-state", "gm-acme")["metadata"][
        "uid"
    ]
    namespace = world.cluster.get("namespace", "gm-acme")["metadata"]["uid"]
    uid = world.session("survivor")["metadata"]["annotations"]["gristmill.dev/session-id"]
    names = [each["metadata"]["name"] for each in definitions]
    world.cluster.kubectl("delete", "crd", *names, "--wait=false")
    eventually(
        "they are gone", lambda: all(world.cluster.find("crd", each) is None for each in names), 90
    )
    for each in definitions:
        kept = {"name": each["metadata"]["name"], "labels": each["metadata"].get("labels", {})}
        fresh = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
        world.cluster.apply({**fresh, "metadata": kept, "spec": each["spec"]})
    for name in names:
        world.cluster.wait_condition("crd", name, "Established")
    objects = [
        {**each, "kind": kinds_of[kind], "status": {}}
        for kind in ("tenants", "basemodels", "trainingsessions")
        for each in saved[kind]
    ]
    text = "\n---\n".join(json.dumps(each) for each in objects)
    eventually("they are served", lambda: world.cluster.try_apply(text).code == 0, 30, 1)
    assert world.cluster.get("namespace", "gm-acme")["metadata"]["uid"] == namespace
    found = world.cluster.get("persistentvolumeclaim", "survivor-state", "gm-acme")
    assert found["metadata"]["uid"] == claim
    assert "deletionTimestamp" not in found["metadata"]
    running(world, ["survivor"], 120)
    assert world.session("survivor")["metadata"]["annotations"]["gristmill.dev/session-id"] == uid
    assert world.cluster.get("namespace", "gm-acme")["metadata"]["uid"] == namespace
    clear(world)


def test_g18_pods_of_what_is_over_go_at_once_and_the_resource_stays_for_its_time(
    world: OperatorWorld,
) -> None:
    """G18: pods of a finished group that were kept until its TTL."""
    make(world, ["stopped"], ttlSecondsAfterFinished=40)
    make(world, ["failed"], ttlSecondsAfterFinished=40, failurePolicy={"maxRestarts": 0})
    running(world, ["stopped", "failed"])
    dead = {"phase": "Failed", "message": "it fell over"}
    kubectl(
        world, "patch", "pod", "failed-a1-0", "--subresource=status", "--type=merge",
        f"--patch={json.dumps({'status': dead})}",
    )  # fmt: skip
    kubectl(world, "patch", "trainingsession", "stopped", "--type=merge",
            '--patch={"spec":{"desiredState":"Stopped"}}')  # fmt: skip
    wait_states(world, {"stopped": "Stopped", "failed": "Failed"}, 20)
    # Long before their time is over, or this would not be seen.
    eventually("no pods", lambda: not world.pods("stopped") and not world.pods("failed"), 5)
    assert {"stopped", "failed"} <= set(statuses(world))
    wait_states(world, {"stopped": "", "failed": ""}, 80)


def test_g26_conditions_of_others_stay_and_so_do_ours(world: OperatorWorld) -> None:
    """G26: conditions that two managers wrote over one another."""
    make(world, ["shared"])
    running(world, ["shared"])
    foreign = {
        "type": "example.com/Scanned", "status": "True", "reason": "Clean", "message": "by another",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    body = {
        "apiVersion": "gristmill.dev/v1alpha1", "kind": "TrainingSession",
        "metadata": {"name": "shared", "namespace": "gm-acme"}, "status": {"conditions": [foreign]},
    }  # fmt: skip
    world.cluster.kubectl(
        "apply", "--server-side", "--subresource=status", "--field-manager=scanner", "-f", "-",
        stdin=yaml.safe_dump(body),
    )  # fmt: skip
    ours = {each["type"] for each in statuses(world)["shared"]["conditions"]}
    assert {"Ready", "PodsReady", "example.com/Scanned"} <= ours
    before = passes(world)
    turns = 0
    while turns < 100 and passes(world) < before + LOOKS:  # each turn costs one look at least
        # Each kind of turn changes conditions of ours beside the foreign one.
        kubectl(world, "annotate", "trainingsession", "shared", f"turn={turns}", "--overwrite")
        tenant_suspended(world, suspended=turns % 2 == 0)
        wait_blocked(world, "shared", "True" if turns % 2 == 0 else "False")
        turns += 1
    tenant_suspended(world, suspended=False)
    assert passes(world) >= before + LOOKS
    found = statuses(world)["shared"]["conditions"]
    assert {each["type"] for each in found} >= ours
    assert {k: v for k, v in next(e for e in found if e["type"] == "example.com/Scanned").items()
            if k in foreign} == foreign  # fmt: skip


def passes(world: OperatorWorld) -> float:
    """How often the operator looked at sessions."""
    lines = world.operators[-1].ask("/metrics")[1].splitlines()
    mine = 'reconciles_total{kind="TrainingSession"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if mine in line)


def wait_blocked(world: OperatorWorld, name: str, status: str) -> None:
    eventually(
        f"{name} is Blocked={status}",
        lambda: world.condition(name, "Blocked").get("status") == status,
        10,
    )


def tenant_suspended(world: OperatorWorld, *, suspended: bool) -> None:
    patch = json.dumps({"spec": {"suspended": suspended}})
    world.cluster.kubectl("patch", "tenant", "acme", "--type=merge", f"--patch={patch}")


def writes(world: OperatorWorld, mark: int) -> list[str]:
    """Of the operator, but for its Lease."""
    found = world.cluster.audit(mark, user=ACCOUNT, verbs=WRITES)
    lines = (f"{each['verb']} {each['requestURI']}" for each in found)
    return [line for line in lines if "/leases/" not in line]


def test_g32_a_tenants_namespace_that_is_deleted_by_hand_causes_no_storm(
    world: OperatorWorld,
) -> None:
    """G32: a hot loop of NotFound. The condition says what is; requests stay few."""
    namespace = world.tenant("handmade")
    pending = {"apiVersion": "v1", "kind": "ConfigMap",
               "metadata": {"name": "held", "namespace": namespace, "finalizers": ["example.com/hold"]}}  # fmt: skip
    world.cluster.apply(pending)
    world.cluster.delete("namespace", namespace)
    world.cluster.wait_condition("tenant", "handmade", "NamespaceReady", status="False")
    found = world.cluster.get("tenant", "handmade")["status"]["conditions"]
    note = next(each for each in found if each["type"] == "NamespaceReady")
    assert note["reason"] == "NamespaceTerminating"
    assert namespace in note["message"]
    eventually("it is quiet", lambda: not _asked(world, namespace, 3), 30)
    assert len(_asked(world, namespace, 12)) <= 12
    world.cluster.kubectl(
        "patch", "configmap", "held", f"--namespace={namespace}", "--type=merge",
        '--patch={"metadata":{"finalizers":null}}',
    )  # fmt: skip
    world.cluster.wait_condition("tenant", "handmade", "NamespaceReady", seconds=60)
    assert "deletionTimestamp" not in world.cluster.get("namespace", namespace)["metadata"]


def _asked(world: OperatorWorld, namespace: str, seconds: float) -> list[str]:
    """Requests about the tenant in the next seconds."""
    mark = world.cluster.audit_mark()
    time.sleep(seconds)  # nothing tells of requests that are not made
    found = world.cluster.audit(mark, user=ACCOUNT)
    return [each["requestURI"] for each in found if "handmade" in each["requestURI"]]
