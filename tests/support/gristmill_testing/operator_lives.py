"""Whole lives of many sessions side by side, and what may be left of them."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from gristmill_testing.cluster import condition, eventually
from gristmill_testing.cluster_api import ApiError
from gristmill_testing.operator_world import ACCOUNT, START_S, OperatorWorld, Process, session

Json = dict[str, Any]
NAMESPACE = "gm-acme"
SOON_S = 5.0
"""How soon somebody is told of bad input."""
RANKS = 2
AWAY = (OSError, HTTPException, ApiError)
"""What a look at an API server that is on its way back may raise."""


def settle(world: OperatorWorld, **settings: Any) -> None:
    """One operator that leads, no fault, no session: whatever became of the test before."""
    world.proxy.heal()
    world.cluster.wait_api(180)
    if not _leads_alone(world):
        for each in world.operators:
            each.kill()  # one that hangs, too
        world.operators.clear()
        started = world.start_operator(**settings)
        eventually("it leads", lambda: _leads(started), START_S)
    if world.cluster.objects("trainingsessions", NAMESPACE):
        clear(world)


def _leads_alone(world: OperatorWorld) -> bool:
    """It may have been started a moment ago."""
    if len(world.operators) != 1:
        return False
    with suppress(AssertionError):
        return bool(eventually("it leads", lambda: _leads(world.operators[0]), 20))
    return False


def _leads(operator: Process) -> bool:
    status, body = operator.ask("/readyz") if operator.alive else (0, "")
    return status == 200 and bool(json.loads(body)["leads"])


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
        "all sessions are gone", lambda: not cluster.objects("trainingsessions", NAMESPACE), 90
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
        eventually(f"{state}, attempt {attempt}", probe, 90)
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


def twice(names: list[str]) -> Counter[str]:
    """One pod per rank and attempt."""
    return Counter(
        f"{name}-a{attempt}-{rank}" for name in names for attempt in (1, 2) for rank in range(RANKS)
    )


def wait_served(
    world: OperatorWorld,
    names: list[str],
    seconds: float = 90,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Until all are Running with all of their pods ready. `between` is called before each look."""
    late: dict[str, Any] = {}

    def served() -> bool:
        between()
        late.clear()
        late.update(dict.fromkeys(names, "nobody answers"))
        try:
            found = world.cluster.objects("trainingsessions", NAMESPACE)
        except AWAY:
            return False
        states = {each["metadata"]["name"]: each for each in found}
        late.update({name: _stands(states.get(name)) for name in names})
        for name in names:
            if late[name] == ("Running", "True"):
                del late[name]
        return not late

    try:
        eventually("all serve", served, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}; late: {late}") from None


def _stands(found: Json | None) -> tuple[str, str]:
    """State and PodsReady."""
    if found is None:
        return "not there", ""
    return (found.get("status") or {}).get("state", ""), condition(found, "PodsReady") or ""


def clear(world: OperatorWorld) -> None:
    place = f"--namespace={NAMESPACE}"
    world.cluster.kubectl("delete", "trainingsessions", "--all", place, "--wait=false", timeout=90)
    eventually("no session", lambda: not world.cluster.objects("trainingsessions", NAMESPACE), 90)


def told(
    world: OperatorWorld, name: str, type_: str, reason: str, *, within_s: float = SOON_S,
    namespace: str = "gm-acme",
) -> str:  # fmt: skip
    """The message of the condition, once it and an Event of the same reason are there."""
    found = world.wait_reason(name, type_, reason, namespace, within_s)
    eventually(
        f"an Event {reason} of {name}",
        lambda: reason in {each["reason"] for each in world.events(name, namespace)},
        SOON_S,
    )
    assert found["message"]
    return str(found["message"])
