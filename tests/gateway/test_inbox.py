"""Operations of a session that no meter serves go into the ledger's inbox, and are told from there."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gristmill_contracts import limits
from gristmill_contracts.credentials import EndpointSecret, EndpointSecretSpec
from gristmill_contracts.errors import UnavailableError
from gristmill_contracts.http import RegisterProducer
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.inbox import AckInbox, ArchiveOperations, ClaimInbox
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.units import now_us
from gristmill_ledger import archive, inbox, inbox_claims, producers
from gristmill_ledger.app import make_app
from gristmill_ledger.bodies import Body
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.fake_meter import SECRET
from gristmill_testing.gateway_world import UID, World, gateway_world
from gristmill_testing.inbox_calls import archived

HOLD_S = 2.0
STEP = {"optimizerStep": {"adamParamsConfig": {"learningRate": 1e-4}}}
NO_DATUM = {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": []}}
PROMPT = {"chunks": [{"tokens": [7, 11], "type": "encoded_text"}]}
SAMPLE = {"sample": {"prompt": PROMPT, "numSamples": 1, "samplingParams": {"maxTokens": 4}}}


@pytest.fixture(name="ledger")
def ledger_fixture(tmp_path: Path) -> Ledger:
    return Ledger(LedgerSettings(data_dir=tmp_path / "ledger"))


@pytest.fixture(name="world")
def world_fixture(tmp_path: Path, ledger: Ledger) -> Iterator[World]:
    """The session `run-1` is accepted, and nobody serves it."""
    with gateway_world(tmp_path, submit_hold_s=HOLD_S, ledger_app=make_app(ledger)) as world:
        forsake(world)
        yield world


def forsake(world: World) -> None:
    world.store.delete(EndpointSecret, "acme", "run-1")
    world.meter.attempts.clear()


def serve_again(world: World, attempt: int = 1) -> None:
    session = next(iter(world.store.list(TrainingSession)))
    meta = session.metadata
    world.meter.attempts[UID] = attempt
    world.store.create(
        EndpointSecret(
            metadata=Metadata(name=meta.name, namespace=meta.namespace),
            spec=EndpointSecretSpec(
                session_uid=UID, attempt=attempt, endpoint=world.meter_url, secret=SECRET
            ),
        )
    )


def train(world: World, number: int, config: Any = None) -> str:
    answer = world.client().execute_training_operation(
        trainingSessionName="run-1",
        sequenceNumber=number,
        operationConfig=STEP if config is None else config,
    )
    return str(answer["operationId"])


def status(world: World, operation: str) -> str:
    answer = world.client().get_training_operation_result(
        trainingSessionName="run-1", operationId=operation
    )
    return str(answer["status"])


def register(ledger: Ledger, attempt: int = 1) -> None:
    message = RegisterProducer(
        producer=UID,
        tenant=TenantName("acme"),
        session=SessionUid(UID),
        epoch=1,
        attempt=attempt,
        head_seq=0,
    )
    ledger.database.write_now(lambda c: producers.register_producer(c, message))


def waiting(ledger: Ledger) -> list[Any]:
    """What a meter that starts would be given."""
    claimed = ledger.database.write_now(lambda c: inbox_claims.claim(c, UID, ClaimInbox(attempt=1)))
    return list(claimed.rows)


def take(ledger: Ledger) -> list[tuple[str, int]]:
    found = waiting(ledger)
    ack = AckInbox(attempt=1, taken=[row.position for row in found])
    ledger.database.write_now(lambda c: inbox_claims.acknowledge(c, UID, ack))
    assert waiting(ledger) == []
    return [(row.stream, row.number) for row in found]


def test_submits_are_accepted_at_once_and_wait_in_order(world: World, ledger: Ledger) -> None:
    begun = time.monotonic()
    first, second = train(world, 1), train(world, 2)
    sampled = world.client().execute_sampling_operation(
        trainingSessionName="run-1", operationConfig=SAMPLE
    )
    assert time.monotonic() - begun < 3 * HOLD_S, "held calls would take this long"
    assert train(world, 1) == first
    assert status(world, first) == status(world, second) == "Pending"
    answer = world.client().get_sampling_operation_result(
        trainingSessionName="run-1", operationId=sampled["operationId"]
    )
    assert answer["status"] == "Pending"
    register(ledger)
    taken = take(ledger)
    assert taken[:2] == [("train", 1), ("train", 2)]
    assert taken[2][0] == "log"
    assert taken[2][1] >= limits.INBOX_LOG_NUMBER_MIN
    assert status(world, first) == "InProgress"


def test_a_refused_number_is_closed_in_the_inbox(world: World, ledger: Ledger) -> None:
    with pytest.raises(ClientError) as caught:
        train(world, 1, NO_DATUM)
    assert caught.value.response["Error"]["Code"] == "ValidationException"
    train(world, 2)
    register(ledger)
    assert [row.kind for row in waiting(ledger)] == ["refuse", "submit"]


def test_another_request_under_a_number_is_a_conflict(world: World) -> None:
    train(world, 1)
    other = {"optimizerStep": {"adamParamsConfig": {"learningRate": 2e-4}}}
    with pytest.raises(ClientError) as caught:
        train(world, 1, other)
    assert caught.value.response["Error"]["Code"] == "ConflictException"
    assert "last received number is 1" in str(caught.value)


def test_a_full_inbox_asks_for_patience(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INBOX_OPERATIONS_MAX", 1)
    train(world, 1)
    with pytest.raises(ClientError) as caught:
        train(world, 2)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 429


def test_once_a_meter_serves_operations_go_there(world: World, ledger: Ledger) -> None:
    train(world, 1)
    register(ledger)
    take(ledger)
    with pytest.raises(ClientError) as caught:
        train(world, 2)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    serve_again(world)
    train(world, 2)
    assert [submit.number for submit in world.meter.submits] == [2]


def test_what_a_starting_meter_does_not_know_yet_still_waits(world: World) -> None:
    operation = train(world, 1)
    serve_again(world)
    assert status(world, operation) == "Pending"


def test_what_waits_is_not_lost_while_the_ledger_cannot_tell(
    world: World, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meter that starts does not know it yet: only the ledger could say that nobody does."""
    operation = train(world, 1)
    serve_again(world)

    async def away(_work: object) -> None:
        raise UnavailableError("the database is away")

    monkeypatch.setattr(ledger.database, "read", away)
    assert status(world, operation) == "InProgress"


