"""Which of several operators acts: the one that holds the Lease.

Times of other machines are never compared with ours: a Lease has ended when it did not change for its
duration *as seen from here*. The holder stops writing `renew_s` after its last renewal began, which is
before anybody else may take over.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from gristmill_contracts import labels
from gristmill_contracts.errors import ConflictError, GristmillError, NotFoundError
from gristmill_contracts.units import now_us
from gristmill_operator.kinds import LEASES, Kind
from gristmill_operator.problems import NotLeaderError
from gristmill_operator.seams import Json

logger = logging.getLogger(__name__)


class LeaseApi(Protocol):
    """The part of the client that is needed; its requests are never held back by others."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Json: ...

    async def create(self, kind: Kind, body: Json) -> Json: ...

    async def merge_patch(self, kind: Kind, namespace: str, name: str, patch: Json) -> Json: ...


@dataclass(slots=True, kw_only=True)
class Elector:
    """`acquire`, then `hold` for as long as it returns not; `release` at the end."""

    api: LeaseApi
    namespace: str
    identity: str
    lease_s: float
    renew_s: float
    retry_s: float
    clock: Callable[[], float] = time.monotonic
    wall_us: Callable[[], int] = now_us
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _seen: Json = field(default_factory=dict)
    """The Lease as it was last read or written."""
    _seen_at: float = float("-inf")
    """When it last changed, as seen from here."""
    _renewed_at: float = float("-inf")
    """When our last successful renewal began."""
    _lost_at: float | None = None
    """Since when this process has only to end."""

    @property
    def leads(self) -> bool:
        return self._left_s() > 0

    def fence(self) -> float:
        """Seconds for which this process may write. Raises NotLeaderError when it may not."""
        left_s = self._left_s()
        if left_s <= 0:
            raise NotLeaderError(
                f"{self.identity} does not hold the Lease {self.namespace}/{labels.LEASE}, or could "
                "not renew it in time; nothing was written"
            )
        return left_s

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
        while not await self._try():
            await self.sleep(self.retry_s)
        logger.info("lease_acquired", extra={"identity": self.identity})

    @property
    def lost_s(self) -> float:
        """How long ago `hold` gave up; 0 = it did not."""
        return 0.0 if self._lost_at is None else self.clock() - self._lost_at

    async def hold(self) -> None:
        """Renew until that fails for `renew_s`, or somebody else holds the Lease; then raise NotLeaderError."""
        try:
            await self._renew_on()
        except NotLeaderError:
            self._lost_at = self.clock()
            raise

    async def _renew_on(self) -> None:
        while True:
            await self.sleep(self.retry_s)
            if not await self._try():
                self.fence()
                if self._holder() not in ("", self.identity):
                    self._renewed_at = float("-inf")
                    self.fence()

    async def release(self) -> None:
        """Let another take over at once. Nothing may be written afterwards."""
        if not self.leads:
            return
        self._renewed_at = float("-inf")
        try:
            await self._change({"holderIdentity": "", "leaseDurationSeconds": 1})
        except GristmillError as error:
            logger.warning("lease_not_released", extra={"error": error.message})

    async def _try(self) -> bool:
        """One attempt to take or keep it. False: somebody else holds it, or nobody answered."""
        started = self.clock()
        try:
            if not self._seen or self._holder() != self.identity:
                self._note(await self.api.get(LEASES, self.namespace, labels.LEASE))
            if self._holder() not in ("", self.identity) and not self._has_ended():
                return False
            await self._change(self._claim())
        except NotFoundError:
            return await self._create(started)
        except ConflictError:
            # Another was faster; what is there now is read next time.
            self._seen = {}
            return False
        except GristmillError as error:
            logger.warning("lease_unreachable", extra={"error": error.message})
            return False
        self._renewed_at = started
        return True

    async def _create(self, started: float) -> bool:
        meta = {"namespace": self.namespace, "name": labels.LEASE}
        try:
            self._note(await self.api.create(LEASES, {"metadata": meta, "spec": self._claim()}))
        except GristmillError as error:
            logger.warning("lease_unreachable", extra={"error": error.message})
            return False
        self._renewed_at = started
        return True

    def _claim(self) -> Json:
        now = micro_time(self.wall_us())
        claim: Json = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(self.lease_s),
            "renewTime": now,
        }
        spec = self._seen.get("spec") or {}
        if spec.get("holderIdentity") != self.identity:
            claim["acquireTime"] = now
            claim["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        return claim

    async def _change(self, spec: Json) -> None:
        version = self._seen["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version}, "spec": spec}
        self._note(await self.api.merge_patch(LEASES, self.namespace, labels.LEASE, patch))

    def _note(self, lease: Json) -> None:
        if not self._seen or _version(lease) != _version(self._seen):
            self._seen_at = self.clock()
        self._seen = lease

    def _holder(self) -> str:
        return str((self._seen.get("spec") or {}).get("holderIdentity") or "")

    def _has_ended(self) -> bool:
        lasts_s = float((self._seen.get("spec") or {}).get("leaseDurationSeconds") or self.lease_s)
        return self.clock() > self._seen_at + lasts_s

    def _left_s(self) -> float:
        return self._renewed_at + self.renew_s - self.clock()


def _version(lease: Json) -> str:
    return str(lease["metadata"]["resourceVersion"])


def micro_time(time_us: int) -> str:
    """RFC 3339 with microseconds, as the API's MicroTime wants it."""
    moment = datetime.fromtimestamp(time_us // 1_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_us % 1_000_000:06d}Z"
