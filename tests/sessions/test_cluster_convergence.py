"""A session of a cluster under random histories: it settles, and what must never happen does not.

The model asserts at each step: no two living pods of one rank, no pod of others deleted, nothing placed before
the ledger knows of it, nothing let go whose usage is neither posted nor recorded as missing, every status sound.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_contracts import conditions as known
from gristmill_contracts import labels, limits
from gristmill_contracts.session import TERMINAL_STATES, FailurePolicy, SessionLimits
from gristmill_sessions.cluster import Pod, TenantView, Volume
from gristmill_testing.model_cluster import ModelCluster, Operator, cluster
from gristmill_testing.worlds import SECOND_US

Happening = Callable[[ModelCluster], None]


def some_pod(world: ModelCluster) -> Pod | None:
    """A pod of the session that something can happen to."""
    return next((pod for pod in world.real.pods.values() if pod.owner_uid and not pod.ended), None)


def end_pod(reason: str, code: int, *, disrupted: bool = False) -> Happening:
    def happen(world: ModelCluster) -> None:
        pod = some_pod(world)
        if pod is not None and pod.phase == "Running":
            ended = replace(
                pod, phase="Failed", ready=False, reason=reason, exit_code=code, disrupted=disrupted
            )
            world.real.pods[pod.name] = ended

    return happen


def set_to(name: str, value: object) -> Happening:
    return lambda world: setattr(world, name, value)


def vanish(world: ModelCluster) -> None:
    pod = some_pod(world)
    if pod is not None:
        del world.real.pods[pod.name]


def delete_by_hand(world: ModelCluster) -> None:
    pod = some_pod(world)
    if pod is not None:
        world.real.pods[pod.name] = replace(pod, deleting_since_us=world.now_us)


def lose_node(world: ModelCluster) -> None:
    name = f"node-{world.node}"
    world.lost_nodes.setdefault(name, world.now_us)
    world.node += 1


def nodes_back(world: ModelCluster) -> None:
    """The kubelet of a node that is back ends at once what was to be deleted."""
    for name, pod in list(world.real.pods.items()):
        if pod.node in world.lost_nodes and pod.deleting:
            del world.real.pods[name]
    world.lost_nodes = {
        name: at for name, at in world.lost_nodes.items() if name in world.gone_nodes
    }


def nodes_gone(world: ModelCluster) -> None:
    world.gone_nodes |= set(world.lost_nodes)


def stop(world: ModelCluster) -> None:
    if world.real.session is not None:
        spec = world.real.session.spec.model_copy(update={"desired_state": "Stopped"})
        world._change(spec=spec)


def annotate(key: str, value: str) -> Happening:
    def happen(world: ModelCluster) -> None:
        if world.real.session is not None:
            meta = world.real.session.metadata
            changed = {**meta.annotations, key: value}
            world._change(metadata=meta.model_copy(update={"annotations": changed}))

    return happen


def unstop(world: ModelCluster) -> None:
    if world.real.session is not None:
        meta = world.real.session.metadata
        left = {
            key: value for key, value in meta.annotations.items() if key != labels.STOP_REQUESTED
        }
        world._change(metadata=meta.model_copy(update={"annotations": left}))


def delete(world: ModelCluster) -> None:
    if world.real.session is not None:
        world.delete()


def delete_namespace(world: ModelCluster) -> None:
    world.namespace_terminating = True
    delete(world)
    for name, pod in list(world.real.pods.items()):
        world.real.pods[name] = replace(
            pod, deleting_since_us=pod.deleting_since_us or world.now_us
        )


def work(world: ModelCluster) -> None:
    """A client's operation, by the way that the gateway sends it: the endpoint of the status."""
    session, meter = world.real.session, world.running_meter()
    if session is None or meter is None or not session.status.endpoint:
        return
    if meter.attempt == session.status.attempt and world.ledger.stopped_attempt != meter.attempt:
        assert known.is_true(session.status.conditions, known.STARTED)
        world.head, world.worked_us = world.head + 1, world.now_us


def post(world: ModelCluster) -> None:
    if not world.ledger.away and world.running_meter() is not None:
        world.ledger.acked = world.head


def ledger_away(world: ModelCluster) -> None:
    world.ledger.away = True


def ledger_back(world: ModelCluster) -> None:
    world.ledger.away = False


def forget(world: ModelCluster) -> None:
    world.operator = Operator()


def lose_volume(world: ModelCluster) -> None:
    """A claim is protected while a pod that has a node uses it."""
    if not any(world.lives(pod) and pod.node for pod in world.real.pods.values()):
        world.real.volume = Volume()


def foreign_pod(world: ModelCluster) -> None:
    world.real.pods.setdefault(
        "theirs", Pod(name="theirs", uid="theirs", owner_uid="", phase="Running")
    )


def name_taken(world: ModelCluster) -> None:
    attempt = 1 if world.real.session is None else world.real.session.status.attempt + 1
    name = f"run-1-a{attempt}-0"
    world.real.pods.setdefault(
        name, Pod(name=name, uid=f"theirs-{name}", owner_uid="others", phase="Running")
    )


