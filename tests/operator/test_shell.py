"""The small parts of the shell: request rate, write budget, heartbeats, codec, routing, permissions."""

import asyncio
from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import Heartbeat, HeartbeatPage, SessionView
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.usage import Counts
from gristmill_operator.__main__ import main
from gristmill_operator.bucket import TokenBucket
from gristmill_operator.budget import WriteBudget
from gristmill_operator.cache import ObjectCache
from gristmill_operator.codec import session_from, status_patch
from gristmill_operator.heartbeats import HeartbeatStream, informs, is_news
from gristmill_operator.kinds import (
    CHILDREN,
    MODELS,
    NAMESPACES,
    NODES,
    PODS,
    SESSIONS,
    TENANTS,
    WATCHED,
    Kind,
)
from gristmill_operator.leading import SessionIndex
from gristmill_operator.permissions import complaint, missing, needed
from gristmill_operator.problems import (
    AlreadyExistsError,
    GoneError,
    QuotaError,
    QuotaExceededError,
    ThrottledError,
    problem_of,
)
from gristmill_operator.routing import all_keys, keys_for
from gristmill_operator.seams import Key
from gristmill_operator.workers import RESYNC_SLICES, slice_of
from gristmill_testing.hand_clock import HandClock, settle

# --- rates ---------------------------------------------------------------------------------------


async def test_a_burst_goes_out_at_once_and_the_rest_at_the_rate() -> None:
    clock = HandClock()
    bucket = TokenBucket(rate=50, burst=100, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    for _ in range(100):
        assert await bucket.take() == 0
    waiting = [asyncio.create_task(bucket.take()) for _ in range(50)]
    await clock.pass_slowly(0.5, step_s=0.01)
    assert sum(task.done() for task in waiting) == pytest.approx(25, abs=1)
    await clock.pass_slowly(0.6, step_s=0.01)
    assert all(task.done() for task in waiting)


def test_an_idle_bucket_saves_up_no_more_than_a_burst() -> None:
    clock = HandClock()
    bucket = TokenBucket(rate=10, burst=5, clock=clock)
    clock.pass_s(1000)
    assert [bucket.try_take() for _ in range(7)] == [True] * 5 + [False] * 2
    clock.pass_s(0.1)
    assert bucket.try_take()


def test_a_status_that_only_informs_is_written_once_a_minute() -> None:
    clock, key = HandClock(), Key("TrainingSession", "gm-a", "s")
    budget = WriteBudget(clock=clock)
    assert budget.wait_s(key) == 0
    budget.written(key)
    clock.pass_s(20)
    assert budget.wait_s(key) == pytest.approx(40)
    clock.pass_s(40)
    assert budget.wait_s(key) == 0


def test_all_sessions_together_have_ten_informative_writes_a_second() -> None:
    budget = WriteBudget(clock=HandClock())
    keys = [Key("TrainingSession", "gm-a", f"s{n}") for n in range(30)]
    assert sum(budget.wait_s(key) == 0 for key in keys) == 10


@pytest.mark.parametrize("count", [60, 6000])
def test_the_resync_is_spread_evenly(count: int) -> None:
    slices = [slice_of(Key("TrainingSession", "gm-a", f"s{n}")) for n in range(count)]
    assert set(slices) <= set(range(RESYNC_SLICES))
    assert max(slices.count(each) for each in set(slices)) <= max(8, 2 * count // RESYNC_SLICES)


# --- answers of the API server -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason", "message", "error"),
    [
        pytest.param(404, "NotFound", "pods x not found", NotFoundError, id="not found"),
        pytest.param(409, "AlreadyExists", "pods x exists", AlreadyExistsError, id="exists"),
        pytest.param(409, "Conflict", "the object has been modified", ConflictError, id="stale"),
        pytest.param(
            409,
            "Conflict",
            'Operation cannot be fulfilled on resourcequotas "q": modified',
            QuotaError,
            id="quota counted by others",
        ),
        pytest.param(403, "Forbidden", "exceeded quota: q", QuotaExceededError, id="quota full"),
        pytest.param(
            403,
            "Forbidden",
            "status unknown for quota: q, resources: pods",
            QuotaError,
            id="quota not counted",
        ),
        pytest.param(403, "Forbidden", "user x cannot create", ForbiddenError, id="forbidden"),
        pytest.param(410, "Expired", "too old", GoneError, id="gone"),
        pytest.param(422, "Invalid", "spec.x: bad", InvalidRequestError, id="invalid"),
        pytest.param(422, "Invalid", "policy p denied request: no", ForbiddenError, id="policy"),
        pytest.param(400, "", "webhook w denied the request: no", ForbiddenError, id="webhook"),
        pytest.param(500, "InternalError", "oops", UnavailableError, id="internal"),
        pytest.param(504, "Timeout", "slow", UnavailableError, id="timeout"),
    ],
)
def test_a_refusal_becomes_the_error_that_it_means(
    status: int, reason: str, message: str, error: type[GristmillError]
) -> None:
    body = f'{{"kind":"Status","reason":"{reason}","message":{message!r}}}'.replace("'", '"')
    if '"q"' in message:
        body = body.replace('"q"', '\\"q\\"')
    found = problem_of("create pods gm-a/x", status, body.encode(), None)
    assert type(found) is error
    assert "create pods gm-a/x" in found.message


def test_too_many_requests_say_when_to_come_again() -> None:
    found = problem_of("get pods x", 429, b"{}", "7")
    assert isinstance(found, ThrottledError)
    assert found.retry_after_s == 7
    assert problem_of("get pods x", 502, b"<html>bad gateway</html>", None).retryable


# --- codec ---------------------------------------------------------------------------------------


def session_body(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "gm-a",
            "name": "s",
            "uid": "u",
            "resourceVersion": "7",
            "generation": 2,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [],
        },
        "spec": {"baseModelRef": {"name": "m"}, "lora": {}},
        **({"status": status} if status else {}),
    }


