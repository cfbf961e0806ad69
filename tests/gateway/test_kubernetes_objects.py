"""Our resources as objects of the API server: what is read, what is sent, and how refusals are told."""

import json
from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import (
    BaseModelRef,
    LoraSpec,
    TrainingSession,
    TrainingSessionSpec,
)
from gristmill_contracts.tenant import Tenant
from gristmill_gateway.kubernetes_errors import GoneError, QuotaBusyError, api_error
from gristmill_gateway.kubernetes_objects import (
    object_to_create,
    patch_between,
    path_of,
    read_object,
    status_patch,
)
from gristmill_gateway.wire_errors import LimitExceededError, control_error


def told(**changes: Any) -> dict[str, Any]:
    """A session as the API server tells it."""
    return {
        "apiVersion": "gristmill.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {
            "name": "run-1",
            "namespace": "gm-acme",
            "uid": "u-1",
            "resourceVersion": "17",
            "generation": 2,
            "creationTimestamp": "2026-01-31T12:00:00Z",
            "managedFields": [{"manager": "kubectl"}],
            "ownerReferences": [],
        },
        "spec": {"baseModelRef": {"name": "tiny"}, "lora": {"rank": 8, "alpha": 16}},
    } | changes


def test_an_object_is_read_with_what_a_newer_version_added_left_out() -> None:
    spec = {
        "baseModelRef": {"name": "tiny", "channel": "stable"},
        "lora": {"rank": 8},
        "wings": {"count": 2},
        "limits": {"pendingSeconds": 60, "patience": 3},
    }
    status = {
        "state": "Running",
        "mood": "fine",
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "R", "severity": "none"},
            {"type": "Serving", "status": "True", "reason": "S"},
        ],
    }
    read = read_object(TrainingSession, told(spec=spec, status=status))
    assert read.spec.limits.pending_seconds == 60
    assert read.status.state == "Running"
    assert [each.type for each in read.status.conditions] == ["Ready", "Serving"]
    assert read.metadata.resource_version == 17
    assert read.metadata.creation_time_us == 1_769_860_800_000_000


def test_an_object_without_a_status_is_new() -> None:
    assert read_object(TrainingSession, told()).status.state == "Created"


def test_an_object_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="base"):
        read_object(TrainingSession, told(spec={"lora": {}}))
    with pytest.raises(ValueError, match="state"):
        read_object(TrainingSession, told(status={"state": "Dreaming"}))


def test_a_cluster_wide_object_has_no_namespace() -> None:
    content = {"metadata": {"name": "acme", "uid": "u", "resourceVersion": "3"}, "spec": {}}
    assert read_object(Tenant, content).metadata.namespace == ""
    assert path_of(Tenant, "", "acme") == "/apis/gristmill.dev/v1alpha1/tenants/acme"
    assert path_of(TrainingSession, "gm-acme", "a/b", "status") == (
        "/apis/gristmill.dev/v1alpha1/namespaces/gm-acme/trainingsessions/a%2Fb/status"
    )


def test_what_is_sent_to_make_it_is_what_was_said_and_no_default() -> None:
    session = TrainingSession(
        metadata=Metadata(name="run-1", namespace="gm-acme", labels={labels.TENANT: "acme"}),
        spec=TrainingSessionSpec(
            base_model_ref=BaseModelRef(name="tiny"), lora=LoraSpec(rank=32, alpha=64)
        ),
    )
    assert object_to_create(session) == {
        "apiVersion": "gristmill.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {
            "name": "run-1",
            "namespace": "gm-acme",
            "labels": {labels.TENANT: "acme"},
        },
        "spec": {"baseModelRef": {"name": "tiny"}, "lora": {"rank": 32, "alpha": 64}},
    }


