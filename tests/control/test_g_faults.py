"""Whatever fails between the operator and the API server, sessions and tenants come to where they should."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.operator_calls import calls_of, trials
from gristmill_testing.operator_world import (
    ACCOUNT,
    IMAGE,
    OperatorWorld,
    now,
    operator_world,
    reset,
    session,
)
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
NAMESPACE = "gm-acme"
RANKS = 2
OPERATOR = {"qps": "500", "burst": "500", "request_timeout_s": "2", "log_level": "WARNING"}


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("faults")
    make_volumes(control_cluster, 250, "faults")
    with operator_world(control_cluster, folder) as made:
        made.start_operator(**OPERATOR)
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        reset(made)


def apply_all(world: OperatorWorld, objects: list[Json]) -> None:
    world.cluster.apply("\n---\n".join(json.dumps(each) for each in objects), timeout=120)


def live(world: OperatorWorld, names: list[str]) -> None:
    """Created, Running, one pod lost, Running again, Stopped, deleted: all of them side by side."""
    cluster, wanted = world.cluster, set(names)
    place = f"--namespace={NAMESPACE}"
    apply_all(world, [session(each, workers=RANKS) for each in names])
    wait_all(world, wanted, "Running", attempt=1)
    cluster.kubectl(
        "delete", "pods", place, "--selector=gristmill.dev/rank=1", "--wait=false", timeout=120
    )
    wait_all(world, wanted, "Running", attempt=2)
    cluster.kubectl(
        "annotate", "trainingsessions", "--all", place, "gristmill.dev/stop-requested=now",
        timeout=120,
    )  # fmt: skip
    wait_all(world, wanted, "Stopped", attempt=2)
    cluster.kubectl("delete", "trainingsessions", "--all", place, "--wait=false", timeout=120)
    eventually(
        "all sessions are gone", lambda: not cluster.objects("trainingsessions", NAMESPACE), 90, 0.5
    )


def wait_all(world: OperatorWorld, names: set[str], state: str, attempt: int) -> None:
    """Until all are there, and serve with the attempt where they run."""

    def late() -> dict[str, Any]:
        found = world.cluster.objects("trainingsessions", NAMESPACE)
        status = {each["metadata"]["name"]: each.get("status") or {} for each in found}
        return {name: status.get(name) for name in names if not there(status.get(name) or {})}

    def there(status: Json) -> bool:
        ready = (status.get("workers") or {}).get("ready") == RANKS
        arrived = status.get("state") == state and status.get("attempt") == attempt
        return arrived and (ready or state != "Running")

    last: dict[str, Any] = {}

    def probe() -> bool:
        last.clear()
        last.update(late())
        return not last

    try:
        eventually(f"{state}, attempt {attempt}", probe, 90, 0.5)
    except AssertionError:
        raise AssertionError(
            f"not {state}, attempt {attempt}: {json.dumps(last, indent=1)}"
        ) from None


def pods_made(world: OperatorWorld, mark: int) -> Counter[str]:
    """How often each pod of a session was made, by the audit log."""
    found = world.cluster.audit(mark, user=ACCOUNT, verbs=("create",))
    return Counter(
        each["objectRef"]["name"]
        for each in found
        if each["objectRef"]["resource"] == "pods" and each["responseStatus"]["code"] == 201
    )


def leftovers(world: OperatorWorld) -> list[str]:
    """Children of sessions that are still there."""
    kinds = ("pods", "services", "persistentvolumeclaims", "secrets", "jobs", "networkpolicies")
    return [
        f"{kind}/{each['metadata']['name']}"
        for kind in kinds
        for each in world.cluster.objects(kind, NAMESPACE, "gristmill.dev/session")
    ]


def test_g2_each_api_call_of_a_session_may_fail_once(world: OperatorWorld) -> None:
    """G2: 429, 500, hang and lost answer at each call: it converges, and nothing is done twice."""
    since = now()
    live(world, ["clean"])
    calls = calls_of("clean", world.proxy.requests(since=since))
    assert len(calls) > 12, calls
    tried = trials(world.proxy, calls, "s")
    names = [each.name for each in tried]
    mark = world.cluster.audit_mark()
    live(world, names)
    world.proxy.heal()
    met = [each for each in tried if each.fault.hits]
    assert len(met) > 0.9 * len(tried), [str(each) for each in tried if not each.fault.hits]
    made = pods_made(world, mark)
    assert made == Counter(
        f"{name}-a{attempt}-{rank}" for name in names for attempt in (1, 2) for rank in range(RANKS)
    )
    eventually("nothing is left", lambda: not leftovers(world), 60, 1)
    assert all(each.alive for each in world.operators)
