"""Bad input over HTTP: a 4xx with a stable code, a message that names what is wrong, no change."""

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts import metrics as names
from gristmill_contracts.body_crc import CRC_HEADER, crc_of
from gristmill_contracts.http import Empty, Problem
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger import schema
from gristmill_ledger.wire import JSON_PATHS
from gristmill_testing.ledger import (
    LedgerClient,
    make_batch,
    make_event,
    make_heartbeat,
    running_ledger,
)  # fmt: skip
from gristmill_testing.ledger_store import stored_rows

ROUTES = (
    ("POST", "/v1/producers"),
    ("POST", "/v1/usage/batches"),
    ("POST", "/v1/heartbeats"),
    ("POST", "/v1/sessions"),
    ("POST", "/v1/checkpoints"),
    ("POST", "/v1/checkpoint-groups"),
    ("PUT", "/v1/price-books/own"),
)
SAME_EACH_TIME = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""Examples that do not depend on the day, nor on how busy the machine is."""
PRODUCER = {"producer": "p", "tenant": "acme", "session": "s-1", "epoch": 1, "attempt": 1,
            "head_seq": 0}  # fmt: skip


@pytest.fixture
async def client(migrated_url: str, tmp_path: Path) -> AsyncIterator[LedgerClient]:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await client.register("p")
        await client.post("p", [make_event(1)])
        await client.ledger.follower.catch_up()  # Its rows would come between two dumps.
        yield client


def dump(client: LedgerClient) -> str:
    """Everything that is stored, as a hash."""

    tables = {name: stored_rows(client.ledger.database, name) for name in schema.metadata.tables}
    return hashlib.sha256(repr(tables).encode()).hexdigest()


async def refused(
    client: LedgerClient, method: str, path: str, message: object = None
) -> tuple[int, Problem]:
    """Status and problem of a request that must be refused and change nothing."""
    before = dump(client)
    status, body = await client.call(method, path, message)
    assert 400 <= status < 500, body
    as_json = path.partition("?")[0] in JSON_PATHS
    problem = (msgspec.json if as_json else msgspec.msgpack).decode(body, type=Problem)
    assert dump(client) == before
    return status, problem


def as_fields(message: object, change: Callable[[Any], None]) -> object:
    """A message as plain maps and lists, changed past what its type allows."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    change(fields)
    return fields


def first_event(**changes: Any) -> object:
    """A batch whose first event has other fields."""

    def change(batch: Any) -> None:
        batch["events"][0].update(changes)

    return as_fields(make_batch("p", [make_event(2)]), change)


def batch(**changes: Any) -> object:
    return as_fields(make_batch("p", [make_event(2)]), lambda fields: fields.update(changes))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(batch(first_seq=0), "first_seq is 0", id="numbers begin at 1"),
        pytest.param(batch(first_seq=-1), "first_seq is -1", id="negative first_seq"),
        pytest.param(batch(first_seq=1), "producer_seq is 2, not 1", id="not contiguous"),
        pytest.param(batch(first_seq="2"), "first_seq", id="text for a number"),
        pytest.param(batch(first_seq=2.0), "first_seq", id="float for a number"),
        pytest.param(batch(epoch=-1), "epoch is -1", id="negative epoch"),
        pytest.param(batch(epoch=None), "epoch", id="null epoch"),
        pytest.param(batch(events=[]), "no event", id="empty batch"),
        pytest.param(batch(producer=""), "producer is empty", id="no producer"),
        pytest.param(batch(producer="a\0b"), "NUL", id="NUL in the producer"),
        pytest.param(first_event(tenant="bolt"), "'bolt'", id="wrong tenant"),
        pytest.param(first_event(event_id=""), "events[0].event_id is empty", id="no event id"),
        pytest.param(first_event(model="x" * 5000), "5000 characters", id="long model"),
        pytest.param(first_event(model="a\0"), "events[0].model holds a NUL", id="NUL in a name"),
        pytest.param(first_event(n=-1), "events[0].n is -1", id="negative n"),
        pytest.param(first_event(kind="gift"), "kind", id="unknown kind"),
        pytest.param(first_event(stream="other"), "stream", id="unknown stream"),
        pytest.param(first_event(outcome="lost"), "outcome", id="unknown outcome"),
        pytest.param(first_event(op_start_us=2**63), "op_start_us", id="time beyond 64 bits"),
        pytest.param(first_event(counts={"prefill": -1}), "counts.prefill is -1", id="negative"),
        pytest.param(first_event(counts={"train": 2**63}), "counts.train", id="beyond 2^63 - 1"),
        pytest.param(first_event(counts={"train": 1.5}), "train", id="half a token"),
        pytest.param(first_event(counts={"sample": True}), "sample", id="a truth for a count"),
        pytest.param(first_event(counts=[1, 2]), "counts", id="a list for counts"),
    ],
)  # fmt: skip
async def test_a_bad_batch_is_refused_whole(
    client: LedgerClient, message: object, words: str
) -> None:
    status, problem = await refused(client, "POST", "/v1/usage/batches", message)
    assert (status, problem.code) == (400, "invalid_request")
    assert words in problem.message


