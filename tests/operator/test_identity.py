"""A session's durable identity is brought along by a restore, and by nobody else."""

from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.session import TrainingSession
from gristmill_operator.apply import check_identity
from gristmill_operator.place import NameTakenError
from gristmill_testing.cluster_objects import SESSION_UID, a_session

VICTIM = "11111111-0000-4000-8000-000000000001"


def claiming(uid: str) -> TrainingSession:
    """Session `run`, made at 1_760_000_000 s, that names an identity."""
    found = a_session()
    meta = found.metadata.model_copy(update={"annotations": {labels.SESSION_ID: uid}})
    return found.model_copy(update={"metadata": meta})


def other(uid: str, created: str, named: str = "") -> dict[str, Any]:
    marks = {labels.SESSION_ID: named} if named else {}
    meta = {"name": "other", "namespace": "gm-b", "uid": uid, "creationTimestamp": created}
    return {"metadata": {**meta, "annotations": marks}}


EARLIER, LATER = "2025-01-01T00:00:00Z", "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(other(VICTIM, EARLIER), id="its own uid"),
        pytest.param(other(VICTIM, LATER), id="its own uid, made later"),
        pytest.param(other("x", EARLIER, named=VICTIM), id="restored before"),
    ],
)
def test_nobody_takes_the_identity_of_a_live_session(victim: dict[str, Any]) -> None:
    with pytest.raises(NameTakenError, match="which is another session"):
        check_identity(claiming(VICTIM), [victim])


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="alone"),
        pytest.param([other("x", EARLIER)], id="beside another"),
        pytest.param([other("x", LATER, named=VICTIM)], id="the copy came later"),
        pytest.param([other(SESSION_UID, EARLIER, named=VICTIM)], id="itself"),
    ],
)
def test_a_restored_session_keeps_its_identity(others: list[dict[str, Any]]) -> None:
    check_identity(claiming(VICTIM), others)


def test_a_session_of_its_own_identity_is_never_asked() -> None:
    check_identity(claiming(SESSION_UID), [other("x", EARLIER, named=SESSION_UID)])
