"""Whatever fails between the operator and the API server, sessions and tenants come to where they should."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.api_proxy import FOREVER, Seen
from gristmill_testing.cluster import Cluster, condition, eventually
from gristmill_testing.operator_calls import calls_of, trials
from gristmill_testing.operator_lives import (
    apply_all,
    leftovers,
    live,
    pods_made,
    settle,
    twice,
)
from gristmill_testing.operator_world import (
    IMAGE,
    OperatorWorld,
    now,
    operator_world,
    reset,
    tenant,
)
from gristmill_testing.waiting_volumes import make_volumes

OPERATOR: dict[str, Any] = {  # Any: settings
    "qps": "500",
    "burst": "500",
    "request_timeout_s": "2",
    "log_level": "WARNING",
    # No fault of these tests concerns the Lease; a crowded machine must not, either.
    "lease_s": "60",
    "lease_renew_s": "45",
}
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def shared(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("faults")
    make_volumes(control_cluster, 250, "faults")
    with operator_world(control_cluster, folder) as made:
        made.start_operator(**OPERATOR)
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        settle(made, **OPERATOR)
        reset(made)


@pytest.fixture
def world(shared: OperatorWorld) -> OperatorWorld:
    settle(shared, **OPERATOR)
    return shared


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
    assert made == twice(names)
    eventually("nothing is left", lambda: not leftovers(world), 60, 1)
    assert all(each.alive for each in world.operators)


# --- tenants -------------------------------------------------------------------------------------


def test_g2_each_api_call_of_a_tenant_may_fail_once(world: OperatorWorld) -> None:
    """G2, for what stands between tenants: every part of it is there in the end, with every fault."""
    since = now()
    world.tenant("clean2")
    calls = calls_of("clean2", namespaced(world, "clean2", since))
    assert len(calls) > 8, calls
    tried = trials(world.proxy, calls, "t")
    apply_all(world, [tenant(each.name) for each in tried])
    wanted = children_of(world, "gm-clean2")

    def unlike() -> list[str]:
        found = {each["metadata"]["name"]: each for each in world.cluster.objects("tenants")}
        ready = {name for name, each in found.items() if condition(each, "Ready") == "True"}
        return [str(each) for each in tried if each.name not in ready]

    eventually("all are Ready", lambda: not unlike(), 120, 1)
    world.proxy.heal()
    for each in tried:
        assert children_of(world, f"gm-{each.name}") == wanted, str(each)
    met = [each for each in tried if each.fault.hits]
    assert len(met) > 0.9 * len(tried), [str(each) for each in tried if not each.fault.hits]


def namespaced(world: OperatorWorld, name: str, since: float) -> list[Seen]:
    """Requests about the tenant; its namespace is named gm-<name>."""
    return world.proxy.requests(name, since=since)


def children_of(world: OperatorWorld, namespace: str) -> set[str]:
    kinds = ("networkpolicies", "resourcequotas", "limitranges", "rolebindings", "serviceaccounts")
    return {
        f"{kind}/{each['metadata']['name']}"
        for kind in kinds
        for each in world.cluster.objects(kind, namespace, "app.kubernetes.io/managed-by=gristmill")
    }


# --- watches -------------------------------------------------------------------------------------


def test_g8_late_repeated_and_reordered_news_make_nothing_twice(world: OperatorWorld) -> None:
    """G8: a stale cache and a scale-down that killed more than asked. Never two pods of one rank."""
    world.stop_operators()
    proxy = world.proxy
    proxy.inject("watch-lag", "/pods", times=FOREVER, seconds=1.5)
    proxy.inject("watch-reorder", "/persistentvolumeclaims", times=FOREVER, count=FOREVER)
    proxy.inject("watch-repeat", "/jobs", times=FOREVER)
    proxy.inject("watch-lag", "/trainingsessions", times=FOREVER, seconds=0.7)
    world.start_operator(**OPERATOR)
    names = [f"lag{number}" for number in range(8)]
    mark = world.cluster.audit_mark()
    live(world, names)
    assert pods_made(world, mark) == twice(names)
    proxy.heal()
    world.stop_operators()
    # Each watch breaks at its first event, or ends as too old, again and again.
    proxy.inject("watch-cut", "/(pods|trainingsessions)", times=12)
    proxy.inject("watch-gone", "/(pods|trainingsessions)", times=4)
    proxy.inject("watch-drop", "/pods", times=2, count=6)
    world.start_operator(**OPERATOR, sweep_s="5")
    names = [f"cut{number}" for number in range(8)]
    mark = world.cluster.audit_mark()
    live(world, names)
    assert pods_made(world, mark) == twice(names)
    proxy.heal()
    world.stop_operators()
    world.start_operator(**OPERATOR)


def test_g8_stale_reads_make_nothing_twice(world: OperatorWorld) -> None:
    """G8: what the operator reads past its cache is old, too: of single objects, and of sweeps that list them."""
    world.stop_operators()
    kinds = "(pods|trainingsessions|persistentvolumeclaims)"
    lists = world.proxy.inject("stale", rf"^GET /api.*/{kinds}\?", times=40)
    one = world.proxy.inject("stale", rf"^GET /api.*/{kinds}/stale", times=60)
    world.start_operator(**OPERATOR, sweep_s="2")
    names = [f"stale{number}" for number in range(8)]
    mark = world.cluster.audit_mark()
    live(world, names)
    assert pods_made(world, mark) == twice(names)
    # The first answer of each path was true: the others were as old as that one.
    for fault in (lists, one):
        assert fault.hits > len(fault.kept) > 0
    world.proxy.heal()
    world.stop_operators()
    world.start_operator(**OPERATOR)
