"""In a cluster nobody gets past the gate without a secret of the cluster's key, nor further than it says."""

import base64
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gristmill_contracts.cluster_http import Directive, HeartbeatAnswer, UsageGap
from gristmill_contracts.errors import ForbiddenError, GristmillError, UnauthenticatedError
from gristmill_contracts.http import (
    PROTOCOL_HEADER,
    Empty,
    Problem,
    RegisterSession,
    TenantAccount,
)
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.secrets import attempt_secret, producer_secret, service_secret
from gristmill_ledger.app import make_app
from gristmill_ledger.auth import read_cluster_key
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.app_routes import routes_of
from gristmill_testing.ledger import (
    START_US,
    LedgerClient,
    make_batch,
    make_event,
    make_heartbeat,
    running_ledger,
)

KEY = bytes(range(32))
UID = "s-1"
NAMED = {
    "tenant": "acme",
    "uid": UID,
    "group": "g",
    "version": "1",
    "path": "b/r/f",
    "stream": "train",
    "number": "1",
}
"""What stands in a path for its names; for any other, its name."""


def all_routes() -> list[tuple[str, str]]:
    """Of the application, each with a path that could be, and one that there is not."""
    app = make_app(Ledger(LedgerSettings()))
    found = [
        (method, re.sub(r"{(\w+)}", lambda name: NAMED.get(name[1], name[1]), path))
        for method, path in sorted(routes_of(app))
        if path.startswith("/v1/") and method != "HEAD"
    ]
    return [*found, ("GET", "/no/such/route")]


ROUTES = all_routes()
METERS = {
    "/v1/producers", "/v1/usage/batches", "/v1/cloudevents", "/v1/checkpoints", "/v1/heartbeats",
    f"/v1/sessions/{UID}/inbox/claim", f"/v1/sessions/{UID}/inbox/ack", f"/v1/sessions/{UID}/archive",
}  # fmt: skip
"""Where meters may POST. Artifacts and leases are theirs too, as far as they are of their session."""


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[LedgerClient]:
    (tmp_path / "cluster.key").write_bytes(KEY)
    async with running_ledger(
        tmp_path / "data",
        cluster_key_file=tmp_path / "cluster.key",
        artifacts_dir=tmp_path / "artifacts",
    ) as client:
        for uid in (UID, "s-2"):
            message = session(uid)
            await client.as_service(KEY, "operator").ask(Empty, "POST", "/v1/sessions", message)
        yield client


def session(uid: str = UID, tenant: str = "acme") -> RegisterSession:
    return RegisterSession(
        uid=SessionUid(uid),
        tenant=TenantName(tenant),
        project="",
        name=uid,
        model="tiny",
        rank=8,
        created_us=START_US,
    )


async def refusal(client: LedgerClient, method: str, path: str, message: object = None) -> str:
    status, body = await client.call(method, path, message)
    if status == 200:
        return "answered"
    decode = msgspec.json.decode if body.startswith(b"{") else msgspec.msgpack.decode
    return decode(body, type=Problem).code


def bearer(secret: str, **others: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} | {
        f"X-Gristmill-{name.capitalize()}": value for name, value in others.items()
    }


STRANGERS = {
    "nothing": {},
    "an empty secret": bearer("", service="operator"),
    "no service of ours": bearer("x", service="worker"),
    "the key itself": bearer(base64.urlsafe_b64encode(KEY).decode(), service="operator"),
    "another service's secret": bearer(service_secret(KEY, "cli"), service="operator"),
    "another cluster's secret": bearer(service_secret(b"x" * 32, "operator"), service="operator"),
    "another attempt's secret": bearer(
        producer_secret(KEY, SessionUid(UID), 1), session=UID, attempt="2"
    ),
    "another session's secret": bearer(
        producer_secret(KEY, SessionUid("s-2"), 1), session=UID, attempt="1"
    ),
    "what the gateway shows the meter": bearer(
        attempt_secret(KEY, SessionUid(UID), 1), session=UID, attempt="1"
    ),
    "an attempt that is no number": bearer("x", session=UID, attempt="one"),
}


@pytest.mark.parametrize("headers", STRANGERS.values(), ids=STRANGERS)
async def test_a_stranger_reaches_no_route(client: LedgerClient, headers: dict[str, str]) -> None:
    client.headers = headers
    for method, path in ROUTES:
        assert await refusal(client, method, path, {}) == "unauthenticated", path


def test_the_list_of_routes_above_is_whole() -> None:
    assert len(ROUTES) > 45
    assert {
        ("POST", "/v1/leases"),
        ("PUT", "/v1/budgets/acme/name"),
        *(("POST", path) for path in METERS),
    } <= {*ROUTES}


async def test_health_and_metrics_need_no_secret(client: LedgerClient) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await client.call("GET", path))[0] == 200


async def test_every_service_is_let_in(client: LedgerClient) -> None:
    for name in ("gateway", "operator", "cli"):
        asked = client.as_service(KEY, name)
        assert (await asked.ask(TenantAccount, "PUT", "/v1/tenants/acme")).tenant == "acme"


async def test_a_meter_reaches_what_meters_need_and_nothing_else(client: LedgerClient) -> None:
    meter = client.as_meter(KEY, UID)
    await meter.register(UID)
    assert (await meter.post(UID, [make_event(1)])).acked_seq == 1
    await meter.ask(HeartbeatAnswer, "POST", "/v1/heartbeats", [make_heartbeat(UID)])
    for method, path in ROUTES:
        if (method == "POST" and path in METERS) or path.startswith(
            ("/v1/artifacts", "/v1/leases")
        ):
            continue
        assert await refusal(meter, method, path, {}) == "forbidden", (method, path)


