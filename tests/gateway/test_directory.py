"""What the gateway reads from the store: remembered until it changes, and never another session's."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.credentials import (
    AccessKey,
    AccessKeySpec,
    EndpointSecret,
    EndpointSecretSpec,
)
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import BaseModelRef, TrainingSession, TrainingSessionSpec
from gristmill_gateway.directory import Directory
from gristmill_sessions.local import LocalStore, open_local_store


class CountingStore(LocalStore):
    """Counts what is read."""

    reads = 0
    looks = 0

    def revision(self) -> int:
        self.looks += 1
        return super().revision()

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


async def test_a_session_is_found_by_its_display_name_in_its_own_tenant(
    store: CountingStore,
) -> None:
    store.create(session("ts-abc", "Run-One"))
    store.create(session("plain"))
    directory = Directory(store)
    found = await directory.session("acme", "Run-One")
    assert found is not None
    assert found.metadata.name == "ts-abc"
    assert await directory.session("acme", "plain") is not None
    assert await directory.session("acme", "ts-abc") is None
    assert await directory.session("rival", "Run-One") is None
    assert await directory.session_object("acme", "ts-abc") == found
    assert await directory.session_object("rival", "ts-abc") is None


async def test_answers_are_remembered_until_the_store_changes(store: CountingStore) -> None:
    directory = Directory(store)
    assert await directory.session("acme", "run") is None
    reads = store.reads
    for _ in range(5):
        assert await directory.session("acme", "run") is None
    assert store.reads == reads
    created = store.create(session("run"))
    assert await directory.session("acme", "run") == created
    stopped = created.model_copy(update={"metadata": created.metadata})
    stopped.spec.desired_state = "Stopped"
    store.update(stopped)
    again = await directory.session("acme", "run")
    assert again is not None
    assert again.spec.desired_state == "Stopped"


class LaggingStore(CountingStore):
    """Its lists and its revision stand still, as a cache's whose watch lags; a read by name does not."""

    lags = False

    def revision(self) -> int:
        return 1 if self.lags else super().revision()

    def list(self, kind: type[Any], namespace: str | None = None) -> list[Any]:
        return [] if self.lags else super().list(kind, namespace)


async def test_that_a_session_is_not_there_is_remembered_of_no_name(tmp_path: Path) -> None:
    """Another gateway makes it a moment later, and the watch that would tell of it lags."""
    open_local_store(tmp_path / "store.sqlite3")
    store = LaggingStore(tmp_path / "store.sqlite3")
    store.lags = True
    directory = Directory(store)
    assert await directory.session("acme", "run") is None
    created = store.create(session("run"))
    assert await directory.session("acme", "run") == created


async def test_a_key_is_found_by_its_id(store: CountingStore) -> None:
    directory = Directory(store)
    assert await directory.access_key("AKIA1") is None
    spec = AccessKeySpec(access_key_id="AKIA1", secret_access_key="x", tenant="acme")
    store.create(AccessKey(metadata=Metadata(name="akia1", namespace="acme"), spec=spec))
    found = await directory.access_key("AKIA1")
    assert found is not None
    assert found.spec == spec


async def test_an_endpoint_of_an_earlier_session_of_that_name_is_not_used(
    store: CountingStore,
) -> None:
    directory = Directory(store)
    created = store.create(session("run", uid="new"))
    assert await directory.endpoint(created) is None
    store.create(secret("run", "old"))
    assert await directory.endpoint(created) is None
    store.delete(EndpointSecret, "acme", "run")
    store.create(secret("run", "new", attempt=3))
    found = await directory.endpoint(created)
    assert found is not None
    assert (found.session, found.attempt) == ("new", 3)


async def test_a_request_looks_at_the_store_once_and_sees_what_was_written_before_it(
    store: CountingStore,
) -> None:
    directory = Directory(store)
    store.create(session("run"))
    arrived = time.monotonic()
    for _ in range(3):
        assert await directory.session("acme", "run", arrived) is not None
    assert store.looks == 1
    assert await directory.access_key("AKIA1", arrived) is None
    looks = store.looks
    store.create(session("later"))
    assert await directory.session("acme", "later", time.monotonic()) is not None
    assert store.looks > looks


async def test_questions_at_once_agree_on_the_newest(store: CountingStore) -> None:
    directory = Directory(store)
    for index in range(5):
        store.create(session(f"run-{index}"))
        found = await asyncio.gather(
            *(directory.session("acme", f"run-{at}") for at in range(index + 1) for _ in range(3))
        )
        assert all(each is not None for each in found)
