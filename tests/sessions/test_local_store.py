"""The store behaves like an API server: versions, generations, finalizers, one winner of a race."""

import multiprocessing
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from gristmill_contracts.errors import ConflictError, NotFoundError, UnavailableError
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import BaseModelRef, TrainingSession, TrainingSessionSpec
from gristmill_contracts.tenant import Tenant, TenantSpec
from gristmill_sessions.local import LocalStore, open_local_store
from gristmill_testing.store_race import count_up


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return open_local_store(tmp_path / "deep" / "store.sqlite")


def make(name: str = "run-1", namespace: str = "acme", **meta: object) -> TrainingSession:
    return TrainingSession(
        metadata=Metadata.model_validate({"name": name, "namespace": namespace, **meta}),
        spec=TrainingSessionSpec(base_model_ref=BaseModelRef(name="tiny")),
    )


def stopped(session: TrainingSession) -> TrainingSession:
    spec = session.spec.model_copy(update={"desired_state": "Stopped"})
    return session.model_copy(update={"spec": spec})


def with_state(session: TrainingSession, state: str) -> TrainingSession:
    status = session.status.model_copy(update={"state": state})
    return session.model_copy(update={"status": status})


def test_a_created_resource_has_identity_version_and_generation(store: LocalStore) -> None:
    created = store.create(make())
    meta = created.metadata
    assert (len(meta.uid), meta.generation, meta.deletion_time_us) == (36, 1, None)
    assert meta.resource_version == store.revision() > 0
    assert meta.creation_time_us > 1_600_000_000_000_000
    assert store.get(TrainingSession, "acme", "run-1") == created


def test_only_the_owner_may_read_the_file(store: LocalStore, tmp_path: Path) -> None:
    store.create(make())
    for file in (tmp_path / "deep").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_name_is_taken_once_in_its_namespace_and_kind(store: LocalStore) -> None:
    store.create(make())
    store.create(make(namespace="other"))
    store.create(Tenant(metadata=Metadata(name="run-1", namespace="acme")))
    with pytest.raises(ConflictError, match="exists already"):
        store.create(make())


def test_what_is_not_there_is_not_found(store: LocalStore) -> None:
    absent = make()
    for call in (
        lambda: store.get(TrainingSession, "acme", "run-1"),
        lambda: store.update(absent),
        lambda: store.update_status(absent),
        lambda: store.delete(TrainingSession, "acme", "run-1"),
    ):
        with pytest.raises(NotFoundError, match="TrainingSession 'run-1'"):
            call()
    assert store.list(TrainingSession) == []


def test_lists_are_in_the_order_of_creation(store: LocalStore) -> None:
    for name, namespace in (("c", "x"), ("a", "y"), ("b", "x")):
        store.create(make(name, namespace))
    assert [each.metadata.name for each in store.list(TrainingSession)] == ["c", "a", "b"]
    assert [each.metadata.name for each in store.list(TrainingSession, "x")] == ["c", "b"]


def test_a_change_of_an_old_version_is_refused(store: LocalStore) -> None:
    first = store.create(make())
    store.update(stopped(first))
    for change in (store.update, store.update_status):
        with pytest.raises(ConflictError, match="read it again"):
            change(first)


def test_the_generation_grows_with_the_spec_alone(store: LocalStore) -> None:
    first = store.create(make())
    labelled = first.metadata.model_copy(update={"labels": {"a": "b"}})
    second = store.update(first.model_copy(update={"metadata": labelled}))
    third = store.update(stopped(second))
    fourth = store.update_status(with_state(third, "Stopping"))
    generations = [each.metadata.generation for each in (first, second, third, fourth)]
    assert generations == [1, 1, 2, 2]
    versions = [each.metadata.resource_version for each in (first, second, third, fourth)]
    assert versions == sorted(set(versions))


def test_spec_and_status_are_written_apart(store: LocalStore) -> None:
    first = store.create(make())
    second = store.update(stopped(with_state(first, "Failed")))
    assert (second.status.state, second.spec.desired_state) == ("Created", "Stopped")
    third = store.update_status(
        with_state(second, "Stopping").model_copy(update={"spec": first.spec})
    )
    assert (third.status.state, third.spec.desired_state) == ("Stopping", "Stopped")