def test_fields_of_a_newer_version_are_left_out_on_reading() -> None:
    body = session_body(state="Running", novelty={"x": 1})
    body["spec"]["future"] = True
    body["spec"]["lora"] = {"rank": 8, "shape": "round"}
    session = session_from(body)
    assert session.spec.lora is not None
    assert session.spec.lora.rank == 8
    assert session.status.state == "Running"


def test_a_value_of_a_newer_version_is_refused_by_name() -> None:
    body = session_body()
    body["spec"]["desiredState"] = "Hibernated"
    with pytest.raises(InvalidRequestError, match=r"gm-a/s.*desiredState.*Hibernated.*upgrade"):
        session_from(body)


def test_a_status_that_says_the_same_is_not_written() -> None:
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Ready",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    body = session_body(state="Running", conditions=[condition], novelty=1)
    assert status_patch(body, session_from(body).status) is None
    assert status_patch(session_body(), session_from(session_body()).status) is None


def test_a_status_patch_holds_what_changed_and_the_version_it_was_decided_on() -> None:
    body = session_body(state="Created", attempt=1, endpoint="http://a", usage={"train": 5})
    status = session_from(body).status
    after = status.model_copy(
        update={
            "state": "Running",
            "endpoint": "",
            "usage": status.usage.model_copy(update={"train": 9}),
        }
    )
    assert status_patch(body, after) == {
        "metadata": {"resourceVersion": "7"},
        "status": {"state": "Running", "endpoint": "", "usage": {"train": 9}},
    }


def test_the_first_status_names_the_state_though_it_is_the_default() -> None:
    """kubectl shows what is written, and knows no defaults of ours."""
    body = session_body()
    after = session_from(body).status.model_copy(update={"attempt": 1})
    patch = status_patch(body, after)
    assert patch is not None
    assert patch["status"] == {"state": "Created", "attempt": 1}


def test_what_is_no_longer_so_is_removed_from_the_status() -> None:
    body = session_body(state="Created", queue={"position": 3})
    after = session_from(body).status.model_copy(update={"queue": None})
    patch = status_patch(body, after)
    assert patch is not None
    assert patch["status"] == {"queue": None}


# --- routing -------------------------------------------------------------------------------------


def named(name: str, **more: Any) -> dict[str, Any]:
    meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", **more}
    return {"metadata": meta, "spec": {}, "status": {}}


def put_session(cache: ObjectCache, name: str, *, namespace: str = "gm-a", model: str = "m") -> Key:
    body = named(name, namespace=namespace)
    body["spec"] = {"baseModelRef": {"name": model}}
    cache.put(SESSIONS, body)
    return Key("TrainingSession", namespace, name)


@pytest.mark.parametrize("kind", CHILDREN, ids=lambda kind: kind.plural)
def test_a_change_of_a_child_is_a_change_of_its_session(kind: Kind) -> None:
    child = named("c", namespace="gm-a", labels={labels.SESSION: "s", labels.TENANT: "a"})
    assert [*keys_for(kind, None, child, ObjectCache())] == [Key("TrainingSession", "gm-a", "s")]


