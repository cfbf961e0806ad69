"""A process of this release between neighbours of the one before: messages are read both ways."""

from typing import Any

import msgspec
import pytest

from gristmill_contracts import http
from gristmill_contracts.cluster_http import HeartbeatAnswer
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import PROTOCOL_HEADER, PROTOCOL_VERSION
from gristmill_contracts.protocol import check_protocol
from gristmill_testing.meter_process import BASE, served
from gristmill_testing.recorded_protocol import ASSIGNMENT, MESSAGES

TYPES: dict[str, Any] = {
    "heartbeats": list[http.Heartbeat],
    "heartbeat_answer": HeartbeatAnswer,
    "session_view": http.SessionView,
    "register_producer": http.RegisterProducer,
    "producer_cursor": http.ProducerCursor,
    "usage_batch": http.UsageBatch,
    "register_session": http.RegisterSession,
    "register_checkpoint": http.RegisterCheckpoint,
    "submit": http.Submit,
    "submitted": http.Submitted,
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_the_release_before_wrote_is_read_and_says_the_same(name: str) -> None:
    message = msgspec.msgpack.decode(MESSAGES[name], type=TYPES[name])
    before = msgspec.msgpack.decode(MESSAGES[name])
    assert contains(msgspec.to_builtins(message, builtin_types=(bytes,)), before)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_we_write_holds_all_that_the_release_before_reads(name: str) -> None:
    """Fields are added, never renamed, removed or retyped: its decoder skips those it does not know."""
    message = msgspec.msgpack.decode(MESSAGES[name], type=TYPES[name])
    now = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert contains(now, msgspec.msgpack.decode(MESSAGES[name]))


def contains(now: Any, before: Any) -> bool:
    """Whether each field of `before` is in `now`, with the same value."""
    if isinstance(before, dict):
        return all(key in now and contains(now[key], value) for key, value in before.items())
    if isinstance(before, list):
        return len(now) == len(before) and all(map(contains, now, before))
    return bool(now == before)


def test_an_assignment_of_the_release_before_is_read() -> None:
    assignment = msgspec.json.decode(ASSIGNMENT, type=http.Assignment)
    assert (assignment.attempt, assignment.desired) == (1, "serve")


def test_the_states_of_a_session_are_those_that_the_release_before_knows() -> None:
    """A new one could not be decoded there: a fenced session is Failed, with an error that says so."""
    states = http.SessionView.__annotations__["state"].__args__
    assert set(states) == {"Serving", "Recovering", "Blocked", "Failed", "Draining", "Closed"}


@pytest.mark.parametrize("given", [None, "0", "1", "2"])
def test_neighbours_by_one_are_served(given: str | None) -> None:
    assert PROTOCOL_VERSION == 1, "record the messages of the release before, then raise this"
    check_protocol(given)


@pytest.mark.parametrize("given", ["3", "-1", "", "one", "1.0", "9" * 400, "²"])
def test_others_are_told_to_upgrade(given: str) -> None:
    with pytest.raises(InvalidRequestError, match="upgrade the older one"):
        check_protocol(given)


async def test_a_running_meter_tells_its_protocol_and_refuses_a_stranger(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    import aiohttp

    async with served(tmp_path_factory.mktemp("m")) as process, aiohttp.ClientSession() as client:
        url = f"http://127.0.0.1:{process.port}{BASE}"
        headers = {"Authorization": "Bearer s3cret", "X-Gristmill-Attempt": "1"}
        for version, status in ((None, 200), ("1", 200), ("2", 200), ("3", 400)):
            told = headers | ({} if version is None else {PROTOCOL_HEADER: version})
            async with client.get(url, headers=told) as answer:
                assert answer.status == status
                assert answer.headers[PROTOCOL_HEADER] == "1"
