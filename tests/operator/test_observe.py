"""What the caches and heartbeats tell of a session, in the planner's words. No API server: a cache that is filled."""

from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.resources import Condition, Resource
from gristmill_contracts.session import PinnedStatus, TrainingSession
from gristmill_operator.cache import ObjectCache
from gristmill_operator.kinds import (
    CARDS,
    CLAIMS,
    JOBS,
    MODELS,
    NAMESPACES,
    NODES,
    PODS,
    SESSIONS,
    TENANTS,
    Kind,
)
from gristmill_operator.memory import Memory
from gristmill_operator.observe import ClusterObserver
from gristmill_sessions.cluster import ApiFailure, Cluster
from gristmill_testing.cluster_objects import (
    METER_IMAGE,
    SESSION_UID,
    WORKER_IMAGE,
    a_card,
    a_model,
    a_session,
    a_tenant,
    operator_settings,
)
from gristmill_testing.operator_bench import NoHeartbeats

NOW_US = 1_790_000_000_000_000
READY = [{"type": "Ready", "status": "True", "reason": "Ready"}]


class World:
    """A cache with a Ready tenant, its namespace and a Ready model; `put` adds to it."""

    def __init__(self) -> None:
        self.cache, self.memory, self.version = ObjectCache(), Memory(), 0
        self.eyes = ClusterObserver(
            cache=self.cache,
            heartbeats=NoHeartbeats(),
            settings=operator_settings(),
            memory=self.memory,
        )
        self.put(TENANTS, self.body(a_tenant(), conditions=READY))
        self.put(MODELS, self.body(a_model(), conditions=READY))
        marks = {labels.TENANT: "acme", labels.TENANT_UID: "tenant-uid-1"}
        self.put(NAMESPACES, {"metadata": {"name": "gm-acme", "uid": "ns-1", "annotations": marks}})

    def put(self, kind: Kind, body: dict[str, Any]) -> None:
        self.version += 1
        meta = {**body["metadata"], "resourceVersion": str(self.version)}
        self.cache.put(kind, {**body, "metadata": meta})

    @staticmethod
    def body(resource: Resource, **status: Any) -> dict[str, Any]:
        made = resource.model_dump(mode="json", by_alias=True)
        return {**made, "status": status}

    def look(self, session: TrainingSession | None = None) -> Cluster:
        found = self.eyes.observe(session or a_session(), error="", now_us=NOW_US).cluster
        assert found is not None
        return found

    def pod(self, name: str = "run-a1-0", *, node: str = "", **meta: Any) -> None:
        known = {
            labels.MANAGED_BY: labels.MANAGER, labels.SESSION: "run", labels.ATTEMPT: "1", labels.RANK: "0",
            "app.kubernetes.io/component": "worker",
        }  # fmt: skip
        owner = [{"uid": SESSION_UID, "kind": "TrainingSession", "controller": True}]
        about = {
            "name": name, "namespace": "gm-acme", "uid": f"uid-{name}", "labels": known,
            "ownerReferences": owner, **meta,
        }  # fmt: skip
        self.put(PODS, {"metadata": about, "spec": {"nodeName": node}, "status": {}})


def test_tenant_and_model_that_are_ready() -> None:
    seen = World().look()
    assert (seen.tenant.name, seen.tenant.found, seen.tenant.ready) == ("acme", True, True)
    assert (seen.model.found, seen.model.ready, seen.model.allowed) == (True, True, True)


@pytest.mark.parametrize(
    "marks",
    [
        pytest.param({}, id="no mark"),
        pytest.param({labels.TENANT: "other", labels.TENANT_UID: "x"}, id="another's"),
        pytest.param(
            {labels.TENANT: "acme", labels.TENANT_UID: "older"}, id="of an earlier tenant"
        ),
    ],
)
def test_a_session_cannot_choose_its_tenant_by_a_label(marks: dict[str, str]) -> None:
    """Only the mark of its namespace counts."""
    world = World()
    world.put(NAMESPACES, {"metadata": {"name": "gm-acme", "uid": "ns-1", "annotations": marks}})
    session = a_session()
    assert session.metadata.labels[labels.TENANT] == "acme"
    seen = world.look(session)
    assert not seen.tenant.found
    assert "belongs to no tenant" in seen.tenant.message


def test_pins_are_what_would_be_pinned_now_whatever_was_pinned_before() -> None:
    world = World()
    world.put(CARDS, world.body(a_card()))
    session = a_session(rate_card_ref={"name": "standard"})
    fresh = world.look(session).pins
    assert (fresh.image, fresh.meter_image) == (WORKER_IMAGE, METER_IMAGE)
    assert (fresh.base_model_uid, fresh.rate_card_uid) == ("model-uid-1", "card-uid-1")
    old = PinnedStatus(image="old@1", meter_image="old@2", template_hash="old")
    status = session.status.model_copy(update={"pinned": old})
    assert world.look(session.model_copy(update={"status": status})).pins == fresh
    other = a_model(image=WORKER_IMAGE.replace("a" * 64, "d" * 64))
    meta = other.metadata.model_copy(update={"generation": 2})
    world.put(MODELS, world.body(other.model_copy(update={"metadata": meta}), conditions=READY))
    assert world.look(session).pins.image == other.spec.image


def test_a_rate_card_that_is_named_and_not_there_is_missed() -> None:
    world = World()
    asks = a_session(rate_card_ref={"name": "standard"})
    assert world.look(asks).tenant.rate_card_missing == "standard"
    assert world.look().tenant.rate_card_missing == ""
    world.put(TENANTS, world.body(a_tenant(rateCardRef={"name": "dear"}), conditions=READY))
    assert world.look().tenant.rate_card_missing == "dear"
    world.put(CARDS, world.body(a_card()))
    assert world.look(asks).tenant.rate_card_missing == ""