def test_a_tenant_that_says_something_new_concerns_its_sessions_alone() -> None:
    cache = ObjectCache()
    mine = put_session(cache, "s")
    put_session(cache, "t", namespace="gm-b")
    before, after = named("a"), named("a")
    assert set(keys_for(TENANTS, before, after, cache)) == {Key("Tenant", "", "a")}
    after["spec"] = {"suspended": True}
    assert set(keys_for(TENANTS, before, after, cache)) == {Key("Tenant", "", "a"), mine}


def test_a_model_that_becomes_ready_wakes_the_sessions_that_name_it() -> None:
    cache = ObjectCache()
    mine = put_session(cache, "s", model="m")
    put_session(cache, "t", model="other")
    after = named("m")
    after["status"] = {"conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}]}
    assert set(keys_for(MODELS, named("m"), after, cache)) == {Key("BaseModel", "", "m"), mine}


def test_a_node_concerns_what_runs_on_it_and_only_when_it_changes() -> None:
    cache = ObjectCache()
    put_session(cache, "s")
    pod = named("p", namespace="gm-a", labels={labels.SESSION: "s"})
    pod["spec"] = {"nodeName": "n"}
    cache.put(PODS, pod)

    def node(ready: str) -> dict[str, Any]:
        body = named("n")
        body["status"] = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {}}
        return body

    assert not [*keys_for(NODES, node("True"), node("True"), cache)]
    assert [*keys_for(NODES, node("True"), node("Unknown"), cache)] == [
        Key("TrainingSession", "gm-a", "s")
    ]


def test_a_namespace_that_ends_concerns_its_tenant_and_all_its_sessions() -> None:
    cache = ObjectCache()
    mine = put_session(cache, "s")
    ending = named("gm-a", labels={labels.TENANT: "a"}, deletionTimestamp="2026-01-01T00:00:00Z")
    assert set(keys_for(NAMESPACES, None, ending, cache)) == {Key("Tenant", "", "a"), mine}


def test_a_session_that_goes_makes_room_for_those_that_wait() -> None:
    cache = ObjectCache()
    waiting = put_session(cache, "waiting")
    running = put_session(cache, "running")
    gone = cache.get(SESSIONS, "gm-a", "running")
    cache.remove(SESSIONS, "gm-a", "running", "uid-running")
    assert set(keys_for(SESSIONS, gone, None, cache)) == {running, waiting}


def test_an_edited_session_concerns_its_tenant() -> None:
    cache = ObjectCache()
    cache.put(NAMESPACES, named("gm-a", labels={labels.TENANT: "a"}))
    mine = put_session(cache, "s")
    before = named("s", namespace="gm-a", generation=1)
    after = named("s", namespace="gm-a", generation=2)
    assert set(keys_for(SESSIONS, before, after, cache)) == {mine, Key("Tenant", "", "a")}
    assert set(keys_for(SESSIONS, after, after, cache)) == {mine}


def test_an_identity_belongs_to_the_older_of_two_that_claim_it() -> None:
    def claimant(name: str, born: str) -> dict[str, Any]:
        marks = {labels.SESSION_ID: "id-1"}
        return named(name, namespace="gm-a", annotations=marks, creationTimestamp=born)

    older, younger = (
        claimant("older", "2026-01-01T00:00:00Z"),
        claimant("y", "2026-02-01T00:00:00Z"),
    )
    for first, second in ((older, younger), (younger, older)):
        index = SessionIndex()
        index.take(SESSIONS, None, first)
        index.take(SESSIONS, None, second)
        assert index.keys[SessionUid("id-1")].name == "older"
        index.take(SESSIONS, younger, None)
        assert index.keys[SessionUid("id-1")].name == "older"


def test_all_that_is_reconciled_has_a_key() -> None:
    cache = ObjectCache()
    put_session(cache, "s")
    cache.put(TENANTS, named("a"))
    cache.put(MODELS, named("m"))
    assert len(list(all_keys(cache))) == 3


# --- heartbeats ----------------------------------------------------------------------------------


