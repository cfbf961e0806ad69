"""What the gateway reads from the store: remembered until it changes, and never another session's."""

from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.session import (
    AccessKey,
    AccessKeySpec,
    BaseModelRef,
    EndpointSecret,
    EndpointSecretSpec,
    Metadata,
    TrainingSession,
    TrainingSessionSpec,
)
from gristmill_gateway.directory import Directory
from gristmill_sessions.local import LocalStore, open_local_store


class CountingStore(LocalStore):
    """Counts what is read."""

    reads = 0

    def list(self, kind: type[Any], namespace: str | None = None) -> list[Any]:
        self.reads += 1
        return super().list(kind, namespace)


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> CountingStore:
    open_local_store(tmp_path / "store.sqlite3")
    return CountingStore(tmp_path / "store.sqlite3")


def session(name: str, display: str = "", tenant: str = "acme", uid: str = "u") -> TrainingSession:
    return TrainingSession(
        metadata=Metadata(name=name, namespace=tenant, annotations={labels.SESSION_ID: uid}),
        spec=TrainingSessionSpec(display_name=display, base_model_ref=BaseModelRef(name="tiny")),
    )


def secret(name: str, uid: str, attempt: int = 1) -> EndpointSecret:
    return EndpointSecret(
        metadata=Metadata(name=name, namespace="acme"),
        spec=EndpointSecretSpec(
            session_uid=uid, attempt=attempt, endpoint="http://127.0.0.1:1", secret="s"
        ),
    )


def test_a_session_is_found_by_its_display_name_in_its_own_tenant(store: CountingStore) -> None:
    store.create(session("ts-abc", "Run.1"))
    store.create(session("plain"))
    directory = Directory(store)
    found = directory.session("acme", "Run.1")
    assert found is not None
    assert found.metadata.name == "ts-abc"
    assert directory.session("acme", "plain") is not None
    assert directory.session("acme", "ts-abc") is None
    assert directory.session("rival", "Run.1") is None
    assert directory.session_object("acme", "ts-abc") == found
    assert directory.session_object("rival", "ts-abc") is None


def test_answers_are_remembered_until_the_store_changes(store: CountingStore) -> None:
    directory = Directory(store)
    assert directory.session("acme", "run") is None
    reads = store.reads
    for _ in range(5):
        assert directory.session("acme", "run") is None
    assert store.reads == reads
    created = store.create(session("run"))
    assert directory.session("acme", "run") == created
    stopped = created.model_copy(update={"metadata": created.metadata})
    stopped.spec.desired_state = "Stopped"
    store.update(stopped)
    again = directory.session("acme", "run")
    assert again is not None
    assert again.spec.desired_state == "Stopped"


def test_a_key_is_found_by_its_id(store: CountingStore) -> None:
    directory = Directory(store)
    assert directory.access_key("AKIA1") is None
    spec = AccessKeySpec(access_key_id="AKIA1", secret_access_key="x", tenant="acme")
    store.create(AccessKey(metadata=Metadata(name="akia1", namespace="acme"), spec=spec))
    found = directory.access_key("AKIA1")
    assert found is not None
    assert found.spec == spec


def test_an_endpoint_of_an_earlier_session_of_that_name_is_not_used(store: CountingStore) -> None:
    directory = Directory(store)
    created = store.create(session("run", uid="new"))
    assert directory.endpoint(created) is None
    store.create(secret("run", "old"))
    assert directory.endpoint(created) is None
    store.delete(EndpointSecret, "acme", "run")
    store.create(secret("run", "new", attempt=3))
    found = directory.endpoint(created)
    assert found is not None
    assert (found.session, found.attempt) == ("new", 3)
    assert directory.endpoint(created, fresh=True) == found