async def test_too_many_events_are_refused(client: LedgerClient) -> None:
    events = [make_event(n) for n in range(2, 3 + limits.BATCH_EVENTS_MAX)]
    status, problem = await refused(client, "POST", "/v1/usage/batches", make_batch("p", events))
    assert (status, problem.code) == (413, "too_large")
    assert str(limits.BATCH_EVENTS_MAX) in problem.message
    assert (await client.post("p", events[:-1])).acked_seq == limits.BATCH_EVENTS_MAX + 1


async def test_too_large_a_body_is_refused(client: LedgerClient) -> None:
    body = b"\0" * (limits.CONTROL_BODY_BYTES_MAX + 1)
    status, problem = await refused(client, "POST", "/v1/checkpoints", body)
    assert (status, problem.code) == (413, "too_large")


async def test_a_batch_that_is_torn_anywhere_is_refused(client: LedgerClient) -> None:
    body = msgspec.msgpack.encode(make_batch("p", [make_event(2)]))
    before = dump(client)
    for size in [*range(0, len(body), 7), len(body) - 1]:
        status, answer = await client.call("POST", "/v1/usage/batches", body[:size])
        problem = msgspec.msgpack.decode(answer, type=Problem)
        assert (status, problem.code) == (400, "invalid_request"), size
    assert dump(client) == before
    assert (await client.call("POST", "/v1/usage/batches", body))[0] == 200


async def test_a_batch_with_a_wrong_crc_is_refused_and_the_right_one_is_taken(
    client: LedgerClient,
) -> None:
    good = msgspec.msgpack.encode(make_batch("p", [make_event(2, counts=Counts(train=5))]))
    bad = good.replace(b"train\x05", b"train\x07")
    assert good != bad
    careful = replace(client, headers={CRC_HEADER: crc_of(good)})
    status, problem = await refused(careful, "POST", "/v1/usage/batches", bad)
    assert (status, problem.code, problem.retryable) == (400, "torn", True)
    for told in ("", "0", "zzzzzzzz", crc_of(good) + "0"):
        careful = replace(client, headers={CRC_HEADER: told})
        status, problem = await refused(careful, "POST", "/v1/usage/batches", good)
        assert (status, problem.code) == (400, "torn"), told
    careful = replace(client, headers={CRC_HEADER: crc_of(good).upper()})
    assert (await careful.call("POST", "/v1/usage/batches", good))[0] == 200
    assert [row["train"] for row in stored_rows(client.ledger.database)] == [0, 5]


async def test_an_unknown_model_is_kept_shown_and_alarmed_and_never_free(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url, price_book="own") as client:
        prices = [Price(model="tiny", token_type=kind, micros_per_mtok=2) for kind in TOKEN_TYPES]
        book = PriceBook(name="own", currency="USD", effective_from_us=0, prices=prices)
        await client.ask(Empty, "PUT", "/v1/price-books/own", book)
        await client.register("p")
        await client.post("p", [make_event(1), make_event(2, model="unheard-of")])
        priced, unknown = stored_rows(client.ledger.database)
        assert "unpriced" not in (priced["quarantined"] or "")
        assert "unpriced" in unknown["quarantined"].split(",")
        await client.ledger.follower.catch_up()
        rows = {row["model"]: row for row in (await client.usage(group_by="model"))["rows"]}
        assert rows["tiny"]["cost_pico"] == 70
        assert (rows["unheard-of"]["total"], rows["unheard-of"]["cost_pico"]) == (35, None)
        assert "unheard-of" in rows["unheard-of"]["cost_reason"]
        _, body = await client.call("GET", "/metrics")
        assert f"{names.LEDGER_UNPRICED_EVENTS} 1.0" in body.decode()


