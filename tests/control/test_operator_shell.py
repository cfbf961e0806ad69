"""The operator's shell on a real API server: it starts, leads, watches, and brings sessions up.

Nodes and meters are fake: what runs in pods is the business of other tests.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gristmill_contracts import metrics as names
from gristmill_testing.cluster import WRITES, Cluster, eventually
from gristmill_testing.operator_world import (
    ACCOUNT,
    IMAGE,
    SYSTEM,
    OperatorWorld,
    now,
    operator_world,
    reset,
    session,
)
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
VOLUMES = 40
LEASE_S = 15.0


@pytest.fixture(scope="module")
def shell_world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("shell")
    make_volumes(control_cluster, VOLUMES)
    with operator_world(control_cluster, folder) as world:
        world.start_operator()
        world.tenant()
        world.model(weights={"image": {"reference": IMAGE}})
        yield world
        reset(world)


def test_a_session_that_is_applied_comes_to_run(shell_world: OperatorWorld) -> None:
    shell_world.cluster.apply(session("first"))
    found = shell_world.wait_state("first", "Running")
    assert found["status"]["attempt"] == 1
    assert {pod["metadata"]["name"] for pod in shell_world.pods("first")} == {"first-a1-0"}

    def reasons() -> list[str]:
        uid = found["metadata"]["uid"]
        told = shell_world.events("first")
        return [each["reason"] for each in told if each["regarding"]["uid"] == uid]

    eventually("events are posted", lambda: "Started" in reasons(), 10)
    assert reasons().count("Started") == 1


def test_sessions_that_need_nothing_cause_no_write_but_the_lease(
    shell_world: OperatorWorld,
) -> None:
    for n in range(5):
        shell_world.cluster.apply(session(f"idle{n}"))
    for n in range(5):
        shell_world.wait_state(f"idle{n}", "Running")

    def is_quiet() -> bool:
        mark = shell_world.cluster.audit_mark()
        time.sleep(10)  # nothing tells of a write that does not happen
        return not writes(shell_world.cluster, mark)

    # What they cost is told once, a minute after their start.
    eventually("nothing is written any more", is_quiet, 120)


def writes(cluster: Cluster, mark: int) -> list[str]:
    """Of the operator, but for its Lease."""
    found = cluster.audit(mark, user=ACCOUNT, verbs=WRITES)
    lines = (f"{each['verb']} {each['requestURI']}" for each in found)
    return [line for line in lines if "/leases/" not in line]


def test_a_start_costs_few_writes(shell_world: OperatorWorld) -> None:
    mark = shell_world.cluster.audit_mark()
    shell_world.cluster.apply(session("frugal"))
    shell_world.wait_state("frugal", "Running")
    mine = [
        line for line in writes(shell_world.cluster, mark) if "frugal" in line or "gm-acme" in line
    ]
    events = [line for line in mine if "/events" in line]
    assert len(mine) - len(events) <= 12, mine


def test_a_follower_is_ready_and_leads_when_the_leader_stops(shell_world: OperatorWorld) -> None:
    first = shell_world.operators[-1]
    follower = shell_world.start_operator()
    leads = json.loads(follower.ask("/readyz")[1])
    assert leads == {"ready": True, "leads": False}
    before = shell_world.leader()
    assert first.stop(120) == 0
    eventually("the follower leads", lambda: shell_world.leader() not in ("", before), 6)
    shell_world.cluster.apply(session("later"))
    shell_world.wait_state("later", "Running")


def test_a_killed_leader_is_followed_within_its_lease(shell_world: OperatorWorld) -> None:
    leader = shell_world.operators[-1]
    before = shell_world.leader()
    shell_world.start_operator()
    leader.kill()
    eventually("the follower leads", lambda: shell_world.leader() not in ("", before), 20)


def test_what_happened_while_nobody_ran_is_put_right(shell_world: OperatorWorld) -> None:
    for name in ("kept", "removed"):
        shell_world.cluster.apply(session(name))
        shell_world.wait_state(name, "Running")
    kept = shell_world.pod_uids("kept")
    shell_world.stop_operators()
    shell_world.cluster.kubectl(
        "delete", "trainingsession", "removed", "--namespace=gm-acme", "--wait=false"
    )
    shell_world.cluster.apply(session("made"))
    shell_world.start_operator()
    shell_world.wait_state("made", "Running", seconds=40)
    eventually("the deleted one is gone", lambda: not shell_world.pods("removed"), 30)
    assert shell_world.pod_uids("kept") == kept


def test_an_operator_without_its_rights_names_each_and_does_not_start(
    shell_world: OperatorWorld, tmp_path: Path
) -> None:
    cluster = shell_world.cluster
    poor = Path(tmp_path / "poor.kubeconfig")
    text = shell_world._kubeconfig().read_text()
    token = cluster.kubectl("create", "token", "gristmill-ledger", f"--namespace={SYSTEM}").strip()
    known = yaml.safe_load(text)
    known["users"][0]["user"]["token"] = token
    poor.write_text(yaml.safe_dump(known))
    process = shell_world.start_operator(ready=False, kubeconfig=str(poor))
    shell_world.operators.remove(process)
    assert process.process.wait(120) == 3
    said = process.log.read_text()
    assert "list trainingsessions.gristmill.dev in all namespaces" in said
    assert "get secrets gristmill-cluster-key in namespace gristmill-system" in said


def test_g4_a_watch_that_tells_nothing_is_found_and_what_it_hid_is_seen(
    shell_world: OperatorWorld,
) -> None:
    """The sweep brings in what was hidden, and the liveness probe asks for a restart."""
    shell_world.stop_operators()
    shell_world.proxy.inject("watch-silence", "/trainingsessions", times=100)
    operator = shell_world.start_operator(sweep_s="5", initial_streaming="false")
    shell_world.cluster.apply(session("hidden"))
    shell_world.wait_state("hidden", "Running", seconds=60)
    status, body = operator.ask("/healthz")
    assert status == 503
    assert "trainingsessions" in body
    shell_world.proxy.heal()


def test_an_api_server_that_is_away_is_no_reason_to_restart(shell_world: OperatorWorld) -> None:
    shell_world.stop_operators()
    operator = shell_world.start_operator(sweep_s="2")
    fault = shell_world.proxy.inject("refuse", "^(GET|PATCH|POST) /api", times=1000, status=503)
    eventually("requests were refused", lambda: fault.hits > 5, 20)
    assert operator.ask("/healthz")[0] == 200
    shell_world.proxy.heal()
    shell_world.cluster.apply(session("after"))
    assert operator.alive
    shell_world.wait_state("after", "Running")


def test_a_leader_that_cannot_renew_ends_before_another_may_lead(
    shell_world: OperatorWorld,
) -> None:
    shell_world.stop_operators()
    operator = shell_world.start_operator()
    eventually("it leads", lambda: json.loads(operator.ask("/readyz")[1])["leads"], 30)
    shell_world.proxy.inject("refuse", "^PATCH .*/leases/", times=1000)
    refused = now()
    shell_world.cluster.apply(session("unled"))
    assert operator.process.wait(120) == 1
    assert "lease_lost" in operator.log.read_text()
    seen = shell_world.proxy.requests("gm-acme", since=refused)
    written = [each.came for each in seen if each.writes]
    assert max(written, default=refused) - refused < LEASE_S, "another may lead by then"
    shell_world.proxy.heal()
    shell_world.operators.remove(operator)
    shell_world.start_operator()


def test_definitions_that_are_removed_and_made_again_are_watched_again(
    shell_world: OperatorWorld,
) -> None:
    cluster = shell_world.cluster
    definition = json.loads(
        cluster.kubectl("get", "crd", "ratecards.gristmill.dev", "--output=json")
    )
    kept = {"metadata", "spec", "apiVersion", "kind"}
    definition = {name: value for name, value in definition.items() if name in kept}
    marks = ("name", "labels", "annotations")
    definition["metadata"] = {k: v for k, v in definition["metadata"].items() if k in marks}
    pods = shell_world.pod_uids()
    cluster.kubectl("delete", "crd", "ratecards.gristmill.dev")
    eventually(
        "the watches have ended",
        lambda: "watch_ended" in shell_world.operators[-1].log.read_text(),
        60,
    )
    cluster.apply(definition)
    cluster.wait_condition("crd", "ratecards.gristmill.dev", "Established")
    shell_world.cluster.apply(session("reborn"))
    shell_world.wait_state("reborn", "Running", seconds=60)
    assert pods <= shell_world.pod_uids(), "nothing that ran was touched"


def test_the_metrics_tell_what_it_does(shell_world: OperatorWorld) -> None:
    text = shell_world.operators[-1].ask("/metrics")[1]
    for name in (
        names.OPERATOR_RECONCILES,
        names.OPERATOR_API_REQUESTS,
        names.OPERATOR_QUEUE_DEPTH,
        names.OPERATOR_LEADER,
        names.OPERATOR_SESSIONS,
        names.OPERATOR_WATCH_EVENTS,
    ):
        assert name.removesuffix("_total") in text
    assert "gm-acme" not in text, "no label names a tenant"