def test_what_the_store_fills_cannot_be_changed(store: LocalStore) -> None:
    first = store.create(make())
    forged = first.metadata.model_copy(
        update={"uid": "x", "creation_time_us": 1, "generation": 9, "deletion_time_us": 1}
    )
    meta = store.update(first.model_copy(update={"metadata": forged})).metadata
    assert (meta.uid, meta.creation_time_us, meta.generation, meta.deletion_time_us) == (
        first.metadata.uid, first.metadata.creation_time_us, 1, None,
    )  # fmt: skip


def test_a_resource_without_finalizers_goes_at_once(store: LocalStore) -> None:
    store.create(make())
    store.delete(TrainingSession, "acme", "run-1")
    assert store.list(TrainingSession) == []
    again = store.create(make())
    assert again.metadata.generation == 1


def test_a_resource_with_finalizers_waits_for_the_last_of_them(store: LocalStore) -> None:
    store.create(make(finalizers=["a", "b"]))
    store.delete(TrainingSession, "acme", "run-1")
    marked = store.get(TrainingSession, "acme", "run-1")
    store.delete(TrainingSession, "acme", "run-1")
    again = store.get(TrainingSession, "acme", "run-1")
    assert again.metadata.deletion_time_us == marked.metadata.deletion_time_us is not None
    for left in (["b"], []):
        current = store.get(TrainingSession, "acme", "run-1")
        meta = current.metadata.model_copy(update={"finalizers": left})
        store.update(current.model_copy(update={"metadata": meta}))
    with pytest.raises(NotFoundError):
        store.get(TrainingSession, "acme", "run-1")


def test_every_change_moves_the_revision_and_a_refused_one_does_not(store: LocalStore) -> None:
    seen = [store.revision()]
    first = store.create(make(finalizers=["a"]))
    seen.append(store.revision())
    second = store.update(stopped(first))
    seen.append(store.revision())
    store.update_status(with_state(second, "Stopping"))
    seen.append(store.revision())
    store.delete(TrainingSession, "acme", "run-1")
    seen.append(store.revision())
    assert seen == sorted(set(seen))
    with pytest.raises(ConflictError):
        store.create(make())
    with pytest.raises(ConflictError):
        store.update(first)
    assert store.revision() == seen[-1]


def test_a_resource_without_status_is_kept_whole(store: LocalStore) -> None:
    tenant = store.create(Tenant(metadata=Metadata(name="acme", namespace="")))
    spec = TenantSpec(suspended=True)
    store.update(tenant.model_copy(update={"spec": spec}))
    assert store.get(Tenant, "", "acme").spec.suspended


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(UnavailableError, match=r"store\.sqlite"):
        open_local_store(path)


def test_a_store_that_is_gone_is_an_error_of_ours(store: LocalStore, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "deep" / "store.sqlite") as database:
        database.execute("DROP TABLE objects")
    database.close()
    with pytest.raises(UnavailableError, match="no such table"):
        store.list(TrainingSession)
    with pytest.raises(UnavailableError, match="no such table"):
        store.create(make())


# --- many at once --------------------------------------------------------------------------------

ROUNDS = 25


def test_no_change_is_lost_between_processes_and_threads(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    open_local_store(path).create(make(labels={"n": "0"}))
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=count_up, args=(path, "acme", "run-1", ROUNDS)) for _ in range(2)
    ]
    threads = [
        threading.Thread(target=count_up, args=(path, "acme", "run-1", ROUNDS)) for _ in range(2)
    ]
    for each in (*processes, *threads):
        each.start()
    for each in (*processes, *threads):
        each.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    kept = open_local_store(path).get(TrainingSession, "acme", "run-1")
    assert kept.metadata.labels["n"] == str(4 * ROUNDS)


def test_opening_the_store_again_frees_no_lock_of_this_process(tmp_path: Path) -> None:
    """Else another process, the last as far as it can see, deletes the log that this one reads and writes."""
    path = tmp_path / "store.sqlite"
    held = open_local_store(path)
    held.create(make(labels={"n": "0"}))
    open_local_store(path)
    other = multiprocessing.get_context("spawn").Process(
        target=count_up, args=(path, "acme", "run-1", 1)
    )
    other.start()
    other.join(60)
    assert other.exitcode == 0
    assert held.get(TrainingSession, "acme", "run-1").metadata.labels["n"] == "1"
    assert path.with_name(f"{path.name}-wal").exists()


def test_of_many_that_create_one_name_one_wins(tmp_path: Path) -> None:
    store = open_local_store(tmp_path / "store.sqlite")
    outcomes: list[str] = []

    def create() -> None:
        try:
            store.create(make())
            outcomes.append("won")
        except ConflictError:
            outcomes.append("lost")

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["lost"] * 7 + ["won"]
