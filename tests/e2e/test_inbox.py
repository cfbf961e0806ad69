"""Operations that no meter can take wait for it, and results outlive it: nothing lost, nothing twice."""

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import sagemaker.train.training_session as sdk

from gristmill_contracts.inbox import InboxView
from gristmill_contracts.session import TrainingSession
from gristmill_sessions.identity import session_name, session_uid
from gristmill_sessions.local import open_local_store
from gristmill_testing.books import Books
from gristmill_testing.crash_campaign import digest, rows_of
from gristmill_testing.instance import RunningGristmill
from gristmill_testing.raw_wire import (
    Clients,
    RawSession,
    datum,
    forward_backward,
    sample,
    wait_until,
)
from gristmill_testing.sdk_loop import TOKENS, batch, status_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("recorded")]

NOTHING = {"prefill": 0, "cached_prefill": 0, "sample": 0, "train": 0}
STEP_TOKENS = sum(map(len, TOKENS))
CAMPAIGN = ("meter", "ledger", "meter", "gateway", "worker", "meter", "ledger", "gateway")
"""Which part dies before each step of the campaign."""
ADAM = sdk.AdamParams(learning_rate=1e-3)


@contextmanager
def without_meter(instance: RunningGristmill) -> Iterator[None]:
    """kill -9 of the meter, and nobody there who would start it again before the end of the block."""
    instance.wait_ready("ledger")
    os.kill(instance.process.pid, signal.SIGSTOP)
    try:
        instance.kill("meter")
        yield
    finally:
        os.kill(instance.process.pid, signal.SIGCONT)


def inbox_of(instance: RunningGristmill, name: str) -> InboxView:
    store = open_local_store(instance.layout.store)
    found = [each for each in store.list(TrainingSession) if session_name(each) == name]
    url = f"{instance.ledger_url}/v1/sessions/{session_uid(found[0])}/inbox"
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return msgspec.msgpack.decode(answer.read(), type=InboxView)
        except urllib.error.URLError:  # A ledger that was killed is being started.
            time.sleep(0.1)


def until_waiting(instance: RunningGristmill, name: str, count: int) -> None:
    wait_until(lambda: inbox_of(instance, name).waiting >= count, f"{count} operations to wait")


def test_what_is_submitted_while_no_meter_serves_runs_once(
    client: sdk.TrainingClient, instance: RunningGristmill, books: Books
) -> None:
    name = client.training_session_name
    client.forward_backward(batch()).result()
    client.optim_step(ADAM).result()
    with without_meter(instance):
        passed = client.forward_backward(batch())
        stepped = client.optim_step(ADAM)
        until_waiting(instance, name, 2)
        assert inbox_of(instance, name).last_received_number == 4
    assert passed.result().metrics["actor/pg_loss"] > 0
    stepped.result()
    assert inbox_of(instance, name).waiting == 0
    books.expect(name, NOTHING | {"train": 2 * STEP_TOKENS})
    assert books.operations(name, operation="optim_step") == 2


def test_keyless_operations_wait_as_well_and_are_billed_once(
    client: sdk.TrainingClient, clients: Clients, instance: RunningGristmill, books: Books
) -> None:
    name = client.training_session_name
    raw = RawSession(clients, name)
    client.forward_backward(batch()).result()
    with without_meter(instance):
        operation = raw.submit_sampling(sample([5, 6, 7], max_tokens=4))
        assert inbox_of(instance, name).waiting == 1
    answer = raw.get_sampling(operation)
    assert answer["status"] == "Completed"
    wait_until(lambda: books.usage(name)["prefill"] == 3, "the usage to be posted")
    tokens = books.usage(name)
    assert 1 <= tokens["sample"] <= 4
    assert raw.get_sampling(operation)["status"] == "Completed"
    assert books.usage(name) == tokens


def test_results_are_there_after_the_stop_and_what_waited_was_skipped(
    service: sdk.ServiceClient,
    client: sdk.TrainingClient,
    clients: Clients,
    instance: RunningGristmill,
    books: Books,
) -> None:
    name = client.training_session_name
    raw = RawSession(clients, name)
    first = raw.submit(forward_backward(datum([5, 6, 7, 8])))
    assert raw.get(first)["status"] == "Completed"
    sampled = raw.submit_sampling(sample([5, 6, 7], max_tokens=4))
    told = raw.get_sampling(sampled)
    with without_meter(instance):
        waiting = raw.submit(forward_backward(datum([5, 6, 7, 8])))
        assert raw.peek(waiting) in ("Pending", "InProgress")
        clients.control.stop_training_session(TrainingSessionName=name)
    wait_until(lambda: status_of(service, name) == "Stopped", "the session to be stopped")
    wait_until(lambda: inbox_of(instance, name).closed, "the inbox to be closed")
    assert raw.get(first)["status"] == "Completed"
    again = raw.get_sampling(sampled)
    assert {**again, "ResponseMetadata": 0} == {**told, "ResponseMetadata": 0}
    assert raw.get(waiting)["status"] == "Skipped"
    assert books.usage(name)["prefill"] == 3


def test_kills_of_every_part_between_submits_change_no_number_and_no_bill(
    service: sdk.ServiceClient,
    client: sdk.TrainingClient,
    instance: RunningGristmill,
    books: Books,
) -> None:
    start = client.save_state().result().model_package_arn
    assert start is not None
    calm = [_step(client, at, None, instance) for at in range(len(CAMPAIGN))]
    with service.create_training_client_from_state_with_optimizer(start) as disturbed:
        rough = [_step(disturbed, at, part, instance) for at, part in enumerate(CAMPAIGN)]
        assert rough == calm
        tokens = sum(len(row) for at in range(len(CAMPAIGN)) for row in rows_of(at, 4, 16))
        for name in (client.training_session_name, disturbed.training_session_name):
            books.expect(name, NOTHING | {"train": tokens})


def _step(
    client: sdk.TrainingClient, at: int, part: str | None, instance: RunningGristmill
) -> tuple[float, str]:
    """One step, submitted while `part` is dead; its loss and a digest of its numbers."""
    rows = rows_of(at, 4, 16)
    if part == "meter":
        with without_meter(instance):
            passed, stepped = client.forward_backward(batch(rows)), client.optim_step(ADAM)
            until_waiting(instance, client.training_session_name, 2)
    else:
        if part is not None:
            instance.kill(part)
        passed, stepped = client.forward_backward(batch(rows)), client.optim_step(ADAM)
    result = passed.result()
    stepped.result()
    return float(result.metrics["actor/pg_loss"]), digest(result.loss_fn_outputs)