async def test_a_full_batch_of_the_longest_names_is_not_too_large(client: LedgerClient) -> None:
    name = "m" * limits.LEDGER_TEXT_CHARS_MAX
    last = 1 + limits.BATCH_EVENTS_MAX
    events = [make_event(n, model=name, project=name) for n in range(2, last + 1)]
    assert (await client.post("p", events)).acked_seq == last


async def test_a_gap_answers_409_and_the_expected_number(client: LedgerClient) -> None:
    message = make_batch("p", [make_event(5)])
    status, problem = await refused(client, "POST", "/v1/usage/batches", message)
    assert (status, problem.code, problem.expected_seq) == (409, "conflict", 2)


async def test_an_unknown_producer_answers_404(client: LedgerClient) -> None:
    message = make_batch("q", [make_event(1)])
    status, problem = await refused(client, "POST", "/v1/usage/batches", message)
    assert (status, problem.code) == (404, "not_found")


async def test_a_fenced_epoch_answers_409_fenced(client: LedgerClient) -> None:
    await client.register("q", epoch=3)
    message = PRODUCER | {"producer": "q", "epoch": 2}
    status, problem = await refused(client, "POST", "/v1/producers", message)
    assert (status, problem.code) == (409, "fenced")


@pytest.mark.parametrize(
    ("method", "path", "message", "words"),
    [
        ("POST", "/v1/producers", PRODUCER | {"epoch": -1}, "epoch is -1"),
        ("POST", "/v1/producers", PRODUCER | {"head_seq": 2**63}, "head_seq"),
        ("POST", "/v1/producers", PRODUCER | {"session": ""}, "session is empty"),
        ("POST", "/v1/producers", PRODUCER | {"tenant": None}, "tenant"),
        ("POST", "/v1/heartbeats", [{"at_us": 1}], "view"),
        ("POST", "/v1/heartbeats", make_heartbeat("a"), "array"),
        ("POST", "/v1/heartbeats", [make_heartbeat("")], "[0].view.uid is empty"),
        ("POST", "/v1/heartbeats", [make_heartbeat("a", at_us=-1)], "[0].at_us is -1"),
        ("PUT", "/v1/tenants/Not%20a%20name", None, "is not a name"),
        ("GET", "/v1/checkpoints", None, "'tenant' is missing"),
        ("GET", "/v1/checkpoints?tenant=a&limit=0", None, "limit is '0'"),
        ("GET", "/v1/checkpoints?tenant=a&limit=101", None, "1 to 100"),
        ("GET", "/v1/checkpoints?tenant=a&order=up", None, "asc or desc"),
        ("GET", "/v1/checkpoints?tenant=a&tenant=b", None, "given twice"),
        ("GET", "/v1/checkpoints?tenants=a", None, "unknown parameter 'tenants'"),
        ("GET", "/v1/checkpoints/acme/g/one", None, "version 'one'"),
        ("GET", "/v1/events", None, "'session' is missing"),
        ("GET", "/v1/events?session=s-1&after=-1", None, "after is '-1'"),
        ("GET", "/v1/heartbeats?after=x", None, "after is 'x'"),
        ("GET", "/v1/heartbeats?wait_s=nan", None, "wait_s is nan"),
        ("GET", "/v1/heartbeats?wait_s=31", None, "0 to 30"),
        ("GET", "/v1/heartbeats?wait_s=soon", None, "must be seconds"),
        ("GET", "/v1/usage?group_by=colour", None, "'colour'"),
        ("GET", "/v1/usage?group_by=model,model", None, "twice"),
        ("GET", "/v1/usage?users=me", None, "unknown parameter 'users'"),
        ("GET", "/v1/usage?bucket=week", None, "minute, hour, day"),
        ("GET", "/v1/usage?token_type=decode", None, "'decode'"),
        ("GET", "/v1/usage?operation=dream", None, "'dream'"),
        ("GET", "/v1/usage?since=yesterday", None, "ISO 8601"),
        ("GET", "/v1/usage?since=99999999999999999999", None, "since is"),
        ("GET", "/v1/usage?since=5&until=5", None, "not before until"),
        ("GET", "/v1/usage?limit=10001", None, "1 to 10000"),
        ("GET", "/v1/usage?limit=1.5", None, "limit is '1.5'"),
        ("GET", "/v1/usage?limit=%C2%B2", None, "limit is"),
        ("GET", f"/v1/usage?limit={'0' * 19}1{'9' * 30}", None, "limit is"),
        ("GET", f"/v1/usage?limit={'9' * 4090}", None, "limit is"),
        ("GET", f"/v1/usage?cursor={'W1tb' * 1000}", None, "cursor 'W1tb"),
        ("GET", "/v1/usage?include_attempts=yes", None, "true, false"),
        ("GET", "/v1/usage?cursor=abc", None, "cursor 'abc'"),
        ("GET", "/v1/usage?model=", None, "model is empty"),
        ("GET", "/v1/usage?model=a%00", None, "NUL"),
    ],
)  # fmt: skip
async def test_a_bad_request_says_what_is_wrong(
    client: LedgerClient, method: str, path: str, message: object, words: str
) -> None:
    status, problem = await refused(client, method, path, message)
    assert (status, problem.code) == (400, "invalid_request")
    assert words in problem.message


