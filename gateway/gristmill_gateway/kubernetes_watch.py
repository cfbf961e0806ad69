"""Keeps the cache of one kind as the API server has it: list once, then watch; start over when told to."""

import asyncio
import logging
import random
import time
from contextlib import aclosing
from typing import Generic, TypeVar

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.resources import Resource
from gristmill_gateway.kubernetes_api import ApiServer
from gristmill_gateway.kubernetes_cache import Cache
from gristmill_gateway.kubernetes_errors import GoneError
from gristmill_gateway.kubernetes_objects import COLLECTIONS, Json, path_of, read_object

R = TypeVar("R", bound=Resource)

logger = logging.getLogger(__name__)

BACKOFF_S_MIN = 0.2
STEADY_S = 5.0
"""A watch that lived this long was a good one: the next failure begins with a short pause again."""


class Reflector(Generic[R]):
    """`run` never ends by itself. `away` tells whether the cache is being kept up just now."""

    def __init__(self, api: ApiServer, kind: type[R], cache: Cache[R]) -> None:
        self._api = api
        self._kind = kind
        self._cache = cache
        self._version = ""
        self.away = True
        self.name = COLLECTIONS[kind].plural

    async def run(self) -> None:
        pause_s = BACKOFF_S_MIN
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except GoneError as error:
                self._version = ""
                logger.info("watch_restarts", extra={"kind": self.name, "reason": error.message})
            except (GristmillError, TimeoutError) as error:
                self.away = True
                logger.warning("watch_lost", extra={"kind": self.name, "reason": str(error)})
            except Exception:
                # A bug in reading one object must not leave this gateway with what it knew for good.
                self.away, self._version = True, ""
                logger.exception("watch_crashed", extra={"kind": self.name})
            if time.monotonic() - began > STEADY_S:
                pause_s = BACKOFF_S_MIN
                continue
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            pause_s = min(limits.WATCH_BACKOFF_S_MAX, pause_s * 2)

    async def _list(self) -> None:
        """All objects, in pages of one version."""
        found: list[R] = []
        query = {"limit": str(limits.API_PAGE_MAX)}
        while True:
            page = await self._api.get(path_of(self._kind), query)
            for content in page.get("items") or ():
                resource = self._read(content)
                if resource is not None:
                    found.append(resource)
            metadata = page.get("metadata", {})
            after = metadata.get("continue")
            if not after:
                break
            query = query | {"continue": after}
        self._version = str(metadata.get("resourceVersion", ""))
        self._cache.replace(found, _number(self._version))
        logger.info("watch_listed", extra={"kind": self.name, "count": len(found)})

    async def _watch(self) -> None:
        """Until the API server ends it, as it does now and then. Raises what ended it otherwise."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(int(limits.WATCH_LIFETIME_S * random.uniform(0.8, 1.0))),  # noqa: S311
        }
        async with asyncio.timeout(limits.WATCH_LIFETIME_S + limits.WATCH_SILENCE_S):
            events = self._api.watch(path_of(self._kind), query, self._opened)
            async with aclosing(events):
                async for event in events:
                    self._take(event)

    def _opened(self) -> None:
        self.away = False

    def _take(self, event: Json) -> None:
        content = event.get("object") or {}
        metadata = content.get("metadata") or {}
        self._version = str(metadata.get("resourceVersion") or self._version)
        version = _number(self._version)
        if event.get("type") == "BOOKMARK":
            self._cache.marked(version)
        elif event.get("type") == "DELETED":
            place = (str(metadata.get("namespace", "")), str(metadata.get("name", "")))
            self._cache.gone(place, str(metadata.get("uid", "")), version)
        else:
            resource = self._read(content)
            if resource is not None:
                self._cache.told(resource)

    def _read(self, content: Json) -> R | None:
        """None for an object that is not of our shape: it is as good as not there, and the log says so."""
        try:
            return read_object(self._kind, content)
        except ValueError as error:
            metadata = content.get("metadata") or {}
            extra = {"kind": self.name, "object": metadata.get("name"), "reason": str(error)[:500]}
            logger.warning("object_unreadable", extra=extra)
            return None


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0
