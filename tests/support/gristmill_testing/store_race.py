"""A writer for races on one store; importable, so that other processes can run it."""

from pathlib import Path

from gristmill_contracts.errors import ConflictError
from gristmill_contracts.session import TrainingSession
from gristmill_sessions.local import open_local_store


def count_up(path: Path, namespace: str, name: str, rounds: int) -> None:
    """Add one to a number kept in label `n`, `rounds` times, repeating whatever met another writer."""
    store = open_local_store(path)
    done = 0
    while done < rounds:
        current = store.get(TrainingSession, namespace, name)
        value = int(current.metadata.labels["n"]) + 1
        meta = current.metadata.model_copy(update={"labels": {"n": str(value)}})
        try:
            store.update(current.model_copy(update={"metadata": meta}))
        except ConflictError:
            continue
        done += 1