def test_pods_of_the_label_whoever_made_them_but_not_those_of_a_drain_job() -> None:
    world = World()
    world.pod()
    world.pod("theirs", ownerReferences=[])
    drain = {labels.SESSION: "run", labels.RANK: "0", "app.kubernetes.io/component": "drain"}
    world.pod("run-drain-a1-x", labels=drain)
    found = {pod.name: pod.owner_uid for pod in world.look().pods}
    assert found == {"run-a1-0": SESSION_UID, "theirs": ""}


def test_a_node_that_is_gone_is_lost_since_it_was_first_missed() -> None:
    world = World()
    world.pod(node="n9")
    first = world.look().pods[0]
    assert (first.node_gone, first.node_lost_since_us) == (True, NOW_US)
    later = world.eyes.observe(a_session(), error="", now_us=NOW_US + 5).cluster
    assert later is not None
    assert later.pods[0].node_lost_since_us == NOW_US
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {}}
    world.put(NODES, {"metadata": {"name": "n9", "uid": "n"}, "spec": {}, "status": ready})
    assert world.look().pods[0].node_lost_since_us is None
    assert world.memory.nodes_missed == {}


def waiting(name: str, created: int) -> TrainingSession:
    found = a_session(name)
    meta = found.metadata.model_copy(update={"uid": f"uid-{name}", "creation_time_us": created})
    return found.model_copy(update={"metadata": meta})


def test_one_place_is_given_to_one_session_though_nobody_has_written_it_down() -> None:
    world = World()
    world.put(TENANTS, world.body(a_tenant(quota={"maxRunning": 1}), conditions=READY))
    first, second = waiting("first", 1_000_000), waiting("second", 2_000_000)
    for each in (first, second):
        world.put(SESSIONS, world.body(each))
    assert world.look(second).tenant.position == 1
    assert world.look(first).tenant.position is None
    assert world.look(first).tenant.position is None
    assert world.look(second).tenant.position == 1
    assert world.look(first).tenant.max_running == 1


def test_a_place_is_given_on_when_its_session_is_refused_or_never_takes_it() -> None:
    world = World()
    world.put(TENANTS, world.body(a_tenant(quota={"maxRunning": 1}), conditions=READY))
    first, second = waiting("first", 1_000_000), waiting("second", 2_000_000)
    for each in (first, second):
        world.put(SESSIONS, world.body(each))
    assert world.look(first).tenant.position is None
    refusal = Condition(type="Accepted", status="False", reason="ModelNotFound")
    status = first.status.model_copy(update={"conditions": [refusal]})
    refused = first.model_copy(update={"status": status})
    world.put(
        SESSIONS, world.body(refused, conditions=[refusal.model_dump(mode="json", by_alias=True)])
    )
    assert world.look(second).tenant.position == 1
    later = world.eyes.observe(second, error="", now_us=NOW_US + 31_000_000).cluster
    assert later is not None
    assert later.tenant.position is None
    world.memory.places.clear()
    world.memory.places["uid-first"] = NOW_US + 1
    world.look(refused)
    assert world.look(second).tenant.position is None


def test_what_the_operator_remembers_is_of_the_present_attempt() -> None:
    world = World()
    world.memory.registered.add(SESSION_UID)
    world.memory.directives[SESSION_UID] = 2
    world.memory.gaps[SESSION_UID] = 2
    failure = ApiFailure(reason="Refused", message="no")
    world.memory.refused[SESSION_UID] = failure
    session = a_session()
    at = {
        attempt: world.look(
            session.model_copy(
                update={"status": session.status.model_copy(update={"attempt": attempt})}
            )
        )
        for attempt in (0, 1, 2)
    }
    assert [at[n].directive_given for n in (0, 1, 2)] == [False, False, True]
    assert [at[n].gap_recorded for n in (0, 1, 2)] == [False, False, True]
    assert at[1].failure == failure
    assert world.eyes.observe(session, error="", now_us=NOW_US).registered
    world.memory.forget(SESSION_UID)
    assert world.memory == Memory()


def test_the_volume_and_whether_it_is_the_sessions() -> None:
    world = World()
    assert not world.look().volume.found
    meta = {
        "name": "run-state", "namespace": "gm-acme", "uid": "pvc",
        "labels": {labels.SESSION: "run", labels.UNFLUSHED: "true"},
        "ownerReferences": [{"uid": SESSION_UID, "kind": "TrainingSession", "controller": True}],
    }  # fmt: skip
    world.put(CLAIMS, {"metadata": meta, "spec": {}})
    seen = world.look().volume
    assert (seen.found, seen.owned, seen.unflushed, seen.deleting) == (True, True, True, False)


def test_weights_of_the_hub_are_waited_for_in_this_tenants_namespace() -> None:
    world = World()
    world.put(
        MODELS, world.body(a_model(weights={"hubRef": {"repository": "a/b"}}), conditions=READY)
    )
    assert "about to be fetched" in world.look().model.message
    failed = {"type": "Failed", "status": "True", "message": "no such repository"}
    about = {"name": "gm-fetch-tiny", "namespace": "gm-acme", "uid": "job"}
    world.put(JOBS, {"metadata": about, "status": {"conditions": [failed]}})
    seen = world.look().model
    assert not seen.ready
    assert "no such repository" in seen.message


def test_a_model_that_is_not_ready_says_why() -> None:
    world = World()
    why = [{"type": "Ready", "status": "False", "reason": "X", "message": "its image is missing"}]
    world.put(MODELS, world.body(a_model(), conditions=why))
    assert world.look().model.message == "its image is missing"
    path = a_model(weights={"path": "/srv"})
    world.put(MODELS, world.body(path, conditions=READY))
    assert "weights.pvc" in world.look().model.message