def beat(uid: str, *, train: int = 0, state: str = "Serving", attempt: int = 1) -> Heartbeat:
    view = SessionView(
        uid=SessionUid(uid),
        attempt=attempt,
        last_received_number=train,
        next_number=train + 1,
        missing_number=None,
        missing_since_us=None,
        state=state,  # type: ignore[arg-type]
        error=None,
        counts=Counts(train=train),
        last_activity_us=train,
    )
    return Heartbeat(
        view=view,
        tenant="a",  # type: ignore[arg-type]
        acked_seq=train,
        head_seq=train,
        snapshot_applied=0,
        worker_ready=True,
        at_us=train,
    )


class Pages:
    """Serves the pages that it was given, then holds."""

    def __init__(self, *pages: HeartbeatPage | GristmillError) -> None:
        self.pages = list(pages)
        self.asked: list[tuple[int, float]] = []

    async def heartbeats(self, after: int, wait_s: float) -> HeartbeatPage:
        self.asked.append((after, wait_s))
        if not self.pages:
            await asyncio.get_running_loop().create_future()
        page = self.pages.pop(0)
        if isinstance(page, GristmillError):
            raise page
        return page


async def test_the_stream_is_read_to_its_end_and_then_followed() -> None:
    pages = Pages(
        HeartbeatPage(heartbeats=[beat("x"), beat("y")], cursor=2),
        HeartbeatPage(heartbeats=[beat("x", train=3)], cursor=3),
    )
    clock, told = HandClock(), []
    stream = HeartbeatStream(
        source=pages, told=lambda uid, before, now: told.append(uid), clock=clock
    )
    assert stream.newest(SessionUid("x")) is None
    assert not stream.caught_up
    await stream.poll()
    assert stream.caught_up
    clock.pass_s(5)
    await stream.poll()
    newest = stream.newest(SessionUid("x"))
    assert newest is not None
    assert newest.view.counts.train == 3
    assert (stream.age_s(SessionUid("x")), stream.age_s(SessionUid("y"))) == (0, 5)
    assert told == ["x", "y", "x"]
    assert pages.asked[0] == (0, 0.0), "the first answer must not be held"
    assert pages.asked[1][0] == 2


async def test_an_absent_ledger_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(UnavailableError("away"), HeartbeatPage(heartbeats=[], cursor=0))
    stream = HeartbeatStream(source=pages, told=lambda uid, before, now: None)
    monkeypatch.setattr("gristmill_operator.heartbeats.RETRY_FIRST_S", 0.001)
    task = asyncio.create_task(stream.run())
    while not stream.caught_up:
        await settle()
    assert stream.ledger_answers
    task.cancel()


def test_tokens_only_inform_and_states_are_news() -> None:
    assert is_news(None, beat("x"))
    assert not is_news(beat("x"), beat("x", train=9))
    assert informs(beat("x"), beat("x", train=9))
    assert not informs(beat("x"), beat("x"))
    assert is_news(beat("x"), beat("x", state="Closed"))
    assert is_news(beat("x"), beat("x", attempt=2))


# --- permissions ---------------------------------------------------------------------------------


class Reviews:
    def __init__(self, *refused: tuple[str, str]) -> None:
        self.refused = refused

    async def review(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        asked = body["spec"]["resourceAttributes"]
        allowed = (asked["verb"], asked["resource"]) not in self.refused
        return {"status": {"allowed": allowed}}


async def test_each_missing_permission_is_named_and_what_to_do() -> None:
    assert await missing(Reviews(), "gristmill-system") == []
    lacking = await missing(Reviews(("watch", "pods"), ("patch", "leases")), "gristmill-system")
    text = complaint(lacking)
    assert "watch pods in all namespaces" in text
    assert (
        "patch leases.coordination.k8s.io gristmill-operator in namespace gristmill-system" in text
    )
    assert "upgrade the chart" in text


def test_every_watched_kind_is_asked_for() -> None:
    asked = {(right.resource, right.verb) for right in needed("x")}
    for kind in WATCHED:
        assert {(kind.plural, "list"), (kind.plural, "watch")} <= asked


def test_no_right_to_list_secrets_is_asked_for() -> None:
    verbs = {right.verb for right in needed("x") if right.resource == "secrets"}
    assert verbs == {"get"}


# --- the process ---------------------------------------------------------------------------------


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("LEDGER_URL", "QPS", "BURST", "WORKERS", "SWEEP_S", "METER_IMAGE"):
        assert f"GRISTMILL_OPERATOR_{name}" in text


def test_a_misspelt_setting_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRISTMILL_OPERATOR_LEDGER_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("GRISTMILL_OPERATOR_WORKRES", "3")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "GRISTMILL_OPERATOR_WORKRES" in capsys.readouterr().err
