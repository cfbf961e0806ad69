"""Makes the children of one attempt: what pods need first, then the pods of all ranks at once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from gristmill_contracts import conditions, labels
from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from gristmill_contracts.session import TrainingSession
from gristmill_operator.cache import controller_of
from gristmill_operator.children.claims import device_claims
from gristmill_operator.children.manifest import COMPONENT, WORKER, Manifest, asked
from gristmill_operator.children.pods import worker_pod
from gristmill_operator.children.seating import Seating, attempt_secret_name, state_claim_name
from gristmill_operator.children.secret import attempt_credentials
from gristmill_operator.children.service import rank_names
from gristmill_operator.children.session_policy import session_egress, session_mesh
from gristmill_operator.children.volume import KEPT_UNTIL, state_claim
from gristmill_operator.children.weights import WeightsRefused, weights_mount
from gristmill_operator.drift import differs, quantity
from gristmill_operator.kinds import (
    CLAIMS,
    NETWORK_POLICIES,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    SECRETS,
    SERVICES,
    SESSIONS,
    Kind,
)
from gristmill_operator.problems import AlreadyExistsError, QuotaError, QuotaExceededError
from gristmill_operator.seams import Cache, Cluster, Json
from gristmill_sessions.cluster import ApiFailure

T = TypeVar("T")
QUOTA_TRIES: Final = 8
QUOTA_PAUSE_S: Final = 0.05
"""First pause after a conflict on a quota's counters; it doubles."""


class NameTakenError(ForbiddenError):
    """An object of this name is there, and it is not ours."""


