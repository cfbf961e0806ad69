"""What the official SDK hides, seen with raw boto3 clients against `gristmill up`."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from gristmill_testing.instance import RunningGristmill
from gristmill_testing.raw_wire import (
    GAP_TIMEOUT_S,
    Clients,
    RawSession,
    compute_logprobs,
    create_fields,
    create_session,
    datum,
    forward,
    forward_backward,
    optimizer_step,
    raw_clients,
    refusal,
    sample,
    wait_until,
)

pytestmark = pytest.mark.e2e

ROW = [7, 11, 13, 17, 19]
MESSAGES = [{"role": "user", "content": "a b c"}]


@pytest.fixture(scope="module")
def shared(clients: Clients, instance: RunningGristmill) -> Iterator[RawSession]:
    """A session for tests that leave its sequence numbers in order."""
    session = create_session(clients, instance.model)
    yield session
    session.stop()


@pytest.fixture
def session(clients: Clients, instance: RunningGristmill) -> Iterator[RawSession]:
    session = create_session(clients, instance.model)
    yield session
    session.stop()


# --- usage ---------------------------------------------------------------------------------------


def test_a_result_carries_the_tokens_that_it_is_billed_for(shared: RawSession) -> None:
    passed = shared.run(forward_backward(datum(ROW), datum(ROW[:3])))
    assert passed["tokenUsage"]["trainingTokens"] == 8
    assert passed["operationResult"]["forwardBackward"]["tokenUsage"]["trainingTokens"] == 8
    scored = shared.run(forward(datum(ROW)))
    assert scored["operationResult"]["forward"]["tokenUsage"]["trainingTokens"] == 5
    stepped = shared.run(optimizer_step())
    assert stepped.get("tokenUsage", {}).get("trainingTokens", 0) == 0


def test_a_group_of_samples_prefills_its_prompt_once(shared: RawSession) -> None:
    answer = shared.run_sampling(sample(ROW, samples=3, max_tokens=4, seed=1))
    sequences = answer["operationResult"]["sample"]["sequences"]
    assert [sequence["tokenUsage"]["prefill"] for sequence in sequences] == [5, 0, 0]
    assert all(
        sequence["tokenUsage"]["decode"] == len(sequence["tokens"]) for sequence in sequences
    )


def test_describe_shows_the_billable_tokens_and_the_last_number(session: RawSession) -> None:
    assert session.describe().get("BillableTokenUsage", {}).get("TrainingTokenCount", 0) == 0
    session.run(forward_backward(datum(ROW)))
    answer = session.run_sampling(sample(ROW, samples=2, max_tokens=4, seed=1))
    session.run_sampling(compute_logprobs(ROW))
    sampled = sum(
        len(sequence["tokens"]) for sequence in answer["operationResult"]["sample"]["sequences"]
    )
    expected = {"PrefillTokenCount": 10, "SampleTokenCount": sampled, "TrainingTokenCount": 5}
    wait_until(
        lambda: session.describe()["BillableTokenUsage"] == expected, f"usage {expected}", 15
    )
    assert session.describe()["LastReceivedSequenceNumber"] == 1


def test_a_raw_client_may_ask_for_fewer_tokens_than_the_models_minimum(shared: RawSession) -> None:
    answer = shared.run_sampling(sample(ROW, max_tokens=1, seed=1))
    assert len(answer["operationResult"]["sample"]["sequences"][0]["tokens"]) == 1


# --- order ---------------------------------------------------------------------------------------


def test_a_gap_blocks_the_session_until_it_is_filled(session: RawSession) -> None:
    second = session.submit(optimizer_step(), number=2)
    wait_until(lambda: session.status == "Blocked", "the session to be Blocked")
    assert "1" in session.describe()["ErrorDetails"]
    first = session.submit(forward_backward(datum(ROW)), number=1)
    assert session.get(first)["status"] == "Completed"
    assert session.get(second)["status"] == "Completed"
    wait_until(lambda: session.status == "Running", "the session to run again")


def test_a_gap_that_times_out_fails_the_session_and_names_the_missing_number(
    session: RawSession,
) -> None:
    first = session.submit(forward_backward(datum(ROW)), number=1)
    third = session.submit(optimizer_step(), number=3)
    wait_until(lambda: session.status == "Failed", "the session to fail", GAP_TIMEOUT_S + 20)
    assert "2" in session.describe()["ErrorDetails"]
    assert session.get(first)["status"] == "Completed"
    assert session.get(third)["status"] == "Skipped"
    code, _, _ = refusal(lambda: session.submit(optimizer_step(), number=2))
    assert code in {"ConflictException", "ValidationException"}
    assert session.describe()["BillableTokenUsage"]["TrainingTokenCount"] == len(ROW)


def test_a_refused_number_leaves_no_gap(session: RawSession) -> None:
    refused = refusal(lambda: session.submit(optimizer_step(learning_rate=0.5), number=1))
    assert refused[0] == "ValidationException", refused
    passed = session.submit(forward_backward(datum(ROW)), number=2)
    assert session.get(passed)["status"] == "Completed"
    assert session.status == "Running"


def test_a_step_directly_behind_a_refused_chunk_is_skipped(session: RawSession) -> None:
    good = session.submit(forward_backward(datum(ROW)), number=1)
    outside = [7, 10**7]
    code, message, status = refusal(
        lambda: session.submit(forward_backward(datum(outside)), number=2)
    )
    assert (code, status) == ("ValidationException", 400)
    assert "10000000" in message
    step = session.submit(optimizer_step(), number=3)
    assert session.get(good)["status"] == "Completed"
    assert session.get(step)["status"] == "Skipped"
    again = session.submit(forward_backward(datum(ROW)), number=4)
    last = session.submit(optimizer_step(), number=5)
    assert session.get(again)["status"] == "Completed"
    assert session.get(last)["status"] == "Completed"
    assert session.describe()["BillableTokenUsage"]["TrainingTokenCount"] == 10


def test_a_refused_number_may_be_sent_again_corrected(session: RawSession) -> None:
    refusal(lambda: session.submit(forward_backward(datum([7, 10**7])), number=1))
    passed = session.submit(forward_backward(datum(ROW)), number=1)
    assert session.get(passed)["status"] == "Completed"
    step = session.submit(optimizer_step(), number=2)
    assert session.get(step)["status"] == "Completed"


def test_what_is_queued_behind_a_failure_is_skipped_and_the_session_goes_on(
    session: RawSession,
) -> None:
    failing = session.submit(optimizer_step(), number=2)
    behind = session.submit(forward_backward(datum(ROW)), number=3)
    first = session.submit({"saveState": {}}, number=1)
    assert session.get(first)["status"] == "Completed"
    failed = session.get(failing)
    assert failed["status"] == "Failed"
    assert "without a forward_backward" in failed["errorDetails"]
    assert session.get(behind)["status"] == "Skipped"
    assert session.status == "Running"
    later = session.submit(forward_backward(datum(ROW)), number=4)
    assert session.get(later)["status"] == "Completed"


def test_a_number_far_ahead_is_refused_with_the_one_expected(session: RawSession) -> None:
    code, message, _ = refusal(lambda: session.submit(optimizer_step(), number=10**6))
    assert code in {"ValidationException", "ConflictException"}
    assert "1" in message


# --- idempotency ---------------------------------------------------------------------------------


def test_the_same_token_and_parameters_are_one_operation(session: RawSession) -> None:
    token = str(uuid.uuid4())
    first = session.submit(forward_backward(datum(ROW)), number=1, token=token)
    again = session.submit(forward_backward(datum(ROW)), number=1, token=token)
    assert first == again
    session.get(first)
    third = session.submit(forward_backward(datum(ROW)), number=1, token=token)
    assert third == first
    wait_until(
        lambda: session.describe()["BillableTokenUsage"]["TrainingTokenCount"] == len(ROW),
        "one bill",
        15,
    )


def test_the_same_number_and_body_are_one_operation_even_without_a_token(
    session: RawSession,
) -> None:
    first = session.submit(forward_backward(datum(ROW)), number=1, token=None)
    again = session.submit(forward_backward(datum(ROW)), number=1, token=None)
    assert first == again


def test_the_same_token_with_other_parameters_is_refused(session: RawSession) -> None:
    token = str(uuid.uuid4())
    first = session.submit(forward_backward(datum(ROW)), number=1, token=token)
    for number in (1, 2):
        code, _, status = refusal(
            lambda number=number: session.submit(optimizer_step(), number=number, token=token)  # type: ignore[misc]
        )
        assert (code, status) == ("ValidationException", 400)
    assert session.get(first)["status"] == "Completed"


def test_the_same_number_with_another_body_is_a_conflict(session: RawSession) -> None:
    session.submit(forward_backward(datum(ROW)), number=1)
    code, message, status = refusal(lambda: session.submit(optimizer_step(), number=1))
    assert (code, status) == ("ConflictException", 409)
    assert "1" in message


# --- chat ----------------------------------------------------------------------------------------


def test_a_chat_call_answers_in_the_openai_shape_with_its_usage(shared: RawSession) -> None:
    answer = shared.chat({"messages": MESSAGES, "max_tokens": 8, "seed": 4})
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in {"stop", "length"}
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 1 <= usage["completion_tokens"] <= 8


def test_a_stream_says_the_same_as_the_whole_answer_and_ends_with_done(shared: RawSession) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "seed": 4}
    whole = shared.chat(body)["choices"][0]["message"]["content"]
    stream = shared.chat_stream({**body, "stream_options": {"include_usage": True}})
    lines = [line for line in stream.read().decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    pieces = [
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    ]
    assert "".join(pieces) == whole
    assert chunks[-1]["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    "body", [{"messages": []}, {"messages": MESSAGES, "max_tokens": 0}, {"messages": "hello"}]
)
def test_a_chat_body_that_is_wrong_is_refused_before_the_stream_starts(
    body: dict[str, Any], shared: RawSession
) -> None:
    code, _, status = refusal(lambda: shared.chat_stream(body))
    assert (code, status) == ("ValidationException", 400)


# --- whose ---------------------------------------------------------------------------------------


def test_someone_elses_session_does_not_exist(
    shared: RawSession, instance: RunningGristmill
) -> None:
    stranger = RawSession(
        clients=raw_clients(instance.environment_of("stranger")), name=shared.name
    )
    operation = shared.submit(forward(datum(ROW)))
    shared.get(operation)
    for call in (
        stranger.describe,
        stranger.stop,
        stranger.delete,
        lambda: stranger.submit(forward(datum(ROW)), number=1),
        lambda: stranger.peek(operation),
        lambda: stranger.submit_sampling(sample(ROW)),
        lambda: stranger.chat({"messages": MESSAGES}),
    ):
        code, _, _ = refusal(call)
        assert code in {"ResourceNotFound", "ResourceNotFoundException"}
    assert stranger.clients.control.list_training_sessions()["TrainingSessionSummaries"] == []


def test_an_operation_id_belongs_to_its_session(
    shared: RawSession, clients: Clients, instance: RunningGristmill
) -> None:
    operation = shared.submit(forward(datum(ROW)))
    shared.get(operation)
    other = create_session(clients, instance.model)
    assert refusal(lambda: other.peek(operation))[0] == "ResourceNotFoundException"
    assert refusal(lambda: other.peek("no-such-operation"))[0] == "ResourceNotFoundException"
    other.stop()


def test_a_wrong_secret_and_an_unknown_key_are_told_apart(instance: RunningGristmill) -> None:
    wrong = raw_clients({**instance.environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
    unknown = raw_clients({**instance.environment, "AWS_ACCESS_KEY_ID": "AKIAUNKNOWN000000000"})
    first = refusal(wrong.control.list_training_sessions)
    second = refusal(unknown.control.list_training_sessions)
    assert first[0] != second[0]
    assert {first[2], second[2]} <= {400, 401, 403}


# --- the rest of the wire ------------------------------------------------------------------------


def test_an_unknown_operation_says_what_is_supported(clients: Clients) -> None:
    code, message, status = refusal(clients.control.list_training_jobs)
    assert (code, status) == ("UnknownOperationException", 400)
    assert "CreateTrainingSession" in message


def test_a_session_name_is_taken_once(
    clients: Clients, shared: RawSession, instance: RunningGristmill
) -> None:
    fields = create_fields(clients, instance.model, shared.name, rank=16)
    shared.run(forward(datum(ROW)))
    code, message, _ = refusal(lambda: clients.control.create_training_session(**fields))
    assert code in {"ResourceInUse", "ResourceInUseException"}
    assert shared.name in message


def test_sessions_are_listed_in_pages(clients: Clients, instance: RunningGristmill) -> None:
    stem = f"page-{uuid.uuid4().hex[:6]}"
    sessions = [
        create_session(clients, instance.model, name=f"{stem}-{index}") for index in range(3)
    ]
    pages = clients.control.get_paginator("list_training_sessions").paginate(
        NameContains=stem, PaginationConfig={"PageSize": 2}
    )
    listed = [page["TrainingSessionSummaries"] for page in pages]
    assert [len(page) for page in listed] == [2, 1]
    names = {
        summary["TrainingSessionArn"].rsplit("/", 1)[-1] for page in listed for summary in page
    }
    assert names == {session.name for session in sessions}
    code, _, _ = refusal(lambda: clients.control.list_training_sessions(NextToken="made-up"))
    assert code == "ValidationException"
    for session in sessions:
        session.stop()
