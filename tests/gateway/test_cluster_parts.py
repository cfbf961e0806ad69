"""The small parts that decide in a cluster: whose namespace, who may, who waits, which host, which protocol."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gristmill_contracts import labels, limits, secrets
from gristmill_contracts.conditions import condition
from gristmill_contracts.errors import ForbiddenError, LogFullError, UnavailableError
from gristmill_contracts.http import PROTOCOL_HEADER, PROTOCOL_VERSION
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import (
    BaseModelRef,
    TrainingSession,
    TrainingSessionSpec,
    TrainingSessionStatus,
)
from gristmill_contracts.tenant import Tenant, TenantKey, TenantSpec, TenantStatus
from gristmill_gateway.directory import Endpoint
from gristmill_gateway.front import signed_request
from gristmill_gateway.kubernetes import access_keys, endpoint_of, owners_of
from gristmill_gateway.kubernetes_access import KubernetesAccess
from gristmill_gateway.ledger_client import service_headers
from gristmill_gateway.meter_client import MeterClient
from gristmill_gateway.tenancy import namespaces_of
from gristmill_gateway.waiting_room import WaitingRoom
from gristmill_testing.loopback_server import serve

KEY = bytes(range(32))
UID = SessionUid("11111111-2222-4333-8444-555555555555")


def tenant(name: str, created: int = 1, namespace: str = "", **condition_: Any) -> Tenant:
    said = (
        condition("NamespaceReady", condition_["status"], condition_["reason"])
        if condition_
        else None
    )
    return Tenant(
        metadata=Metadata(name=name, namespace="", uid=f"uid-{name}", creation_time_us=created),
        spec=TenantSpec(namespace=namespace, keys=[TenantKey(name="main")]),
        status=TenantStatus(conditions=[said] if said else []),
    )


# --- tenants -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tenants", "found"),
    [
        ([tenant("a"), tenant("b", namespace="elsewhere")], {"a": "gm-a", "b": "elsewhere"}),
        ([tenant("b", 1, "x"), tenant("a", 2, "x")], {"b": "x"}),
        ([tenant("a", 1, "x"), tenant("b", 2, "x", status=True, reason="Ready")], {"b": "x"}),
        (
            [tenant("a", 1, "x", status=False, reason="NamespaceForeign"), tenant("b", 2, "x")],
            {"b": "x"},
        ),
        ([tenant("a", status=False, reason="Creating")], {"a": "gm-a"}),
        ([tenant("a", 2, "gm-b"), tenant("b", 1)], {"b": "gm-b"}),
    ],
)
def test_a_namespace_is_one_tenants(tenants: list[Tenant], found: dict[str, str]) -> None:
    assert namespaces_of(tenants) == found


def test_keys_follow_from_tenants_and_the_cluster_key() -> None:
    (key,) = access_keys([tenant("a"), tenant("thief", 2, "gm-a")], KEY)
    assert key.spec.access_key_id == secrets.access_key_id("uid-a", "main")
    assert key.spec.secret_access_key == secrets.access_key_secret(KEY, key.spec.access_key_id)
    assert key.spec.service_account == "system:serviceaccount:gm-a:gm-client"
    assert (key.spec.tenant, key.spec.revoked_us) == ("a", None)


def test_a_recreated_tenant_has_other_keys() -> None:
    again = tenant("a")
    again = again.model_copy(
        update={"metadata": again.metadata.model_copy(update={"uid": "another"})}
    )
    before, after = access_keys([tenant("a")], KEY), access_keys([again], KEY)
    assert before[0].spec.access_key_id != after[0].spec.access_key_id


def test_an_endpoints_secret_is_of_the_durable_identity_and_the_attempt() -> None:
    session = TrainingSession(
        metadata=Metadata(
            name="run-1",
            namespace="gm-a",
            uid="object",
            annotations={"gristmill.dev/session-id": UID},
        ),
        spec=TrainingSessionSpec(base_model_ref=BaseModelRef(name="tiny")),
        status=TrainingSessionStatus(attempt=3, endpoint="http://10.0.0.1:8470"),
    )
    found = endpoint_of(session, KEY).spec
    assert found.secret == secrets.attempt_secret(KEY, UID, 3)
    assert (found.session_uid, found.attempt) == (UID, 3)


def test_an_identity_that_is_used_twice_is_the_older_sessions() -> None:
    def one(name: str, namespace: str, created: int) -> TrainingSession:
        meta = Metadata(
            name=name,
            namespace=namespace,
            uid=f"{namespace}/{name}",
            creation_time_us=created,
            annotations={labels.SESSION_ID: UID},
        )
        spec = TrainingSessionSpec(base_model_ref=BaseModelRef(name="tiny"))
        return TrainingSession(metadata=meta, spec=spec)

    assert owners_of([one("run", "gm-a", 1), one("run", "gm-thief", 2)]) == {UID: "gm-a/run"}


# --- who may -------------------------------------------------------------------------------------


class Reviews:
    """Answers access reviews: `create` alone is allowed."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.down = False
        self.hangs = False

    async def create(self, _path: str, content: dict[str, Any]) -> dict[str, Any]:
        if self.down:
            raise UnavailableError("the API server did not answer")
        self.asked.append(content["spec"])
        if self.hangs:
            await asyncio.Event().wait()
        verb = content["spec"]["resourceAttributes"]["verb"]
        return {"status": {"allowed": verb == "create", "reason": "RBAC says so"}}


