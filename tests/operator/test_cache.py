"""The cache: older news are dropped, what is gone stays gone, children are found by their session."""

import random
from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import BaseModelRef, TrainingSession, TrainingSessionSpec
from gristmill_operator.cache import ObjectCache, session_of
from gristmill_operator.expectations import EXPECTED_S, Expectations, Expected
from gristmill_operator.kinds import NODES, PODS, SESSIONS
from gristmill_testing.hand_clock import HandClock


def pod(name: str, version: int, uid: str = "", **more: Any) -> dict[str, Any]:
    meta = {"namespace": "gm-a", "name": name, "uid": uid or f"uid-{name}", **more}
    return {
        "metadata": {**meta, "resourceVersion": str(version)},
        "status": {"phase": str(version)},
    }


def session(name: str = "s", uid: str = "uid-s") -> TrainingSession:
    return TrainingSession(
        metadata=Metadata(name=name, namespace="gm-a", uid=uid),
        spec=TrainingSessionSpec(base_model_ref=BaseModelRef(name="m")),
    )


def owned(
    name: str, owner: str, *, kind: str = "TrainingSession", label: str = "s"
) -> dict[str, Any]:
    version = "gristmill.dev/v1alpha1" if kind == "TrainingSession" else "batch/v1"
    reference = {"kind": kind, "apiVersion": version, "name": "s", "uid": owner, "controller": True}
    return pod(name, 1, labels={labels.SESSION: label}, ownerReferences=[reference])


def test_what_is_older_than_what_is_known_is_dropped() -> None:
    cache = ObjectCache()
    assert cache.put(PODS, pod("p", 9))
    assert not cache.put(PODS, pod("p", 10 - 2))
    assert not cache.put(PODS, pod("p", 9)), "the same news twice are no news"
    assert cache.put(PODS, pod("p", 10)), "versions are numbers, not texts"
    known = cache.get(PODS, "gm-a", "p")
    assert known is not None
    assert known["status"]["phase"] == "10"


def test_what_is_told_of_an_object_after_its_end_is_dropped() -> None:
    cache = ObjectCache()
    cache.put(PODS, pod("p", 5))
    assert cache.remove(PODS, "gm-a", "p", "uid-p")
    assert not cache.put(PODS, pod("p", 6))
    assert cache.get(PODS, "gm-a", "p") is None


def test_the_end_of_an_object_does_not_remove_the_next_one_of_its_name() -> None:
    cache = ObjectCache()
    cache.put(PODS, pod("p", 5, uid="old"))
    cache.put(PODS, pod("p", 8, uid="new"))
    assert cache.by_uid(PODS, "old") is None
    assert not cache.remove(PODS, "gm-a", "p", "old")
    assert cache.get(PODS, "gm-a", "p") is not None


@pytest.mark.parametrize("seed", range(20))
def test_reordered_and_repeated_news_lead_to_the_same_end(seed: int) -> None:
    """Any order of any number of copies of the news of two incarnations; the last word is the newest."""
    news = [pod("p", version, uid="old") for version in range(1, 6)]
    news += [pod("p", version, uid="new") for version in range(10, 15)]
    chosen = random.Random(seed)
    told = news + chosen.choices(news, k=20)
    chosen.shuffle(told)
    cache = ObjectCache()
    for body in told:
        cache.put(PODS, body)
    known = cache.get(PODS, "gm-a", "p")
    assert known is not None
    assert known["metadata"]["resourceVersion"] == "14"
    assert cache.uids(PODS) == {"new"}


def test_children_are_those_of_this_incarnation_of_the_session() -> None:
    cache = ObjectCache()
    for body in (
        owned("mine", "uid-s"),
        owned("of-an-older-one", "uid-older"),
        owned("of-its-job", "uid-job", kind="Job"),
        owned("elsewhere", "uid-s", label="t"),
        pod("unowned", 1, labels={labels.SESSION: "s"}),
        pod("unlabelled", 1),
    ):
        cache.put(PODS, body)
    names = {body["metadata"]["name"] for body in cache.children(PODS, session())}
    assert names == {"mine", "of-its-job", "unowned"}
    everybody = cache.children(PODS, session(), foreign=True)
    assert len(everybody) == 4