def test_a_change_is_sent_as_what_changed_on_the_version_it_was_made_on() -> None:
    before = read_object(TrainingSession, told())
    meta = before.metadata.model_copy(update={"annotations": {labels.STOP_REQUESTED: "now"}})
    assert patch_between(before, before) == {}
    assert patch_between(before, before.model_copy(update={"metadata": meta})) == {
        "metadata": {"annotations": {labels.STOP_REQUESTED: "now"}, "resourceVersion": "17"}
    }
    spec = before.spec.model_copy(update={"desired_state": "Stopped"})
    assert patch_between(before, before.model_copy(update={"spec": spec})) == {
        "spec": {"desiredState": "Stopped"},
        "metadata": {"resourceVersion": "17"},
    }


def test_what_was_taken_away_is_sent_as_null() -> None:
    content = told()
    content["metadata"] |= {"annotations": {"a": "1", "b": "2"}}
    before = read_object(TrainingSession, content)
    meta = before.metadata.model_copy(update={"annotations": {"b": "2"}})
    patch = patch_between(before, before.model_copy(update={"metadata": meta}))
    assert patch["metadata"]["annotations"] == {"a": None}
    assert status_patch(before)["metadata"] == {"resourceVersion": "17"}


def status(code: int, reason: str = "", message: str = "m", **details: Any) -> bytes:
    content = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return json.dumps(content | {"details": details}).encode()


QUOTA = 'trainingsessions "x" is forbidden: exceeded quota: gristmill, requested: count/x=1'


@pytest.mark.parametrize(
    ("code", "answer", "error", "wire", "http"),
    [
        (409, status(409, "AlreadyExists"), ConflictError, "ResourceInUse", 400),
        (409, status(409, "Conflict", kind="trainingsessions"), ConflictError, "ResourceInUse", 400),
        (
            409, status(409, "Conflict", kind="resourcequotas"), QuotaBusyError,
            "ServiceUnavailable", 503,
        ),
        (403, status(403, "Forbidden", QUOTA), LimitExceededError, "ResourceLimitExceeded", 400),
        (
            403, status(403, "Forbidden", "status unknown for quota: gristmill"), UnavailableError,
            "ServiceUnavailable", 503,
        ),
        (403, status(403, "Forbidden", "no"), ForbiddenError, "AccessDeniedException", 400),
        (404, status(404, "NotFound"), NotFoundError, "ResourceNotFound", 400),
        (410, status(410, "Expired"), GoneError, "InternalFailure", 500),
        (422, status(422, "Invalid", "rank: no"), InvalidRequestError, "ValidationException", 400),
        (400, status(400, "BadRequest"), InvalidRequestError, "ValidationException", 400),
        (429, status(429, "TooManyRequests"), OverloadedError, "ThrottlingException", 400),
        (500, b"boom", UnavailableError, "ServiceUnavailable", 503),
        (503, b"[]", UnavailableError, "ServiceUnavailable", 503),
        (401, status(401, "Unauthorized"), UnavailableError, "ServiceUnavailable", 503),
    ],
)  # fmt: skip
def test_a_refusal_of_the_api_server_is_one_of_the_wire(
    code: int, answer: bytes, error: type[GristmillError], wire: str, http: int
) -> None:
    found = api_error(code, answer, "create it")
    assert type(found) is error
    told_to_client = control_error(found)
    assert (told_to_client.name, told_to_client.status) == (wire, http)


def test_a_quota_that_is_not_counted_yet_says_what_to_do() -> None:
    told = control_error(
        api_error(403, status(403, "Forbidden", "status unknown for quota: gristmill"), "create it")
    )
    assert told.retryable
    assert "status unknown for quota: gristmill" in told.message
    assert "kubectl wait tenant/" in told.message


def test_the_api_servers_own_words_reach_the_client() -> None:
    found = api_error(422, status(422, "Invalid", "spec.lora.rank: must be 1 to 256"), "create it")
    assert control_error(found).message == "spec.lora.rank: must be 1 to 256"
    found = api_error(403, status(403, "Forbidden", QUOTA), "create it")
    assert control_error(found).message.startswith(QUOTA)