async def test_an_answer_holds_for_a_moment_and_is_then_asked_for_again() -> None:
    reviews, now = Reviews(), [0.0]
    access = KubernetesAccess(reviews, lambda: now[0])  # type: ignore[arg-type]
    account = "system:serviceaccount:gm-a:gm-client"
    for _ in range(5):
        await access.check(account, "create", "gm-a")
    now[0] = limits.ACCESS_KEPT_S - 0.1
    await access.check(account, "create", "gm-a")
    assert len(reviews.asked) == 1
    now[0] = limits.ACCESS_KEPT_S
    await access.check(account, "create", "gm-a")
    assert len(reviews.asked) == 2
    assert reviews.asked[0] == {
        "user": account,
        "groups": ["system:serviceaccounts", "system:serviceaccounts:gm-a", "system:authenticated"],
        "resourceAttributes": {
            "namespace": "gm-a",
            "verb": "create",
            "group": "gristmill.dev",
            "resource": "trainingsessions",
            "name": "",
        },
    }


async def test_a_refusal_names_who_what_where_why_and_the_remedy() -> None:
    access = KubernetesAccess(Reviews())  # type: ignore[arg-type]
    with pytest.raises(ForbiddenError) as caught:
        await access.check("system:serviceaccount:gm-a:bot", "delete", "gm-a", "run-1")
    assert caught.value.message == (
        "User: system:serviceaccount:gm-a:bot is not authorized to delete "
        "trainingsessions.gristmill.dev in namespace 'gm-a' (RBAC says so); let it with `kubectl -n gm-a "
        "create rolebinding bot-sessions --clusterrole=gristmill-editor --serviceaccount=gm-a:bot`"
    )


async def test_no_answer_is_neither_yes_nor_no_and_is_not_remembered() -> None:
    reviews = Reviews()
    access = KubernetesAccess(reviews)  # type: ignore[arg-type]
    reviews.down = True
    with pytest.raises(UnavailableError):
        await access.check("system:serviceaccount:gm-a:bot", "create", "gm-a")
    reviews.down = False
    await access.check("system:serviceaccount:gm-a:bot", "create", "gm-a")


async def test_a_lasting_yes_outlives_an_api_server_that_is_away_and_a_no_does_not() -> None:
    reviews, now = Reviews(), [0.0]
    access = KubernetesAccess(reviews, lambda: now[0])  # type: ignore[arg-type]
    who = ("system:serviceaccount:gm-a:bot", "create", "gm-a")
    await access.check(*who, lasting=True)  # type: ignore[arg-type]
    now[0] = limits.ACCESS_LASTING_S - 1
    await access.check(*who, lasting=True)  # type: ignore[arg-type]
    assert len(reviews.asked) == 1
    reviews.down = True
    now[0] = 100 * limits.ACCESS_LASTING_S
    await access.check(*who, lasting=True)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError):
        await access.check(*who)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError):
        await access.check("system:serviceaccount:gm-a:bot", "update", "gm-a", lasting=True)


async def test_work_does_not_wait_for_an_api_server_that_hangs() -> None:
    reviews, now = Reviews(), [0.0]
    access = KubernetesAccess(reviews, lambda: now[0])  # type: ignore[arg-type]
    who = ("system:serviceaccount:gm-a:bot", "create", "gm-a")
    await access.check(*who, lasting=True)  # type: ignore[arg-type]
    reviews.hangs = True
    now[0] = 2 * limits.ACCESS_LASTING_S
    async with asyncio.timeout(5):
        for _ in range(20):
            await access.check(*who, lasting=True)  # type: ignore[arg-type]


async def test_a_question_that_many_have_at_once_is_asked_once() -> None:
    reviews = Reviews()
    access = KubernetesAccess(reviews)  # type: ignore[arg-type]
    account = "system:serviceaccount:gm-a:bot"
    await asyncio.gather(*(access.check(account, "create", "gm-a") for _ in range(50)))
    assert len(reviews.asked) == 1


