"""Describe, List, Stop and Delete of training sessions."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sagemaker.train.training_session.service_client import _STOP_IS_NOOP_STATUSES

from gristmill_contracts.errors import InvalidRequestError, NotFoundError
from gristmill_contracts.http import Problem
from gristmill_contracts.resources import Condition, Metadata
from gristmill_contracts.session import (
    BaseModelRef,
    LastFailure,
    State,
    TrainingSession,
    TrainingSessionSpec,
    TrainingSessionStatus,
)
from gristmill_contracts.usage import Counts
from gristmill_gateway.sagemaker import control, control_session
from gristmill_sessions.identity import session_uid
from gristmill_testing.control_plane import (
    FakeCaller,
    FakeContext,
    accept,
    create_body,
    running_control_plane,
    view,
)
from gristmill_testing.ledger import make_event
from gristmill_testing.wire_shapes import output_problems

CALLER = FakeCaller()
NAMED = {"TrainingSessionName": "run-1"}


@pytest.fixture(name="plane")
async def plane_fixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeContext]:
    """Holds no create, and has one session, run-1."""
    monkeypatch.setattr("gristmill_contracts.limits.CREATE_WAIT_S_MAX", 0.0)
    async with running_control_plane(tmp_path) as context:
        await control.create_training_session(context, CALLER, create_body("run-1"))
        yield context


def session(plane: FakeContext, name: str = "run-1") -> TrainingSession:
    return plane.store.get(TrainingSession, "acme", name)


async def describe(plane: FakeContext, name: str = "run-1") -> dict[str, Any]:
    answer = await control.describe_training_session(plane, CALLER, {"TrainingSessionName": name})
    assert output_problems("sagemaker", "DescribeTrainingSession", answer) == []
    detail: dict[str, Any] = answer["TrainingSessionDetail"]
    return detail


async def listed(plane: FakeContext, **filters: Any) -> tuple[list[str], str | None]:
    answer = await control.list_training_sessions(plane, CALLER, filters)
    assert output_problems("sagemaker", "ListTrainingSessions", answer) == []
    names = [
        each["TrainingSessionArn"].rpartition("/")[2] for each in answer["TrainingSessionSummaries"]
    ]
    return names, answer.get("NextToken")


# --- status --------------------------------------------------------------------------------------

STATUS: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("made", {"conditions": []}, None, "Created"),
    ("its meter takes operations", {}, None, "Running"),
    ("scheduled, its meter takes operations", {"state": "Scheduled"}, "Recovering", "Running"),
    ("runs", {"state": "Running"}, "Serving", "Running"),
    ("blocked at the meter, not noticed yet", {"state": "Running"}, "Blocked", "Blocked"),
    ("blocked", {"state": "Blocked"}, None, "Blocked"),
    ("unblocked at the meter, not noticed yet", {"state": "Blocked"}, "Serving", "Running"),
    ("failed at the meter, not noticed yet", {"state": "Running"}, "Failed", "Failed"),
    ("failed", {"state": "Failed"}, None, "Failed"),
    ("stopping", {"state": "Stopping"}, "Draining", "Stopping"),
    ("stopped", {"state": "Stopped"}, None, "Stopped"),
    ("expired", {"state": "Expired"}, None, "Expired"),
    ("being deleted", {"state": "Deleting"}, None, "Deleting"),
    ("not deletable", {"state": "DeletionFailed"}, None, "DeletionFailed"),
]


def made(**status: Any) -> TrainingSession:
    """A session whose meter takes operations, or what `status` says; no store behind it."""
    fields = {"conditions": [Condition(type="Ready", status="True", reason="X")]} | status
    return TrainingSession(
        metadata=Metadata(name="run-1", namespace="acme", uid="u"),
        spec=TrainingSessionSpec(base_model_ref=BaseModelRef(name="tiny")),
        status=TrainingSessionStatus(**fields),
    )


@pytest.mark.parametrize(
    ("status", "at_meter", "expected"), [row[1:] for row in STATUS], ids=[row[0] for row in STATUS]
)
def test_the_reported_status_follows_resource_and_meter(
    status: dict[str, Any], at_meter: Any, expected: str
) -> None:
    session = made(**status)
    seen = None if at_meter is None else view(session, state=at_meter)
    assert control_session.reported_status(session, seen) == expected


async def test_a_blocked_session_says_which_number_is_missing(plane: FakeContext) -> None:
    accept(plane.store, "run-1", state="Running")
    own = session(plane)
    plane.views[session_uid(own)] = view(
        own, state="Blocked", missing_number=4, last_received_number=7
    )
    detail = await describe(plane)
    assert "operation 4 is missing" in detail["ErrorDetails"]
    assert detail["LastReceivedSequenceNumber"] == 7


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        ({"last_failure": LastFailure(reason="LogLost", message="the log is gone")}, None, "the log is gone"),
        ({"last_failure": LastFailure(reason="LogLost")}, None, "LogLost"),
        ({"conditions": [Condition(type="Failed", status="True", reason="X", message="why")]}, None, "why"),
        ({"conditions": []}, Problem(code="conflict", message="number 4 never came"), "number 4 never came"),
        ({"conditions": []}, None, "the session is Failed"),
        ({"last_failure": LastFailure(message="m" * 1024)}, Problem(code="x", message="e" * 5000), "e" * 1024),
    ],
)  # fmt: skip
def test_a_failed_session_says_why(
    status: dict[str, Any], error: Problem | None, expected: str
) -> None:
    session = made(state="Failed", **status)
    seen = None if error is None else view(session, state="Failed", error=error)
    detail = control_session.describe(session, CALLER.scope, "", seen, None)
    assert detail["ErrorDetails"] == expected
    assert (
        output_problems("sagemaker", "DescribeTrainingSession", {"TrainingSessionDetail": detail})
        == []
    )


# --- usage ---------------------------------------------------------------------------------------


async def test_usage_is_what_the_meter_settled_while_there_is_one(plane: FakeContext) -> None:
    own = session(plane)
    counts = Counts(prefill=2**40, cached_prefill=7, sample=3, train=11)
    plane.views[session_uid(own)] = view(own, counts=counts)
    assert (await describe(plane))["BillableTokenUsage"] == {
        "PrefillTokenCount": 2**40, "SampleTokenCount": 3, "TrainingTokenCount": 11,
    }  # fmt: skip


async def test_usage_is_the_ledgers_where_no_meter_can_hold_more(plane: FakeContext) -> None:
    uid = session_uid(session(plane))
    assert (await describe(plane))["BillableTokenUsage"]["PrefillTokenCount"] == 0
    await plane.ledger_admin.register("p-1", session=uid)
    await plane.ledger_admin.post("p-1", [make_event(n, session=uid) for n in (1, 2)])
    accept(plane.store, "run-1", state="Stopped")
    assert (await describe(plane))["BillableTokenUsage"] == {
        "PrefillTokenCount": 20, "SampleTokenCount": 10, "TrainingTokenCount": 0,
    }  # fmt: skip


async def test_usage_is_left_out_while_a_meter_that_may_hold_some_is_away(
    plane: FakeContext,
) -> None:
    accept(plane.store, "run-1", state="Running")
    assert "BillableTokenUsage" not in await describe(plane)
    own = session(plane)
    plane.views[session_uid(own)] = view(own, state="Recovering", counts=Counts(train=5))
    assert (await describe(plane))["BillableTokenUsage"]["TrainingTokenCount"] == 5


async def test_usage_that_nobody_can_tell_is_left_out_and_never_zero(plane: FakeContext) -> None:
    uid = session_uid(session(plane))
    await plane.ledger_admin.register("p-1", session=uid)
    unknown = make_event(1, session=uid, counts=None, outcome="unknown")
    await plane.ledger_admin.post("p-1", [unknown])
    assert "BillableTokenUsage" not in await describe(plane)
    plane.ledger._base_url = "http://127.0.0.1:1"
    assert "BillableTokenUsage" not in await describe(plane)


# --- list ----------------------------------------------------------------------------------------


async def test_sessions_are_listed_newest_first_page_by_page(plane: FakeContext) -> None:
    for number in range(2, 6):
        await control.create_training_session(plane, CALLER, create_body(f"run-{number}"))
    assert await listed(plane) == ([f"run-{n}" for n in (5, 4, 3, 2, 1)], None)
    first, token = await listed(plane, MaxResults=2)
    assert first == ["run-5", "run-4"]
    await control.create_training_session(plane, CALLER, create_body("run-6"))
    plane.store.delete(TrainingSession, "acme", "run-4")
    second, token = await listed(plane, MaxResults=2, NextToken=token)
    assert second == ["run-3", "run-2"]
    assert await listed(plane, MaxResults=2, NextToken=token) == (["run-1"], None)


async def test_a_list_is_filtered_by_name_status_and_time(plane: FakeContext) -> None:
    await control.create_training_session(plane, CALLER, create_body("Other"))
    accept(plane.store, "run-1")
    assert (await listed(plane, NameContains="un-"))[0] == ["run-1"]
    assert (await listed(plane, NameContains=""))[0] == ["Other", "run-1"]
    assert (await listed(plane, StatusEquals="Running"))[0] == ["run-1"]
    assert (await listed(plane, StatusEquals="Created"))[0] == ["Other"]
    own = session(plane).metadata.creation_time_us / 1e6
    assert (await listed(plane, CreationTimeAfter=own - 5))[0] == ["Other", "run-1"]
    assert (await listed(plane, CreationTimeAfter=int(own) + 500))[0] == []
    assert (await listed(plane, CreationTimeBefore=own - 5))[0] == []


async def test_a_tenant_lists_its_own_sessions_alone(plane: FakeContext) -> None:
    rival = FakeCaller(tenant="rival", account_id="100000000002")
    answer = await control.list_training_sessions(plane, rival, {})
    assert answer == {"TrainingSessionSummaries": []}
    for call in (
        control.describe_training_session,
        control.stop_training_session,
        control.delete_training_session,
    ):
        with pytest.raises(NotFoundError, match="run-1 does not exist"):
            await call(plane, rival, NAMED)


async def test_a_next_token_fits_only_the_question_it_answered(plane: FakeContext) -> None:
    await control.create_training_session(plane, CALLER, create_body("run-2"))
    _, token = await listed(plane, MaxResults=1)
    assert token is not None
    assert (await listed(plane, MaxResults=50, NextToken=token))[0] == ["run-1"]
    rival = FakeCaller(tenant="rival")
    for caller, asked in (
        (CALLER, {"NextToken": token, "NameContains": "run"}),
        (CALLER, {"NextToken": token[:-4] + "AAAA"}),
        (CALLER, {"NextToken": "x"}),
        (CALLER, {"NextToken": ""}),
        (CALLER, {"NextToken": "ü" * 30}),
        (rival, {"NextToken": token}),
    ):
        with pytest.raises(InvalidRequestError, match="NextToken"):
            await control.list_training_sessions(plane, caller, asked)


BAD_LISTS: list[tuple[dict[str, Any], str]] = [
    ({"MaxResults": 0}, "MaxResults = 0"),
    ({"MaxResults": 101}, "MaxResults = 101"),
    ({"MaxResults": 1.5}, "MaxResults = 1.5"),
    ({"StatusEquals": "running"}, "StatusEquals = 'running'"),
    ({"NameContains": "a_b"}, "NameContains"),
    ({"NextToken": "a" * 8193}, "8192"),
    ({"CreationTimeAfter": "yesterday"}, "CreationTimeAfter"),
    ({"CreationTimeAfter": float("nan")}, "CreationTimeAfter"),
    ({"SortBy": "Name"}, "SortBy is not a member"),
]


async def test_a_bad_list_is_refused(plane: FakeContext) -> None:
    for asked, text in BAD_LISTS:
        with pytest.raises(InvalidRequestError) as caught:
            await control.list_training_sessions(plane, CALLER, asked)
        assert text in caught.value.message, asked


async def again(plane: FakeContext) -> None:
    """The session run-1 as it was at first."""
    for own in plane.store.list(TrainingSession, "acme"):
        plane.store.delete(TrainingSession, "acme", own.metadata.name)
    await control.create_training_session(plane, CALLER, create_body("run-1"))


# --- stop and delete -----------------------------------------------------------------------------


async def test_an_active_session_is_stopped_and_says_so_at_once(plane: FakeContext) -> None:
    states: list[State] = ["Created", "Scheduled", "Running", "Blocked"]
    for state in states:
        await again(plane)
        accept(plane.store, "run-1", state=state)
        assert await control.stop_training_session(plane, CALLER, NAMED) == {}
        assert session(plane).spec.desired_state == "Stopped"
        assert (await describe(plane))["TrainingSessionStatus"] == "Stopping"


async def test_a_stop_that_cannot_be_is_refused_in_the_words_the_sdk_reads(
    plane: FakeContext,
) -> None:
    states: list[State] = ["Stopping", "Stopped", "Failed", "Deleting", "DeletionFailed"]
    for state in states:
        await again(plane)
        accept(plane.store, "run-1", state=state)
        with pytest.raises(InvalidRequestError) as caught:
            await control.stop_training_session(plane, CALLER, NAMED)
        assert state in _STOP_IS_NOOP_STATUSES
        assert f"invalid session state transition from {state} to " in caught.value.message
        assert session(plane).spec.desired_state == "Running"


async def test_stopping_an_expired_session_succeeds_and_makes_it_deletable_for_the_sdk(
    plane: FakeContext,
) -> None:
    accept(plane.store, "run-1", state="Expired")
    await control.stop_training_session(plane, CALLER, NAMED)
    assert (await describe(plane))["TrainingSessionStatus"] == "Stopped"
    await control.delete_training_session(plane, CALLER, NAMED)
    with pytest.raises(NotFoundError):
        await describe(plane)


async def test_an_ended_session_is_deleted_and_then_gone(plane: FakeContext) -> None:
    states: list[State] = ["Stopped", "Failed", "Expired", "DeletionFailed"]
    for state in states:
        await again(plane)
        accept(plane.store, "run-1", state=state)
        assert await control.delete_training_session(plane, CALLER, NAMED) == {}
        assert await listed(plane) == ([], None)
        with pytest.raises(NotFoundError):
            await control.delete_training_session(plane, CALLER, NAMED)


async def test_an_active_session_is_not_deleted(plane: FakeContext) -> None:
    states: list[State] = ["Created", "Scheduled", "Running", "Blocked", "Stopping"]
    for state in states:
        await again(plane)
        accept(plane.store, "run-1", conditions=[], state=state)
        with pytest.raises(InvalidRequestError) as caught:
            await control.delete_training_session(plane, CALLER, NAMED)
        assert f"invalid session state transition from {state} to Deleting" in caught.value.message
        assert session(plane).metadata.name == "run-1"


async def test_a_session_with_a_finalizer_is_deleting_until_it_is_lifted(
    plane: FakeContext,
) -> None:
    own = session(plane)
    held = own.metadata.model_copy(update={"finalizers": ["gristmill.dev/metering-flush"]})
    plane.store.update(own.model_copy(update={"metadata": held}))
    accept(plane.store, "run-1", state="Stopped")
    await control.delete_training_session(plane, CALLER, NAMED)
    assert (await describe(plane))["TrainingSessionStatus"] == "Deleting"
    await control.delete_training_session(plane, CALLER, NAMED)


async def test_a_bad_name_is_refused(plane: FakeContext) -> None:
    bodies: list[dict[str, Any]] = [
        {}, {"TrainingSessionName": 1}, {"TrainingSessionName": "a/b"}, NAMED | {"X": 1},
    ]  # fmt: skip
    for call in (
        control.describe_training_session,
        control.stop_training_session,
        control.delete_training_session,
    ):
        for body in bodies:
            with pytest.raises(InvalidRequestError):
                await call(plane, CALLER, body)


async def test_an_annotation_that_somebody_broke_does_not_break_describe(
    plane: FakeContext,
) -> None:
    own = session(plane)
    for text in ("no json", "[]", '{"Tags": 5, "ModelConfig": {"X": 1}}', '{"Tags": [1]}'):
        broken = own.metadata.model_copy(
            update={
                "annotations": own.metadata.annotations | {"gristmill.dev/sagemaker-request": text},
                "resource_version": session(plane).metadata.resource_version,
            }
        )
        plane.store.update(own.model_copy(update={"metadata": broken}))
        detail = await describe(plane)
        assert detail["ModelConfig"]["BaseModelArn"].endswith("/Model/tiny/1.0.0")
        assert detail["Tags"] == []