def stray_pod(world: ModelCluster) -> None:
    if world.real.session is not None:
        uid = world.real.session.metadata.uid
        world.real.pods.setdefault(
            "odd", Pod(name="odd", uid="odd", owner_uid=uid, phase="Running")
        )


def wait(seconds: int) -> Happening:
    return lambda world: world.advance(seconds)


HAPPENINGS: dict[str, Happening] = {
    "wait 1": wait(1),
    "wait 5": wait(5),
    "wait 25": wait(25),
    "wait 70": wait(70),
    "wait 1000": wait(1000),
    "worker fails": end_pod("WorkerFailed", 1),
    "out of memory": end_pod("OutOfMemory", 137),
    "evicted": end_pod("Evicted", 137, disrupted=True),
    "fatal": end_pod("WorkerFailed", 42),
    "pod vanishes": vanish,
    "pod deleted by hand": delete_by_hand,
    "node lost": lose_node,
    "nodes back": nodes_back,
    "nodes gone": nodes_gone,
    "stop": stop,
    "stop asked": annotate(labels.STOP_REQUESTED, "now"),
    "stop taken back": unstop,
    "restart": annotate(labels.RESTART, "one"),
    "restart again": annotate(labels.RESTART, "two"),
    "delete": delete,
    "namespace deleted": delete_namespace,
    "work": work,
    "post": post,
    "ledger away": ledger_away,
    "ledger back": ledger_back,
    "api works": set_to("api", "works"),
    "api away": set_to("api", "away"),
    "api loses answers": set_to("api", "answer_lost"),
    "api refuses": set_to("api", "refused"),
    "api finds it invalid": set_to("api", "invalid"),
    "quota": set_to("api", "quota"),
    "quota for a part": set_to("api", "partial"),
    "operator restarts": forget,
    "cache stale": ModelCluster.freeze,
    "cache fresh": ModelCluster.thaw,
    "foreign pod": foreign_pod,
    "name taken": name_taken,
    "stray pod": stray_pod,
    "volume lost": lose_volume,
    "no room": set_to("held_up", "Unschedulable"),
    "image missing": set_to("held_up", "ImagePullFailed"),
    "image invalid": set_to("held_up", "ImageInvalid"),
    "meter hangs": set_to("held_up", "MeterNotReady"),
    "room": set_to("held_up", ""),
    "meter blocks": set_to("meter", "Blocked"),
    "meter fails": set_to("meter", "Failed"),
    "meter serves": set_to("meter", "Serving"),
    "suspended": set_to("tenant", TenantView(name="acme", suspended=True)),
    "tenant gone": set_to("tenant", TenantView(name="", found=False)),
    "tenant well": set_to("tenant", TenantView(name="acme")),
    "queued": set_to("tenant", TenantView(name="acme", position=3, max_running=1)),
    "job fails": set_to("job_fails", True),
    "job works": set_to("job_fails", False),
}
PLAIN = sorted(set(HAPPENINGS) - {"namespace deleted"})


def world_of(workers: int) -> ModelCluster:
    return cluster(
        workers=workers,
        limits=SessionLimits(lifetime_seconds=20_000, pending_seconds=40_000),
        failure_policy=FailurePolicy(fatal_exit_codes=[42]),
    )


def run(world: ModelCluster, happenings: list[str]) -> None:
    """Each happening meets a session that was looked after; some time passes after it."""
    for name in happenings:
        HAPPENINGS[name](world)
        world.reconcile()
        world.advance(1)
    world.reconcile()


def heal(world: ModelCluster) -> None:
    """All faults end, the names that others took are free, and time passes."""
    for name in (
        "cache fresh",
        "nodes gone",
        "api works",
        "ledger back",
        "room",
        "meter serves",
        "tenant well",
    ):
        HAPPENINGS[name](world)
    world.job_fails = False
    for name, pod in list(world.real.pods.items()):
        if pod.owner_uid == "others":
            del world.real.pods[name]
    for seconds in (1, 5, 40, 70, 400, 5, 5, 1000, 5, 5, 5, 5, 70, 5):
        world.reconcile()
        world.advance(seconds)
    world.reconcile()


def history(seed: int, names: list[str]) -> list[str]:
    """Mostly a session that got somewhere before something befell it."""
    random = Random(seed)
    pauses = ["wait 1", "wait 5", "wait 5", "wait 5", "wait 25", "wait 70"]
    happenings = ["wait 5"] * random.choice([0, 1, 2, 2])
    for _ in range(random.randrange(12)):
        happenings += [random.choice(names), *random.choices(pauses, k=random.randrange(3))]
    return happenings


def histories_of(names: list[str]) -> st.SearchStrategy[list[str]]:
    """Short ones shrink well, seeded ones get far."""
    seeds = st.integers(min_value=0, max_value=2**32)
    return st.one_of(
        st.lists(st.sampled_from(names), max_size=10),
        seeds.map(lambda seed: history(seed, names)),
    )


histories = histories_of(PLAIN)
workers = st.sampled_from([1, 1, 2, 3])