def test_a_result_is_told_from_the_archive_while_nobody_serves(
    world: World, ledger: Ledger
) -> None:
    operation = train(world, 1)
    register(ledger)
    take(ledger)
    keep(ledger, 1)
    assert status(world, operation) == "Completed"
    world.set_state(world.store.list(TrainingSession)[0], "Stopped")
    assert status(world, operation) == "Completed"


def test_what_waits_when_its_session_ends_was_skipped(world: World, ledger: Ledger) -> None:
    operation = train(world, 1)
    world.set_state(world.store.list(TrainingSession)[0], "Stopped")
    answer = world.client().get_training_operation_result(
        trainingSessionName="run-1", operationId=operation
    )
    assert answer["status"] == "Skipped", answer
    assert "before a meter took it" in str(answer)
    view = ledger.database.read_now(lambda c: inbox.view_inbox(c, UID))
    assert (view.waiting, view.closed) == (0, True)


def test_a_ledger_that_knows_nothing_is_not_asked_over_and_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_again(world)
    operation = train(world, 1)
    forsake(world)
    asked: list[int] = []
    real = archive.find_operation

    def counting(*arguments: Any, **named: Any) -> Any:
        asked.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(archive, "find_operation", counting)
    assert [status(world, operation) for _ in range(3)] == ["InProgress"] * 3
    assert 1 <= len(asked) <= 4


def test_a_result_that_nobody_has_any_more_is_not_found(world: World, ledger: Ledger) -> None:
    operation = train(world, 1)
    register(ledger)
    take(ledger)
    world.set_state(world.store.list(TrainingSession)[0], "Stopped")
    with pytest.raises(ClientError) as caught:
        status(world, operation)
    assert caught.value.response["Error"]["Code"] == "ResourceNotFoundException"


def keep(ledger: Ledger, number: int) -> None:
    operation = archived(number, ended_us=now_us())
    request = ArchiveOperations(attempt=1, retention_s=60.0, operations=[operation])
    until_us = archive.expires_us(request, operation)
    body = Body(size=len(operation.result or b""), inline=operation.result)
    ledger.database.write_now(
        lambda c: archive.keep_operation(c, UID, operation, body, tenant="acme", until_us=until_us)
    )


def test_a_description_counts_what_waits(world: World) -> None:
    train(world, 1)
    train(world, 2)
    answer = world.client("sagemaker").describe_training_session(TrainingSessionName="run-1")
    detail = answer["TrainingSessionDetail"]
    assert detail["LastReceivedSequenceNumber"] == 2
