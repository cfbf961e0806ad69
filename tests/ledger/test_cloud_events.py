"""Usage as CloudEvents: what a meter's batch would have done, and strict where a batch is strict."""

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts.body_crc import CRC_HEADER, crc_of
from gristmill_contracts.http import Empty, Problem, ProducerCursor, RegisterSession
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_ledger import schema
from gristmill_ledger.cloud_events import BATCHED, STRUCTURED, UsageData
from gristmill_testing.ledger import (
    START_US,
    LedgerClient,
    make_batch,
    make_event,
    running_ledger,
)
from gristmill_testing.ledger_store import stored_rows

SAME_EACH_TIME = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""Examples that do not depend on the day, nor on how busy the machine is."""
PATH = "/v1/cloudevents"
KEY = bytes(range(32))
Fields = dict[str, Any]
"""An event as JSON."""


@pytest.fixture
async def client(migrated_url: str, tmp_path: Path) -> AsyncIterator[LedgerClient]:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await client.register("s-1")
        yield client


def as_cloud_event(event: UsageEvent, *, source: str = "s-1", epoch: int = 1) -> Fields:
    """The event as its producer would tell it to anybody."""
    data = msgspec.to_builtins(event)
    return {
        "specversion": "1.0",
        "id": data.pop("event_id"),
        "source": source,
        "type": f"dev.gristmill.{data.pop('kind')}.v1",
        "subject": data.pop("tenant"),
        "time": "2025-11-30T00:00:00Z",
        "epoch": epoch,
        "sequence": str(data.pop("producer_seq")),
        "datacontenttype": "application/json",
        "data": {name: data[name] for name in UsageData.__struct_fields__},
    }


def changed(event: Fields, **changes: Any) -> Fields:
    """With other values at a path as `data__counts__train`; None stays null, ... leaves the field out."""
    made: Fields = json.loads(json.dumps(event))
    for path, value in changes.items():
        *outer, last = path.split("__")
        at = made
        for name in outer:
            at = at[name]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return made


async def send(client: LedgerClient, content: object, content_type: str = "") -> tuple[int, Fields]:
    """Status and answer. Content types follow from what is sent, unless told."""
    kind = content_type or (BATCHED if isinstance(content, list) else STRUCTURED)
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = client.headers | {"Content-Type": kind}
    async with client.http.post(client.url + PATH, data=body, headers=headers) as response:
        assert response.content_type == "application/json"
        return response.status, json.loads(await response.read())


async def sent(client: LedgerClient, *events: UsageEvent, **source: Any) -> ProducerCursor:
    status, answer = await send(client, [as_cloud_event(each, **source) for each in events])
    assert status == 200, answer
    return msgspec.convert(answer, ProducerCursor)


def dump(client: LedgerClient) -> str:
    """Everything that came in, as a hash."""
    tables = {
        name: stored_rows(client.ledger.database, name)
        for name in ("usage_event", "producer", "dead_letter", "tenant_head")
        if name in schema.metadata.tables
    }
    return hashlib.sha256(repr(tables).encode()).hexdigest()


async def refused(
    client: LedgerClient, content: object, content_type: str = ""
) -> tuple[int, Problem]:
    before = dump(client)
    status, answer = await send(client, content, content_type)
    assert 400 <= status < 500, answer
    assert dump(client) == before
    return status, msgspec.convert(answer, Problem)


async def test_one_event_in_structured_mode_is_stored(client: LedgerClient) -> None:
    event = make_event(1, project="rl", key="AKIA1", lease="l-1", kind="attempt", n=1)
    status, answer = await send(client, as_cloud_event(event))
    assert (status, answer) == (200, {"producer": "s-1", "acked_seq": 1, "fenced": False})
    (row,) = stored_rows(client.ledger.database)
    names = ("event_id", "kind", "n", "tenant", "session", "stream", "number", "operation", "model")
    others = ("project", "key", "lease", "outcome", "attempt", "op_start_us", "op_end_us")
    for name in (*names, *others):
        assert row[name] == getattr(event, name), name
    assert (row["producer"], row["producer_seq"]) == ("s-1", 1)
    assert (row["prefill"], row["cached_prefill"], row["sample"], row["train"]) == (10, 20, 5, 0)


async def test_what_the_official_sdk_makes_is_read(client: LedgerClient) -> None:
    """Bytes of `cloudevents.core.bindings.http.to_structured_event`, version 2.2.0."""
    body = (
        b'{"id": "16c2c3dd-34f7-591c-b153-6b4cc36071e9", "source": "s-1", "type": "dev.gristmill.usage.v1", '
        b'"specversion": "1.0", "subject": "acme", "time": "2025-11-30T00:00:00Z", "datacontenttype": '
        b'"application/json", "epoch": 1, "sequence": "1", "data": {"session": "s-1", "stream": "log", "number": 1, '
        b'"operation": "sample", "model": "tiny", "attempt": 1, "outcome": "completed", "counts": {"prefill": 10, '
        b'"cached_prefill": 20, "sample": 5, "train": 0}, "op_start_us": 1764460800000001, "op_end_us": '
        b"1764460800000002}}"
    )
    assert (await send(client, body, "application/cloudevents+json"))[0] == 200
    await client.post("s-1", [make_event(1)])
    assert len(stored_rows(client.ledger.database)) == 1
    assert stored_rows(client.ledger.database, "dead_letter") == []


async def test_both_ways_in_tell_the_same_facts(client: LedgerClient) -> None:
    events = [make_event(1), make_event(2, counts=None), make_event(3, counts=Counts())]
    assert (await client.post("s-1", events)).acked_seq == 3
    assert (await sent(client, *events)).acked_seq == 3
    others = [make_event(4), make_event(5, counts=None)]
    assert (await sent(client, *others)).acked_seq == 5
    assert (await client.post("s-1", others)).acked_seq == 5
    rows = stored_rows(client.ledger.database)
    assert [row["seq"] for row in rows] == [1, 2, 3, 4, 5]
    assert stored_rows(client.ledger.database, "dead_letter") == []


async def test_a_batch_is_stored_whole_and_in_order(client: LedgerClient) -> None:
    events = [make_event(n) for n in range(1, limits.BATCH_EVENTS_MAX + 1)]
    assert (await sent(client, *events)).acked_seq == limits.BATCH_EVENTS_MAX
    rows = stored_rows(client.ledger.database)
    assert [row["number"] for row in rows] == list(range(1, limits.BATCH_EVENTS_MAX + 1))


@pytest.mark.parametrize("epoch", [1, "1", "0000000000000000000000000000001"])
async def test_extensions_that_count_are_numbers_or_text(
    client: LedgerClient, epoch: int | str
) -> None:
    event = changed(as_cloud_event(make_event(1)), epoch=epoch, sequence=1)
    assert (await send(client, event))[0] == 200


async def test_what_others_add_passes_unread(client: LedgerClient) -> None:
    event = as_cloud_event(make_event(1)) | {"traceparent": "00-1-2-3", "dataschema": "x:y"}
    assert (await send(client, event))[0] == 200


@pytest.mark.parametrize(
    "content_type", [f"{BATCHED}; charset=utf-8", "Application/CloudEvents-Batch+JSON"]
)
async def test_content_types_are_read_as_http_says(client: LedgerClient, content_type: str) -> None:
    status, _ = await send(client, [as_cloud_event(make_event(1))], content_type)
    assert status == 200


async def test_unknown_usage_stays_unknown(client: LedgerClient) -> None:
    told = as_cloud_event(make_event(1))
    events = [changed(told, data__counts=...), as_cloud_event(make_event(2, counts=None))]
    assert (await send(client, events))[0] == 200
    for row in stored_rows(client.ledger.database):
        assert (row["completeness"], row["prefill"], row["train"]) == ("unknown", None, None)


def one(**changes: Any) -> Callable[[], object]:
    return lambda: changed(as_cloud_event(make_event(1)), **changes)


def raw(body: bytes) -> Callable[[], object]:
    return lambda: body


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(one(specversion="0.3"), "specversion", id="another version"),
        pytest.param(one(specversion=...), "specversion", id="no version"),
        pytest.param(one(id=...), "`id`", id="no id"),
        pytest.param(one(id=""), "event_id is empty", id="empty id"),
        pytest.param(one(id=7), "$.id", id="a number for an id"),
        pytest.param(one(source=""), "producer is empty", id="no producer"),
        pytest.param(one(source="a\0b"), "NUL", id="NUL in the producer"),
        pytest.param(one(subject=...), "`subject`", id="no tenant"),
        pytest.param(one(subject="rival"), "'rival'", id="another tenant"),
        pytest.param(one(type="dev.gristmill.void.v1"), "'dev.gristmill.void.v1'", id="a void"),
        pytest.param(one(type="com.example.usage"), "'com.example.usage'", id="unknown type"),
        pytest.param(one(datacontenttype="text/xml"), "'text/xml'", id="no JSON inside"),
        pytest.param(one(epoch=...), "`epoch`", id="no epoch"),
        pytest.param(one(epoch="one"), "epoch is 'one'", id="epoch of letters"),
        pytest.param(one(epoch=""), "epoch is ''", id="empty epoch"),
        pytest.param(one(epoch=-1), "epoch is -1", id="negative epoch"),
        pytest.param(one(epoch=True), "$.epoch", id="a truth for an epoch"),
        pytest.param(one(sequence="0"), "first_seq is 0", id="numbers begin at 1"),
        pytest.param(one(sequence=str(2**63)), "sequence is", id="sequence beyond 2^63 - 1"),
        pytest.param(one(sequence=2**63), "producer_seq is", id="the same as a number"),
        pytest.param(one(data=...), "`data`", id="no data"),
        pytest.param(one(data__numer=1), "numer", id="misspelt field"),
        pytest.param(one(data__corrects="x"), "corrects", id="a correction"),
        pytest.param(one(data__stream="other"), "stream", id="unknown stream"),
        pytest.param(one(data__outcome="lost"), "outcome", id="unknown outcome"),
        pytest.param(one(data__counts__train=-1), "counts.train is -1", id="negative"),
        pytest.param(one(data__counts__train=2**63), "counts.train", id="beyond 2^63 - 1"),
        pytest.param(one(data__counts__train=1.5), "train", id="half a token"),
        pytest.param(one(data__counts__train=...), "`train`", id="a count left out is not 0"),
        pytest.param(one(data__counts__decode=1), "decode", id="misspelt count"),
        pytest.param(one(data__counts=[]), "counts", id="a list for counts"),
        pytest.param(one(data__model=""), "events[0].model is empty", id="no model"),
        pytest.param(raw(b""), "no CloudEvents", id="no body"),
        pytest.param(raw(b"{"), "no CloudEvents", id="torn"),
        pytest.param(raw(b"\xff\xfe{}"), "no CloudEvents", id="not UTF-8"),
        pytest.param(raw(b"[" * 100_000), "no CloudEvents", id="nested without end"),
        pytest.param(lambda: [], "no event", id="empty batch"),
        pytest.param(
            lambda: [as_cloud_event(make_event(n)) for n in (1, 3)], "contiguous", id="a hole"
        ),
        pytest.param(
            lambda: [as_cloud_event(make_event(n), source=f"s-{n}") for n in (1, 2)],
            "send each producer's apart", id="two producers",
        ),
        pytest.param(
            lambda: [as_cloud_event(make_event(n), epoch=n) for n in (1, 2)],
            "send each producer's apart", id="two epochs",
        ),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_whole(
    client: LedgerClient, content: Callable[[], object], words: str
) -> None:
    status, problem = await refused(client, content())
    assert (status, problem.code) == (400, "invalid_request")
    assert words in problem.message


@pytest.mark.parametrize("content_type", ["application/json", "application/msgpack", "x" * 300])
async def test_another_content_type_is_told_the_right_ones(
    client: LedgerClient, content_type: str
) -> None:
    event = as_cloud_event(make_event(1))
    status, problem = await refused(client, event, content_type)
    assert (status, problem.code) == (400, "invalid_request")
    assert (STRUCTURED in problem.message, BATCHED in problem.message) == (True, True)


async def test_a_wrong_crc_is_told_and_the_right_one_is_taken(client: LedgerClient) -> None:
    body = json.dumps(as_cloud_event(make_event(1))).encode()
    careful = replace(client, headers={CRC_HEADER: crc_of(body)})
    status, problem = await refused(careful, body.replace(b'"sample": 5', b'"sample": 7'))
    assert (status, problem.code, problem.retryable) == (400, "torn", True)
    assert (await send(careful, body))[0] == 200
    assert [row["sample"] for row in stored_rows(client.ledger.database)] == [5]


async def test_too_many_events_are_refused(client: LedgerClient) -> None:
    event = as_cloud_event(make_event(1))
    status, problem = await refused(client, [event] * (limits.BATCH_EVENTS_MAX + 1))
    assert (status, problem.code) == (413, "too_large")


async def test_refusals_are_those_of_batches(client: LedgerClient) -> None:
    await client.register("s-2", session="s-2", epoch=3)
    for producer, epoch, event in (
        ("s-1", 1, make_event(5)),  # a gap
        ("s-9", 1, make_event(1)),  # nobody registered it
        ("s-1", 2, make_event(1)),  # another log
        ("s-1", 1, make_event(1, tenant="rival")),
        ("s-1", 1, make_event(1, operation="")),
    ):
        status, body = await client.call(
            "POST", "/v1/usage/batches", make_batch(producer, [event], epoch=epoch)
        )
        told = msgspec.msgpack.decode(body, type=Problem)
        found = await refused(client, as_cloud_event(event, source=producer, epoch=epoch))
        assert found == (status, told)


async def test_another_payload_of_a_known_id_becomes_a_dead_letter(client: LedgerClient) -> None:
    await sent(client, make_event(1))
    forged = make_event(1, producer_seq=2, counts=Counts(sample=9999))
    assert (await sent(client, forged)).acked_seq == 2
    assert len(stored_rows(client.ledger.database)) == 1
    (letter,) = stored_rows(client.ledger.database, "dead_letter")
    assert msgspec.msgpack.decode(letter["body"], type=UsageEvent) == forged


async def test_an_older_log_is_told_that_it_is_fenced(client: LedgerClient) -> None:
    await client.register("s-1", epoch=2, attempt=2)
    assert (await sent(client, make_event(7), epoch=1)).fenced


async def test_a_secret_is_asked_for_as_with_batches(tmp_path: Path) -> None:
    (tmp_path / "cluster.key").write_bytes(KEY)
    async with running_ledger(
        tmp_path / "data", cluster_key_file=tmp_path / "cluster.key"
    ) as client:
        for uid in ("s-1", "s-2"):
            session = RegisterSession(
                uid=SessionUid(uid), tenant=TenantName("acme"), project="", name=uid, model="tiny", rank=8,
                created_us=START_US,
            )  # fmt: skip
            await client.as_service(KEY, "operator").ask(Empty, "POST", "/v1/sessions", session)
        meter = client.as_meter(KEY, "s-1")
        await meter.register("s-1")
        event = as_cloud_event(make_event(1))
        for caller, status, code in (
            (client, 401, "unauthenticated"),
            (client.as_meter(b"x" * 32, "s-1"), 401, "unauthenticated"),
            (client.as_meter(KEY, "s-2"), 403, "forbidden"),
        ):
            found, problem = await refused(caller, event)
            assert (found, problem.code) == (status, code)
        assert (await sent(meter, make_event(1))).acked_seq == 1
        assert (await sent(client.as_service(KEY, "gateway"), make_event(2))).acked_seq == 2


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ("specversion", "id", "source", "type", "subject", "epoch", "sequence", "data")
DATA = (
    "n", "session", "stream", "number", "operation", "model", "attempt", "outcome", "counts", "op_start_us",
    "op_end_us",
)  # fmt: skip
edges = st.sampled_from([0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -1, "", "0", "\ud800"])


@settings(SAME_EACH_TIME, max_examples=60)
@given(
    outer=st.dictionaries(st.sampled_from(FIELDS), anything | edges, max_size=2),
    inner=st.dictionaries(st.sampled_from(DATA), anything | edges, max_size=2),
    batched=st.booleans(),
)
async def test_no_event_makes_the_ledger_fail(
    client: LedgerClient, outer: Fields, inner: Fields, batched: bool
) -> None:
    event = as_cloud_event(make_event(1))
    event = event | {"data": event["data"] | inner} | outer
    status, answer = await send(client, [event] if batched else event)
    assert status in (200, 400, 404, 409), answer


@settings(SAME_EACH_TIME, max_examples=40)
@given(body=st.binary() | anything.map(lambda value: json.dumps(value).encode()))
async def test_no_body_makes_the_ledger_fail(client: LedgerClient, body: bytes) -> None:
    for kind in (STRUCTURED, BATCHED):
        status, answer = await send(client, body, kind)
        assert status == 400, answer