async def test_answers_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ACCESS_KEPT_MAX", 3)
    reviews = Reviews()
    access = KubernetesAccess(reviews)  # type: ignore[arg-type]
    for number in [*range(10), 9, 8, 7, 0]:
        await access.check("system:serviceaccount:gm-a:bot", "create", f"gm-{number}")
    assert len(reviews.asked) == 11


# --- who waits -----------------------------------------------------------------------------------


def failing(
    times: int, error: type[UnavailableError] = UnavailableError
) -> Callable[[], Awaitable[str]]:
    """A call that fails so often, and then gives `done`."""
    left = [times]

    async def call() -> str:
        if left[0]:
            left[0] -= 1
            raise error("not served")
        return "done"

    return call


async def yes() -> bool:
    return True


async def test_a_call_is_made_again_until_somebody_serves() -> None:
    room = WaitingRoom(10.0, asyncio.Event())
    assert await room.served(UID, failing(3), yes) == "done"
    assert room.total == 0


async def test_the_wait_has_an_end() -> None:
    room = WaitingRoom(0.25, asyncio.Event())
    with pytest.raises(UnavailableError, match="not served"):
        await room.served(UID, failing(10**6), yes)


async def test_what_waiting_does_not_cure_is_told_at_once() -> None:
    room = WaitingRoom(10.0, asyncio.Event())
    async with asyncio.timeout(2):
        with pytest.raises(LogFullError):
            await room.served(UID, failing(1, LogFullError), yes)


async def test_a_wish_to_end_lets_everybody_go() -> None:
    draining = asyncio.Event()
    room = WaitingRoom(30.0, draining)
    tasks = [asyncio.create_task(room.served(UID, failing(10**6), yes)) for _ in range(5)]
    async with asyncio.timeout(5):
        while room.total < 5:
            await asyncio.sleep(0)
        draining.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, UnavailableError) for each in results)


async def test_places_are_bounded_by_session_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELD_SUBMITS_PER_SESSION_MAX", 2)
    monkeypatch.setattr(limits, "HELD_SUBMITS_MAX", 3)
    draining = asyncio.Event()
    room = WaitingRoom(30.0, draining)

    def enter(name: str) -> asyncio.Task[str]:
        return asyncio.create_task(room.served(SessionUid(name), failing(10**6), yes))

    async with asyncio.timeout(5):
        waiting = [enter("a"), enter("a"), enter("b")]
        while room.total < 3:
            await asyncio.sleep(0)
        for name in ("a", "c"):
            with pytest.raises(UnavailableError):
                await enter(name)
        assert room.total == 3
        draining.set()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert room.total == 0


# --- hosts and protocols -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trusted", "forwarded", "host"),
    [
        (False, "public.example", "inside:8450"),
        (True, "public.example", "public.example"),
        (True, "public.example, proxy.example", "public.example"),
        (True, "", "inside:8450"),
    ],
)
def test_the_forwarded_host_counts_only_where_it_is_trusted(
    trusted: bool, forwarded: str, host: str
) -> None:
    headers = [(b"host", b"inside:8450"), (b"x-forwarded-host", forwarded.encode())]
    scope = {
        "type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers,
    }  # fmt: skip
    request = signed_request(Request(scope), trust_forwarded_host=trusted)
    assert request.value("host") == host


def test_the_ledger_is_shown_the_gateways_secret_where_there_is_a_cluster_key() -> None:
    assert service_headers(None) == {}
    assert service_headers(KEY) == {
        "Authorization": f"Bearer {secrets.service_secret(KEY, 'gateway')}",
        "X-Gristmill-Service": "gateway",
    }


@pytest.mark.parametrize(
    ("said", "served"),
    [
        (None, True),
        (PROTOCOL_VERSION - 1, True),
        (PROTOCOL_VERSION, True),
        (PROTOCOL_VERSION + 2, False),
    ],
)
async def test_meters_of_this_version_and_the_one_before_are_served(
    said: int | None, served: bool
) -> None:
    heard: list[str | None] = []

    def answer(request: Request) -> Response:
        heard.append(request.headers.get(PROTOCOL_HEADER))
        headers = {} if said is None else {PROTOCOL_HEADER: str(said)}
        return Response(b"", 404, headers)

    app = Starlette(routes=[Route("/v1/sessions/{uid}", answer)])
    with serve(app) as url:
        async with aiohttp.ClientSession() as http:
            endpoint = Endpoint(session=UID, url=url, secret="s", attempt=1)
            with pytest.raises(UnavailableError) as caught:
                await MeterClient(http).view(endpoint)
    assert heard == [str(PROTOCOL_VERSION)]
    assert ("of the protocol" in caught.value.message) is not served