async def test_a_cursor_of_another_question_is_refused(client: LedgerClient) -> None:
    await client.post("p", [make_event(2, model="other")])
    page = await client.usage(group_by="model", limit=1)
    path = f"/v1/usage?group_by=operation&cursor={page['next_cursor']}"
    _status, problem = await refused(client, "GET", path)
    assert "the same parameters" in problem.message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/usage", 404),
        ("DELETE", "/v1/usage", 405),
        ("GET", "/v1/usage/batches", 405),
        ("GET", "/v1/checkpoints/acme/none/1", 404),
        ("DELETE", "/v1/checkpoints/acme/none/1", 404),
        ("GET", "/v1/checkpoint-groups/acme/none", 404),
    ],
)
async def test_what_is_not_there_is_answered_as_a_problem(
    client: LedgerClient, method: str, path: str, status: int
) -> None:
    found, problem = await refused(client, method, path)
    assert found == status
    assert problem.message


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner,
                                                                max_size=4),
    max_leaves=8,
)  # fmt: skip
events = st.fixed_dictionaries(
    {},
    optional={
        "event_id": st.text(max_size=40),
        "producer_seq": st.integers(-(2**63), 2**64 - 1),
        "number": st.integers(-5, 2**64 - 1),
        "model": st.text(max_size=10),
        "session": st.text(max_size=10),
        "op_start_us": st.integers(-(2**63), 2**64 - 1),
        "op_end_us": st.integers(-(2**63), 2**64 - 1),
        "operation": st.text(max_size=10),
        "counts": st.none()
        | st.dictionaries(
            st.sampled_from(("prefill", "sample", "train")), st.integers(-2, 2**64 - 1)
        ),
    },
)


@settings(SAME_EACH_TIME, max_examples=60)
@given(route=st.sampled_from(ROUTES), body=plain.map(msgspec.msgpack.encode) | st.binary())
async def test_no_body_makes_the_ledger_fail(
    client: LedgerClient, route: tuple[str, str], body: bytes
) -> None:
    status, answer = await client.call(*route, body)
    assert status < 500, answer


@settings(SAME_EACH_TIME, max_examples=40)
@given(change=events)
async def test_no_event_makes_the_ledger_fail(client: LedgerClient, change: dict[str, Any]) -> None:
    number = (await client.register("p")).acked_seq + 1
    message = as_fields(
        make_batch("p", [make_event(number, counts=Counts())]),
        lambda fields: fields["events"][0].update(change),
    )
    status, answer = await client.call("POST", "/v1/usage/batches", message)
    assert status in (200, 400), answer
    assert (await client.call("GET", "/v1/usage?bucket=hour&group_by=session"))[0] == 200
