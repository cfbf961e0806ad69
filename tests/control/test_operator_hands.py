"""The planner's actions carried out on a real API server, with the rights of the shipped ServiceAccount."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
)
from gristmill_contracts.session import TrainingSession
from gristmill_operator.children.volume import KEPT_UNTIL
from gristmill_operator.place import NameTakenError
from gristmill_operator.problems import QuotaExceededError
from gristmill_sessions.cluster import PodRef
from gristmill_sessions.observed import (
    Adopt,
    DeletePods,
    DeleteSession,
    Drain,
    KeepVolume,
    Place,
    RecordGap,
    Register,
    Release,
    RemoveDrainJob,
    RemoveVolume,
    StartDrainJob,
)
from gristmill_testing.cluster import WRITES, Cluster
from gristmill_testing.operator_bench import Bench, clear_away, operator_bench
from gristmill_testing.operator_world import ACCOUNT, install_chart, model, session, tenant

TENANT = "hands"
NAMESPACE = "gm-hands"


@pytest.fixture(scope="module")
def chart(control_cluster: Cluster) -> Iterator[Cluster]:
    install_chart(control_cluster)
    control_cluster.apply(tenant(TENANT))
    control_cluster.apply(model("tiny"))
    yield control_cluster
    clear_away(control_cluster, TENANT, NAMESPACE)


@pytest.fixture
async def bench(chart: Cluster) -> AsyncIterator[Bench]:
    """A Ready tenant and a model."""
    async with operator_bench(chart) as made:
        for _ in range(50):
            await made.tenant(TENANT)
            status = chart.get("tenant", TENANT).get("status", {})
            if {"type": "Ready", "status": "True"} in [
                {"type": each["type"], "status": each["status"]}
                for each in status.get("conditions", [])
            ]:
                break
        await made.model("tiny")
        yield made


async def adopted(bench: Bench, name: str, **spec: Any) -> TrainingSession:
    """A session whose first attempt was claimed."""
    bench.cluster.apply(session(name, NAMESPACE, **spec))
    await bench.look()
    await bench.hands.do(await bench.session(NAMESPACE, name), Adopt())
    found = await bench.session(NAMESPACE, name)
    return await bench.set_status(found, attempt=1)


async def placed(bench: Bench, name: str, **spec: Any) -> TrainingSession:
    found = await adopted(bench, name, **spec)
    await bench.look()
    await bench.hands.do(found, Place(1))
    await bench.look()
    return found


def pods(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    return cluster.objects("pods", NAMESPACE, f"{labels.SESSION}={name}")


async def test_adopt_stamps_identity_tenant_and_finalizer(bench: Bench) -> None:
    found = await adopted(bench, "adopt")
    meta = found.metadata
    assert meta.finalizers == [labels.METERING_FLUSH]
    assert meta.annotations[labels.SESSION_ID] == meta.uid
    assert meta.labels[labels.TENANT] == TENANT


async def test_adopt_with_an_old_version_changes_nothing(bench: Bench) -> None:
    """A finalizer that somebody added meanwhile must not be lost."""
    bench.cluster.apply(session("stale", NAMESPACE))
    await bench.look()
    old = await bench.session(NAMESPACE, "stale")
    bench.cluster.kubectl(
        "patch", "trainingsession", "stale", f"--namespace={NAMESPACE}", "--type=merge",
        '--patch={"metadata":{"finalizers":["example.com/theirs"]}}',
    )  # fmt: skip
    with pytest.raises(ConflictError):
        await bench.hands.do(old, Adopt())
    await bench.hands.do(await bench.session(NAMESPACE, "stale"), Adopt())
    found = await bench.session(NAMESPACE, "stale")
    assert found.metadata.finalizers == ["example.com/theirs", labels.METERING_FLUSH]
    bench.cluster.kubectl(
        "patch", "trainingsession", "stale", f"--namespace={NAMESPACE}", "--type=merge",
        f'--patch={{"metadata":{{"finalizers":["{labels.METERING_FLUSH}"]}}}}',
    )  # fmt: skip


async def test_place_makes_all_children_and_the_restricted_level_takes_them(bench: Bench) -> None:
    cluster = bench.cluster
    found = await placed(bench, "one")
    made = pods(cluster, "one")
    assert [each["metadata"]["name"] for each in made] == ["one-a1-0"]
    assert made[0]["metadata"]["ownerReferences"][0]["uid"] == found.metadata.uid
    assert cluster.get("secret", "one-a1", NAMESPACE)["immutable"] is True
    claim = cluster.get("pvc", "one-state", NAMESPACE)
    assert claim["metadata"]["ownerReferences"][0]["uid"] == found.metadata.uid
    assert cluster.find("service", "one", NAMESPACE) is None


async def test_placing_again_writes_no_child(bench: Bench) -> None:
    found = await placed(bench, "again", workers=2)
    mark = bench.cluster.audit_mark()
    await bench.hands.do(found, Place(1))
    done = [
        (each["verb"], each["objectRef"]["resource"], each["responseStatus"]["code"])
        for each in bench.cluster.audit(mark, user=ACCOUNT, verbs=WRITES)
    ]
    changed = [each for each in done if each[2] != 409]
    # The policy is written as it is, for nobody watches policies.
    assert changed == [("patch", "networkpolicies", 200)]


async def test_two_ranks_get_names_and_a_mesh_of_their_own(bench: Bench) -> None:
    cluster = bench.cluster
    await placed(bench, "two", workers=2)
    assert {each["metadata"]["name"] for each in pods(cluster, "two")} == {"two-a1-0", "two-a1-1"}
    assert cluster.get("service", "two", NAMESPACE)["spec"]["clusterIP"] == "None"
    mesh = cluster.get("networkpolicy", "two-mesh", NAMESPACE)["spec"]
    assert mesh["podSelector"] == {"matchLabels": {labels.SESSION: "two"}}


async def test_a_session_that_has_moved_on_is_not_placed(bench: Bench) -> None:
    found = await adopted(bench, "moved")
    await bench.look()
    await bench.set_status(found, attempt=2)
    with pytest.raises(ConflictError, match="at attempt 2, not 1"):
        await bench.hands.do(found, Place(1))
    bench.cluster.kubectl(
        "delete", "trainingsession", "moved", f"--namespace={NAMESPACE}", "--wait=false"
    )
    with pytest.raises(ConflictError, match="is deleted"):
        await bench.hands.do(found, Place(2))
    assert pods(bench.cluster, "moved") == []


async def test_no_second_attempt_beside_a_pod_of_the_first(bench: Bench) -> None:
    """One volume has one writer, whatever the cache says."""
    first = await placed(bench, "fence")
    second = await bench.set_status(first, attempt=2)
    uid = pods(bench.cluster, "fence")[0]["metadata"]["uid"]
    bench.cache.remove(_pods_kind(), NAMESPACE, "fence-a1-0", uid)
    with pytest.raises(ConflictError, match="fence-a1-0 of an earlier attempt"):
        await bench.hands.do(second, Place(2))
    assert len(pods(bench.cluster, "fence")) == 1
    await bench.hands.do(second, Place(2, beside=(uid,)))
    assert {each["metadata"]["name"] for each in pods(bench.cluster, "fence")} == {
        "fence-a1-0",
        "fence-a2-0",
    }


def _pods_kind() -> Any:
    from gristmill_operator.kinds import PODS

    return PODS


async def test_a_quota_without_room_is_told_in_the_apis_words(bench: Bench) -> None:
    """G20, G28."""
    cluster = bench.cluster
    cluster.apply(tenant(TENANT, quota={"cpu": "10m"}))
    await bench.tenant(TENANT)
    try:
        found = await adopted(bench, "full")
        await bench.look()
        with pytest.raises(QuotaExceededError):
            await bench.hands.do(found, Place(1))
        failure = bench.observe(found).cluster
        assert failure is not None
        assert failure.failure is not None
        assert failure.failure.reason == "QuotaExceeded"
        assert "exceeded quota: gristmill, requested: requests.cpu=200m" in failure.failure.message
    finally:
        cluster.apply(tenant(TENANT))
        await bench.tenant(TENANT)
    await bench.hands.do(found, Place(1))
    assert bench.memory.refused == {}


async def test_a_pod_that_admission_refuses_is_told_in_its_words(bench: Bench) -> None:
    found = await adopted(bench, "refused", priorityClassName="nope")
    await bench.look()
    with pytest.raises(ForbiddenError):
        await bench.hands.do(found, Place(1))
    failure = bench.memory.refused[found.metadata.uid]
    assert failure.reason == "Refused"
    assert "no PriorityClass with name nope was found" in failure.message


async def test_a_name_that_is_taken_is_told_and_nothing_is_overwritten(bench: Bench) -> None:
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "taken-state", "namespace": NAMESPACE, "labels": {labels.MANAGED_BY: labels.MANAGER}},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    bench.cluster.apply(claim)
    found = await adopted(bench, "taken")
    await bench.look()
    with pytest.raises(NameTakenError, match="taken-state was not made for this session"):
        await bench.hands.do(found, Place(1))
    assert bench.memory.refused[found.metadata.uid].reason == "NameTaken"
    assert pods(bench.cluster, "taken") == []


async def test_register_tells_the_ledger_who_pays_and_by_which_prices(bench: Bench) -> None:
    found = await adopted(bench, "books", rateCardRef={"name": "standard"})
    await bench.look()
    await bench.hands.do(found, Register())
    told = bench.ledger.sessions[-1]
    assert (told.tenant, told.name, told.price_book) == (TENANT, "books", "standard")
    assert bench.observe(found).registered


async def test_a_ledger_that_refuses_a_session_is_not_asked_for_ever(bench: Bench) -> None:
    found = await adopted(bench, "refusedbooks")
    bench.ledger.refusal = ConflictError("session is of tenant 'other'")
    with pytest.raises(ForbiddenError, match="of tenant 'other'"):
        await bench.hands.do(found, Register())
    assert not bench.observe(found).registered


async def test_drain_and_gap_reach_the_ledger(bench: Bench) -> None:
    found = await adopted(bench, "ending")
    await bench.look()
    await bench.hands.do(found, Drain())
    await bench.hands.do(
        found, RecordGap(attempt=1, acked_seq=3, head_seq=None, reason="no volume")
    )
    uid, directive = bench.ledger.directives[-1]
    assert (uid, directive.attempt, directive.desired) == (found.metadata.uid, 1, "stop")
    assert bench.ledger.gaps[-1][1].reason == "no volume"
    seen = bench.observe(found).cluster
    assert seen is not None
    assert seen.directive_given
    assert seen.gap_recorded
    later = found.model_copy(update={"status": found.status.model_copy(update={"attempt": 2})})
    again = bench.observe(later).cluster
    assert again is not None
    assert not again.directive_given
    assert not again.gap_recorded


async def test_pods_are_deleted_by_uid_alone(bench: Bench) -> None:
    found = await placed(bench, "byuid")
    about = pods(bench.cluster, "byuid")[0]["metadata"]
    other = PodRef(name=about["name"], uid="00000000-0000-4000-8000-000000000000")
    await bench.hands.do(found, DeletePods(pods=(other,)))
    assert "deletionTimestamp" not in pods(bench.cluster, "byuid")[0]["metadata"]
    ref = PodRef(name=about["name"], uid=about["uid"])
    await bench.hands.do(found, DeletePods(pods=(ref,), force=True))
    assert pods(bench.cluster, "byuid") == []
    await bench.hands.do(found, DeletePods(pods=(ref,)))


async def test_a_drain_job_is_made_once_and_removed(bench: Bench) -> None:
    found = await placed(bench, "drained")
    await bench.hands.do(found, StartDrainJob(attempt=1))
    await bench.hands.do(found, StartDrainJob(attempt=1))
    await bench.look()
    seen = bench.observe(found).cluster
    assert seen is not None
    assert seen.job is not None
    assert (seen.job.name, seen.job.attempt, seen.job.state) == ("drained-drain-a1", 1, "Running")
    assert [each.name for each in seen.pods] == ["drained-a1-0"]
    await bench.hands.do(found, RemoveDrainJob(name=seen.job.name, uid=seen.job.uid))
    await bench.look()
    after = bench.observe(found).cluster
    assert after is not None
    assert after.job is None


async def test_a_log_is_shipped_though_model_and_tenant_are_gone(bench: Bench) -> None:
    bench.cluster.apply(model("gone", profiles=[{"name": "default"}]))
    found = await placed(bench, "orphan", baseModelRef={"name": "gone"})
    bench.cluster.kubectl("delete", "basemodel", "gone")
    bench.cluster.kubectl("delete", "secret", "orphan-a1", f"--namespace={NAMESPACE}")
    await bench.look()
    await bench.hands.do(found, StartDrainJob(attempt=1))
    assert bench.cluster.find("job", "orphan-drain-a1", NAMESPACE) is not None
    assert bench.cluster.find("secret", "orphan-a1", NAMESPACE) is not None


async def test_a_kept_volume_outlives_the_session_until_its_time(bench: Bench) -> None:
    found = await placed(bench, "kept")
    await bench.hands.do(found, KeepVolume(unflushed=False))
    await bench.hands.do(found, DeleteSession())
    await bench.hands.do(found, Release())
    bench.cluster.wait_gone("trainingsession", "kept", NAMESPACE)
    claim = bench.cluster.get("pvc", "kept-state", NAMESPACE)["metadata"]
    assert "ownerReferences" not in claim
    await bench.tenant(TENANT)
    assert bench.cluster.find("pvc", "kept-state", NAMESPACE) is not None
    bench.now_us += 604_800_000_000 + 1_000_000
    await bench.tenant(TENANT)
    gone = bench.cluster.find("pvc", "kept-state", NAMESPACE)
    assert gone is None or "deletionTimestamp" in gone["metadata"]


async def test_a_kept_volume_is_not_lost_to_a_later_session_that_keeps_nothing(
    bench: Bench,
) -> None:
    """Of the same name: it uses the volume, and what the first one was promised stays."""
    found = await placed(bench, "heir", storage={"size": "1Gi", "retain": "Delete"})
    until = "2031-01-01T00:00:00Z"
    bench.cluster.kubectl(
        "patch", "pvc", "heir-state", f"--namespace={NAMESPACE}", "--type=merge",
        f'--patch={{"metadata":{{"ownerReferences":null,"annotations":{{"{KEPT_UNTIL}":"{until}"}}}}}}',
    )  # fmt: skip
    again = await bench.set_status(found, attempt=1)
    await bench.look()
    await bench.hands.do(again, Place(1))
    await bench.look()
    await bench.hands.do(found, RemoveVolume())
    claim = bench.cluster.get("pvc", "heir-state", NAMESPACE)["metadata"]
    assert "deletionTimestamp" not in claim
    assert "ownerReferences" not in claim
    assert claim["annotations"][KEPT_UNTIL] == until


async def test_a_volume_with_usage_that_nobody_has_is_never_removed(bench: Bench) -> None:
    found = await placed(bench, "holding")
    await bench.hands.do(found, KeepVolume(unflushed=True))
    await bench.look()
    await bench.hands.do(found, RemoveVolume())
    claim = bench.cluster.get("pvc", "holding-state", NAMESPACE)["metadata"]
    assert "deletionTimestamp" not in claim
    assert "ownerReferences" not in claim
    # Nor by a later session of the same name, nor when that is placed.
    again = await bench.set_status(found, attempt=1)
    await bench.look()
    await bench.hands.do(again, Place(1))
    after = bench.cluster.get("pvc", "holding-state", NAMESPACE)["metadata"]
    assert after["labels"][labels.UNFLUSHED] == "true"
    assert "ownerReferences" not in after


async def test_a_volume_grows_and_never_shrinks(bench: Bench) -> None:
    found = await placed(bench, "grow", storage={"size": "2Gi", "retain": "Delete"})
    smaller = found.model_copy(
        update={
            "spec": found.spec.model_copy(
                update={"storage": found.spec.storage.model_copy(update={"size": "1Gi"})}
            )
        }
    )
    await bench.hands.do(smaller, Place(1))
    claim = bench.cluster.get("pvc", "grow-state", NAMESPACE)
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"


async def test_release_takes_our_finalizer_alone(bench: Bench) -> None:
    found = await adopted(bench, "release")
    meta = replace_finalizers(found, ["example.com/theirs", labels.METERING_FLUSH])
    bench.cluster.kubectl(
        "patch", "trainingsession", "release", f"--namespace={NAMESPACE}", "--type=merge",
        f'--patch={{"metadata":{{"finalizers":["example.com/theirs","{labels.METERING_FLUSH}"]}}}}',
    )  # fmt: skip
    with pytest.raises(GristmillError):
        await bench.hands.do(found, Release())
    await bench.hands.do(meta, Release())
    assert (await bench.session(NAMESPACE, "release")).metadata.finalizers == ["example.com/theirs"]
    bench.cluster.kubectl(
        "patch", "trainingsession", "release", f"--namespace={NAMESPACE}", "--type=merge",
        '--patch={"metadata":{"finalizers":null}}',
    )  # fmt: skip


def replace_finalizers(session: TrainingSession, finalizers: list[str]) -> TrainingSession:
    meta = session.metadata.model_copy(update={"finalizers": finalizers})
    return session.model_copy(update={"metadata": meta})


async def test_a_profile_that_the_tenant_loses_is_closed_to_running_sessions(bench: Bench) -> None:
    cluster = bench.cluster
    profiles = [{"name": "hub", "cidrs": ["203.0.113.0/24"]}]
    cluster.apply(tenant(TENANT, network={"egressProfiles": profiles}))
    await bench.tenant(TENANT)
    try:
        await placed(bench, "egress", egressProfiles=["hub"], workers=2)
        spec = cluster.get("networkpolicy", "egress-egress", NAMESPACE)["spec"]
        assert spec["egress"] == [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]
        cluster.kubectl("delete", "networkpolicy", "egress-mesh", f"--namespace={NAMESPACE}")
        await bench.tenant(TENANT)
        assert cluster.find("networkpolicy", "egress-mesh", NAMESPACE) is not None
    finally:
        cluster.apply(tenant(TENANT))
        await bench.tenant(TENANT)
    assert cluster.find("networkpolicy", "egress-egress", NAMESPACE) is None
    assert cluster.find("networkpolicy", "egress-mesh", NAMESPACE) is not None


async def test_the_volume_of_a_running_session_grows_where_its_class_lets_it(bench: Bench) -> None:
    await placed(bench, "larger")
    cluster = bench.cluster
    cluster.kubectl(
        "patch", "trainingsession", "larger", f"--namespace={NAMESPACE}", "--type=merge",
        '--patch={"spec":{"storage":{"size":"2Gi"}}}',
    )  # fmt: skip
    await bench.tenant(TENANT)
    # Nothing provisions here, so that the API server takes no growth; it is told, and all else goes on.
    assert "VolumeNotGrown" in bench.recorder.reasons
    ready = cluster.get("tenant", TENANT)["status"]["conditions"]
    assert {"Ready": "True"}.items() <= {each["type"]: each["status"] for each in ready}.items()