@dataclass(slots=True, kw_only=True)
class Placer:
    cluster: Cluster
    cache: Cache
    key: bytes
    """The cluster key."""

    async def place(self, seating: Seating, beside: tuple[str, ...]) -> None:
        """Again = the same children. Raises ConflictError if the session is not what it was."""
        mount = weights_mount(seating.model, seating.options)
        if isinstance(mount, WeightsRefused):
            raise InvalidRequestError(mount.message)
        await self._check(seating, beside)
        await self._all([self._secret(seating), self._volume(seating), *self._of_ranks(seating)])
        pods = [worker_pod(seating, rank, mount) for rank in range(seating.workers)]
        await self._all([self._pod(pod, seating.session) for pod in pods])
        if seating.attempt > 2:
            # The last attempt's is kept: its log may still be shipped.
            await self._remove_secret(seating, seating.attempt - 2)

    async def secret(self, seating: Seating) -> None:
        """Only what the meter of an attempt is told: for a drain Job, should somebody have removed it."""
        await self._secret(seating)

    # --- may it be done at all -------------------------------------------------------------------

    async def _check(self, seating: Seating, beside: tuple[str, ...]) -> None:
        """Past the cache: two attempts of one session must never write one volume."""
        meta, attempt = seating.session.metadata, seating.attempt
        now = await self.cluster.get(SESSIONS, meta.namespace, meta.name)
        claimed = int((now.get("status") or {}).get("attempt") or 0)
        if now["metadata"]["uid"] != meta.uid or "deletionTimestamp" in now["metadata"]:
            raise ConflictError(f"session {meta.namespace}/{meta.name} is deleted")
        if claimed != attempt:
            raise ConflictError(
                f"session {meta.namespace}/{meta.name} is at attempt {claimed}, not {attempt}"
            )
        if attempt == 1:
            return
        selector = f"{labels.SESSION}={meta.name},{COMPONENT}={WORKER}"
        for pod in await self.cluster.list(PODS, meta.namespace, selector=selector):
            about = pod["metadata"]
            other = about["labels"].get(labels.ATTEMPT) != str(attempt)
            if other and is_owned(pod, seating.session) and about["uid"] not in beside:
                raise ConflictError(
                    f"pod {about['namespace']}/{about['name']} of an earlier attempt is not gone yet"
                )

    # --- what pods need --------------------------------------------------------------------------

    def _of_ranks(self, seating: Seating) -> list[Awaitable[None]]:
        """For several ranks, for devices by claim, and for egress that the session asks for."""
        made: list[Awaitable[None]] = []
        if seating.workers > 1:
            made.append(self._apply(SERVICES, rank_names(seating), seating.session))
            made.append(self._write(NETWORK_POLICIES, session_mesh(seating.session)))
        egress = session_egress(seating.session, seating.tenant, seating.options.network)
        if egress is not None:
            made.append(self._write(NETWORK_POLICIES, egress))
        if seating.profile.dra is not None:
            template = device_claims(seating, seating.profile.dra)
            made.append(self._write(RESOURCE_CLAIM_TEMPLATES, template))
        return made

    async def _volume(self, seating: Seating) -> None:
        namespace, name = seating.namespace, state_claim_name(seating.name)
        found = self.cache.get(CLAIMS, namespace, name)
        if found is None:
            if conditions.is_true(seating.session.status.conditions, conditions.STARTED):
                # It went since the look: with an empty one the session would go on as if it had no past.
                raise ConflictError(f"volume claim {namespace}/{name} is gone, and the log with it")
            found = await self._made_claim(asked(state_claim(seating)))
        if found is None:
            return
        if "deletionTimestamp" in found["metadata"]:
            raise UnavailableError(f"volume {namespace}/{name} is being deleted; wait for its end")
        marks = found["metadata"].get("labels") or {}
        if marks.get(labels.SESSION) != seating.name:
            raise NameTakenError(
                f"volume claim {namespace}/{name} was not made for this session; remove or rename it"
            )
        until = (found["metadata"].get("annotations") or {}).get(KEPT_UNTIL)
        # An earlier session of this name was promised its volume until then; one that wants to keep it
        # renews the promise at its own end.
        kept = until is not None and seating.session.spec.storage.retain == "Delete"
        claim = state_claim(seating, unflushed=labels.UNFLUSHED in marks, kept=kept)
        wanted = asked(fitted(claim, found))
        if differs(found, wanted):
            await self._apply_claim(wanted, found)
        if until is not None and not kept:
            patch: Json = {"metadata": {"annotations": {KEPT_UNTIL: None}}}
            await self.cluster.merge_patch(CLAIMS, namespace, name, patch)

    async def _made_claim(self, wanted: Manifest) -> Json | None:
        """None = it is made; else the claim that has its name."""
        meta = wanted["metadata"]
        try:
            await patient(lambda: self.cluster.create(CLAIMS, wanted))
        except AlreadyExistsError:
            return await self.cluster.get(CLAIMS, meta["namespace"], meta["name"])
        return None

    async def _apply_claim(self, wanted: Manifest, found: Json) -> None:
        """A class that was asked for by other settings is ours for life: to leave it out would remove it."""
        try:
            await self.cluster.apply(CLAIMS, wanted)
        except InvalidRequestError:
            name = found["spec"].get("storageClassName")
            if not name or "storageClassName" in wanted["spec"]:
                raise
            spec = {**wanted["spec"], "storageClassName": name}
            await self.cluster.apply(CLAIMS, {**wanted, "spec": spec})

    async def _secret(self, seating: Seating) -> None:
        wanted = attempt_credentials(seating, self.key)
        try:
            await self.cluster.create(SECRETS, wanted)
        except AlreadyExistsError:
            meta = wanted["metadata"]
            found = await self.cluster.get(SECRETS, meta["namespace"], meta["name"])
            if is_owned(found, seating.session) and found.get("data") == wanted["data"]:
                return
            # Of an earlier session of this name, or of somebody who would like to be its meter.
            uid = found["metadata"]["uid"]
            await self.cluster.delete(SECRETS, meta["namespace"], meta["name"], uid=uid)
            await self.cluster.create(SECRETS, wanted)

    async def _remove_secret(self, seating: Seating, attempt: int) -> None:
        name = attempt_secret_name(seating.name, attempt)
        try:
            found = await self.cluster.get(SECRETS, seating.namespace, name)
        except NotFoundError:
            return
        if is_owned(found, seating.session):
            uid = found["metadata"]["uid"]
            await self.cluster.delete(SECRETS, seating.namespace, name, uid=uid)

    # --- pods ------------------------------------------------------------------------------------

    async def _pod(self, wanted: Manifest, session: TrainingSession) -> None:
        try:
            await patient(lambda: self.cluster.create(PODS, wanted))
        except AlreadyExistsError:
            meta = wanted["metadata"]
            found = await self.cluster.get(PODS, meta["namespace"], meta["name"])
            check_owned(found, session, "pod")

    # --- how -------------------------------------------------------------------------------------

    async def _apply(self, kind: Kind, manifest: Manifest, session: TrainingSession) -> None:
        """Only what is new, so that a second time writes nothing."""
        wanted, meta = asked(manifest), manifest["metadata"]
        found = self.cache.get(kind, meta["namespace"], meta["name"])
        if found is not None:
            check_owned(found, session, kind.kind)
        if differs(found, wanted):
            await self.cluster.apply(kind, wanted)

    async def _write(self, kind: Kind, manifest: Manifest) -> None:
        await self.cluster.apply(kind, asked(manifest))

    async def _all(self, doing: list[Awaitable[None]]) -> None:
        """Let all of them end, then raise the first error: none goes on behind the next look."""
        ends = await asyncio.gather(*doing, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


async def patient(write: Callable[[], Awaitable[T]]) -> T:
    """Again at once where a quota's counters were changed by others meanwhile: that refuses nothing."""
    pause_s = QUOTA_PAUSE_S
    for _ in range(QUOTA_TRIES):
        try:
            return await write()
        except QuotaExceededError:
            raise
        except QuotaError:
            await asyncio.sleep(pause_s)
            pause_s *= 2
    return await write()


def fitted(wanted: Manifest, found: Json) -> Manifest:
    """A claim keeps class and access modes for life, and never gets smaller."""
    there, spec = found["spec"], dict(wanted["spec"])
    spec["accessModes"] = there["accessModes"]
    if spec.pop("storageClassName", None) and there.get("storageClassName"):
        # Where none was asked for, the cluster's default is not ours to ask for.
        spec["storageClassName"] = there["storageClassName"]
    sizes = (spec["resources"]["requests"]["storage"], there["resources"]["requests"]["storage"])
    if (quantity(sizes[0]) or 0) < (quantity(sizes[1]) or 0):
        spec["resources"] = {"requests": {"storage": sizes[1]}}
    return {**wanted, "spec": spec}


def is_owned(body: Json, session: TrainingSession) -> bool:
    owner = controller_of(body)
    return owner is not None and owner["uid"] == session.metadata.uid


def check_owned(body: Json, session: TrainingSession, what: str) -> None:
    if is_owned(body, session):
        return
    meta, owner = body["metadata"], controller_of(body)
    whose = f"{owner['kind']} {owner['name']}" if owner else "nobody"
    raise NameTakenError(
        f"{what} {meta['namespace']}/{meta['name']} belongs to {whose}, not to session "
        f"{session.metadata.name}; delete it, or name the session otherwise"
    )


def failure_of(error: GristmillError) -> ApiFailure | None:
    """What a refused placement is to the planner; None = look again, nothing was refused."""
    if isinstance(error, NameTakenError):
        return ApiFailure(reason="NameTaken", message=error.message)
    if isinstance(error, QuotaExceededError):
        return ApiFailure(reason="QuotaExceeded", message=error.message)
    if isinstance(error, ForbiddenError | NotFoundError):
        return ApiFailure(reason="Refused", message=error.message)
    if isinstance(error, InvalidRequestError):
        return ApiFailure(reason="Invalid", message=error.message)
    if isinstance(error, OverloadedError | UnavailableError):
        return ApiFailure(reason="Unavailable", message=error.message)
    return None
