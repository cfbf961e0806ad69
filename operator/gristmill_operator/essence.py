"""What kopf remembers of objects: nothing. It copies each of them several times to find out what changed,
which only handlers that we do not have would be told.
"""

from typing import Any

import kopf


class NoEssence(kopf.DiffBaseStorage):
    """Of every object, the same: nothing of it was ever handled."""

    def build(
        self, *, body: kopf.Body, extra_fields: Any = None
    ) -> kopf.BodyEssence:  # Any: kopf's own
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """It would be a write to the object."""


class NoProgress(kopf.ProgressStorage):
    """Nothing is ever begun."""

    def fetch(self, *, key: Any, body: kopf.Body) -> None:  # Any: a handler's name
        return None

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """It would be a write to the object."""

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Nothing is there."""

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """It would be a write to the object."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