async def test_a_meter_writes_for_its_own_session_alone(client: LedgerClient) -> None:
    meter = client.as_meter(KEY, UID)
    await client.as_meter(KEY, "s-2").register("s-2", session="s-2")
    with pytest.raises(ForbiddenError, match="s-2"):
        await meter.register("s-2", session="s-2")
    with pytest.raises(ForbiddenError, match="s-2"):
        await meter.register("s-2", session=UID)
    with pytest.raises(ForbiddenError, match="attempt 2"):
        await meter.register(UID, attempt=2)
    batch = make_batch("s-2", [make_event(1, session="s-2")])
    assert await refusal(meter, "POST", "/v1/usage/batches", batch) == "forbidden"
    for beat in (make_heartbeat("s-2"), make_heartbeat(UID, attempt=2)):
        beats = [make_heartbeat(UID), beat]
        assert await refusal(meter, "POST", "/v1/heartbeats", beats) == "forbidden"


async def test_a_meter_cannot_bill_another_tenant(client: LedgerClient) -> None:
    meter = client.as_meter(KEY, UID)
    with pytest.raises(GristmillError, match="belongs to tenant acme"):
        await meter.register(UID, tenant="rival")
    assert (await client.as_service(KEY, "cli").usage())["rows"] == []


async def test_a_meter_does_not_say_whose_its_session_is(client: LedgerClient) -> None:
    with pytest.raises(ForbiddenError, match="registers it first"):
        await client.as_meter(KEY, "s-9").register("s-9", session="s-9")
    beat = make_heartbeat(UID)
    beat.tenant = TenantName("rival")
    assert await refusal(client.as_meter(KEY, UID), "POST", "/v1/heartbeats", [beat]) == "forbidden"
    stranger = client.as_meter(KEY, "s-9")
    beats = [make_heartbeat("s-9")]
    assert await refusal(stranger, "POST", "/v1/heartbeats", beats) == "forbidden"


async def test_a_fenced_attempt_still_hands_in_what_it_released(client: LedgerClient) -> None:
    old, new = client.as_meter(KEY, UID, 1), client.as_meter(KEY, UID, 2)
    await old.register(UID)
    await new.register(UID, attempt=2)
    beats = [make_heartbeat(UID, attempt=1)]
    told = await old.ask(HeartbeatAnswer, "POST", "/v1/heartbeats", beats)
    assert told.fenced == [UID]
    late = await old.post(UID, [make_event(1)])
    assert (late.fenced, late.acked_seq) == (True, 1)
    assert (await new.post(UID, [make_event(2, producer_seq=1)])).fenced is False


async def test_prices_of_rate_cards_are_the_operators(client: LedgerClient) -> None:
    def book(name: str, start_us: int) -> PriceBook:
        prices = [
            Price(model="*", token_type=kind, micros_per_mtok=5)
            for kind in ("prefill", "cached_prefill", "sample", "train")
        ]
        return PriceBook(name=name, currency="EUR", effective_from_us=start_us, prices=prices)

    operator, cli = client.as_service(KEY, "operator"), client.as_service(KEY, "cli")
    await operator.ask(Empty, "PUT", "/v1/price-books/gold", book("gold", 1))
    with pytest.raises(ForbiddenError, match="written by the operator"):
        await cli.ask(Empty, "PUT", "/v1/price-books/gold", book("gold", 2))
    await operator.ask(Empty, "PUT", "/v1/price-books/gold", book("gold", 2))
    await cli.ask(Empty, "PUT", "/v1/price-books/mine", book("mine", 1))


async def test_without_a_key_everybody_is_trusted(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        assert (await client.ask(TenantAccount, "PUT", "/v1/tenants/acme")).tenant == "acme"
        directive = Directive(attempt=1, desired="stop")
        await client.ask(Empty, "PUT", f"/v1/sessions/{UID}/directive", directive)
        gap = UsageGap(attempt=1, acked_seq=0, head_seq=None, reason="lost", at_us=START_US)
        await client.ask(Empty, "POST", f"/v1/sessions/{UID}/gaps", gap)


@pytest.mark.parametrize("content", [b"", KEY[:31], KEY + b"\n"])
def test_a_key_of_another_size_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ValueError, match=f"has {len(content)} bytes, not 32"):
        read_cluster_key(tmp_path / "key")


@pytest.mark.parametrize(
    ("version", "code"),
    [
        (None, "answered"),
        ("0", "answered"),
        ("1", "answered"),
        ("2", "answered"),
        ("3", "invalid_request"),
        ("new", "invalid_request"),
    ],
)
async def test_neighbours_by_one_version_are_served(
    client: LedgerClient, version: str | None, code: str
) -> None:
    asked = client.as_service(KEY, "cli")
    if version is not None:
        asked.headers |= {PROTOCOL_HEADER: version}
    assert await refusal(asked, "PUT", "/v1/tenants/acme") == code
    async with client.http.get(client.url + "/healthz") as answer:
        assert answer.headers[PROTOCOL_HEADER] == "1"


async def test_a_refusal_tells_nothing_of_the_secret(client: LedgerClient) -> None:
    client.headers = bearer("guess", service="operator")
    with pytest.raises(UnauthenticatedError) as refused:
        await client.ask(TenantAccount, "PUT", "/v1/tenants/acme")
    assert service_secret(KEY, "operator") not in str(refused.value)