def test_a_removed_child_is_found_no_more() -> None:
    cache = ObjectCache()
    cache.put(PODS, owned("mine", "uid-s"))
    cache.remove(PODS, "gm-a", "mine", "uid-mine")
    assert cache.children(PODS, session()) == []
    assert cache.list(PODS, "gm-a") == []


def test_the_owner_counts_and_not_the_label() -> None:
    body = owned("p", "uid-s", label="claimed")
    assert session_of(body) == "s"
    body["metadata"]["ownerReferences"][0]["kind"] = "ReplicaSet"
    assert session_of(body) == ""


def test_only_what_is_read_is_kept() -> None:
    cache = ObjectCache()
    body = pod("p", 1, managedFields=[{"manager": "x"}], annotations={"a": "b"})
    body["spec"] = {"nodeName": "n", "containers": [{"name": "worker", "image": "x" * 500}]}
    body["status"]["containerStatuses"] = [{"name": "worker", "ready": True, "image": "y"}]
    cache.put(PODS, body)
    known = cache.get(PODS, "gm-a", "p")
    assert known is not None
    assert "managedFields" not in known["metadata"]
    assert known["spec"] == {"nodeName": "n"}
    assert known["status"]["containerStatuses"] == [{"name": "worker", "ready": True}]
    assert "managedFields" in body["metadata"], "the original is left as it is"


def test_a_beat_of_the_kubelet_leaves_a_node_as_it_is() -> None:
    def node(version: int, beat: str) -> dict[str, Any]:
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": beat}
        meta = {"name": "n", "uid": "u", "resourceVersion": str(version)}
        return {"metadata": meta, "status": {"conditions": [ready], "allocatable": {"cpu": "2"}}}

    cache = ObjectCache()
    cache.put(NODES, node(1, "10:00"))
    before = cache.get(NODES, "", "n")
    cache.put(NODES, node(2, "10:05"))
    after = cache.get(NODES, "", "n")
    assert before is not None
    assert after is not None
    assert before["status"] == after["status"]


# --- expectations --------------------------------------------------------------------------------

OWNER = ("gm-a", "s")


def test_a_created_object_is_expected_until_it_is_seen() -> None:
    cache, clock = ObjectCache(), HandClock()
    expectations = Expectations(cache=cache, clock=clock)
    expectations.expect(OWNER, Expected(kind=PODS, namespace="gm-a", name="p"))
    assert expectations.unseen(OWNER)
    assert not expectations.unseen(("gm-a", "other"))
    cache.put(PODS, pod("p", 1))
    assert not expectations.unseen(OWNER)


def test_a_deleted_object_is_expected_until_it_is_gone_or_on_its_way() -> None:
    cache, clock = ObjectCache(), HandClock()
    expectations = Expectations(cache=cache, clock=clock)
    cache.put(PODS, pod("p", 1))
    expected = Expected(kind=PODS, namespace="gm-a", name="p", gone_uid="uid-p")
    expectations.expect(OWNER, expected)
    assert expectations.unseen(OWNER)
    cache.put(PODS, pod("p", 2, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert not expectations.unseen(OWNER)


def test_what_does_not_come_is_not_waited_for_for_ever() -> None:
    clock = HandClock()
    expectations = Expectations(cache=ObjectCache(), clock=clock)
    expectations.expect(OWNER, Expected(kind=SESSIONS, namespace="gm-a", name="p"))
    clock.pass_s(EXPECTED_S - 1)
    assert expectations.unseen(OWNER)
    clock.pass_s(2)
    assert not expectations.unseen(OWNER)