@settings(max_examples=250, deadline=None)
@given(workers, histories)
def test_it_settles_once_the_faults_are_over_and_then_nothing_is_done(
    count: int, happenings: list[str]
) -> None:
    world = world_of(count)
    run(world, happenings)
    heal(world)
    done, writes = len(world.done), world.writes
    for _ in range(3):
        world.reconcile()
        world.advance(30)
    assert len(world.done) == done, world.done[done:]
    assert world.writes == writes
    session = world.real.session
    if session is None:
        assert not [
            pod for pod in world.real.pods.values() if pod.owner_uid and pod.owner_uid != "others"
        ]
        return
    status = session.status
    own = [pod for pod in world.real.pods.values() if pod.owner_uid == session.metadata.uid]
    assert session.metadata.deletion_time_us is None, status
    if status.state in TERMINAL_STATES:
        assert not own
        assert not status.endpoint
        assert not known.is_true(status.conditions, known.QUOTA_RESERVED)
        assert world.ledger.acked == world.head or world.ledger.gaps
    else:
        assert status.state == "Running", status
        assert sorted(pod.rank or 0 for pod in own) == list(range(count))
        assert {pod.attempt for pod in own} == {status.attempt}
        assert status.endpoint


@settings(max_examples=150, deadline=None)
@given(workers, histories)
def test_a_second_pass_over_an_unchanged_world_does_and_writes_nothing(
    count: int, happenings: list[str]
) -> None:
    world = world_of(count)
    run(world, happenings)
    if world.api != "works" or world.ledger.away or world.cache is not None:
        # What fails is tried again, and a stale cache is not the world.
        return
    taken = any(pod.owner_uid == "others" for pod in world.real.pods.values())
    world.reconcile()
    done, writes, told = len(world.done), world.writes, len(world.events)
    world.reconcile()
    assert len(world.done) == done or taken
    assert (world.writes, len(world.events)) == (writes, told) or taken


@settings(max_examples=150, deadline=None)
@given(workers, histories_of(sorted(HAPPENINGS)))
def test_a_deleted_session_goes_and_leaves_no_pod_and_no_unknown_usage(
    count: int, happenings: list[str]
) -> None:
    world = world_of(count)
    run(world, [*happenings, "delete"])
    heal(world)
    assert world.real.session is None
    # Pods that others own are none of ours.
    assert {pod.owner_uid for pod in world.real.pods.values()} <= {"", "others"}


@settings(max_examples=150, deadline=None)
@given(workers, histories)
def test_a_gap_is_recorded_only_where_the_log_is_gone_or_the_time_is_over(
    count: int, happenings: list[str]
) -> None:
    world = world_of(count)
    run(world, happenings)
    heal(world)
    late = "wait 1000" in happenings or "delete" in happenings
    for gap in world.ledger.gaps:
        assert "volume lost" in happenings or late, gap
        assert gap.reason in ("VolumeLost", "FlushAbandoned")


@settings(max_examples=100, deadline=None)
@given(workers, histories)
def test_states_follow_each_other_as_they_may(count: int, happenings: list[str]) -> None:
    world = world_of(count)
    run(world, happenings)
    heal(world)
    for before, after in zip(world.states, world.states[1:], strict=False):
        assert after in MAY_FOLLOW[before], world.states


END = {"Failed", "Expired", "Deleting", "DeletionFailed"}
MAY_FOLLOW: dict[str, set[str]] = {
    "Created": {"Scheduled", "Running", "Blocked", "Stopping", "Stopped", *END},
    "Scheduled": {"Created", "Running", "Blocked", "Stopping", "Stopped", *END},
    "Running": {"Blocked", "Stopping", "Stopped", *END},
    "Blocked": {"Running", "Stopping", "Stopped", *END},
    "Stopping": {"Stopped", *END},
    "Stopped": {"Deleting", "DeletionFailed"},
    "Failed": {"Deleting", "DeletionFailed"},
    "Expired": {"Deleting", "DeletionFailed"},
    "Deleting": {"DeletionFailed"},
    "DeletionFailed": {"Deleting"},
}


def test_an_idle_session_is_not_written_in_a_day() -> None:
    world = world_of(2)
    run(world, ["wait 5", "wait 5"])
    writes, done = world.writes, len(world.done)
    for _ in range(144):
        world.advance(100)
        world.reconcile()
    assert (world.writes, len(world.done)) == (writes, done)


def test_a_start_takes_three_writes_of_the_status() -> None:
    world = world_of(1)
    run(world, ["wait 1", "wait 5"])
    assert world.states == ["Created", "Scheduled", "Running"]
    assert world.writes == 3


@pytest.mark.parametrize("seconds", [1, int(limits.NODE_LOST_S) - 1])
def test_a_node_that_is_back_in_time_keeps_its_pods(seconds: int) -> None:
    world = world_of(1)
    run(world, ["wait 5"])
    lose_node(world)
    world.advance(seconds)
    world.reconcile()
    nodes_back(world)
    world.advance(1)
    world.reconcile()
    assert world.real.session is not None
    assert world.real.session.status.attempt == 1
    assert world.now_us > seconds * SECOND_US
