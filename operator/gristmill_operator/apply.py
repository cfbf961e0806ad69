"""The hands: carry out the planner's actions in a cluster. Each may be done again and ends in the same state."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gristmill_contracts import labels
from gristmill_contracts.base_model import BaseModelResource, BaseModelSpec, Profile
from gristmill_contracts.cluster_http import Directive, UsageGap
from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvariantError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import RegisterSession, TenantAccount
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.resources import Metadata, format_time, parse_time
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.units import now_us
from gristmill_operator.children.jobs import drain_job
from gristmill_operator.children.options import beside as options_beside
from gristmill_operator.children.options import child_options
from gristmill_operator.children.seating import Seating, state_claim_name
from gristmill_operator.children.volume import KEPT_UNTIL, kept_patch
from gristmill_operator.kinds import CLAIMS, JOBS, NAMESPACES, PODS, SESSIONS
from gristmill_operator.memory import Memory
from gristmill_operator.own_addresses import OwnAddresses
from gristmill_operator.parsed import Parsed
from gristmill_operator.place import NameTakenError, Placer, check_owned, failure_of
from gristmill_operator.problems import AlreadyExistsError
from gristmill_operator.seams import Cache, Cluster, Json
from gristmill_operator.settings import OperatorSettings
from gristmill_sessions import observed as planned
from gristmill_sessions.budgets import BudgetLedger, keep_budgets, session_budgets
from gristmill_sessions.cluster import PodRef
from gristmill_sessions.identity import session_name, session_uid, tenant_of
from gristmill_sessions.observed import Action

logger = logging.getLogger(__name__)

FORCED_GRACE_S: Final = 0


class Ledger(BudgetLedger, Protocol):
    """What is told to the ledger of a session."""

    async def put_tenant(self, tenant: str) -> TenantAccount: ...

    async def register_session(self, session: RegisterSession) -> None: ...

    async def put_directive(self, uid: SessionUid, directive: Directive) -> None: ...

    async def record_gap(self, uid: SessionUid, gap: UsageGap) -> None: ...


@dataclass(slots=True, kw_only=True)
class ClusterHands:
    """The implementation of `seams.Hands`."""

    cluster: Cluster
    cache: Cache
    ledger: Ledger
    key: bytes
    """The cluster key."""
    settings: OperatorSettings
    memory: Memory
    clock: Callable[[], int] = now_us
    _parsed: Parsed = field(init=False)
    _own: OwnAddresses = field(init=False)

    def __post_init__(self) -> None:
        self._own = OwnAddresses(cluster=self.cluster, cache=self.cache)
        self._parsed = Parsed(cache=self.cache)

    async def do(self, session: TrainingSession, action: Action) -> None:
        match action:
            case planned.Adopt():
                await self._adopt(session)
            case planned.Register():
                await self._register(session)
            case planned.Place(attempt=attempt, beside=beside):
                await self._place(session, attempt, beside)
            case planned.Drain():
                await self._drain(session)
            case planned.Release():
                await self._release(session)
            case planned.DeleteSession():
                meta = session.metadata
                await self.cluster.delete(SESSIONS, meta.namespace, meta.name, uid=meta.uid)
            case planned.Withdraw() | planned.RemoveFiles():
                raise InvariantError(
                    f"{type(action).__name__} was planned, which a cluster has not"
                )
            case _:
                await self._of_what_is_left(session, action)

    async def _of_what_is_left(self, session: TrainingSession, action: Action) -> None:
        match action:
            case planned.DeletePods(pods=pods, force=force):
                await self._delete_pods(session, pods, force=force)
            case planned.StartDrainJob(attempt=attempt):
                await self._start_drain_job(session, attempt)
            case planned.RemoveDrainJob(name=name, uid=uid):
                await self.cluster.delete(JOBS, session.metadata.namespace, name, uid=uid)
            case planned.RecordGap():
                await self._record_gap(session, action)
            case planned.KeepVolume(unflushed=unflushed):
                await self._keep_volume(session, unflushed=unflushed)
            case planned.RemoveVolume():
                await self._remove_volume(session)

    # --- coming to life --------------------------------------------------------------------------

    async def _adopt(self, session: TrainingSession) -> None:
        """With the version that was looked at: a list of finalizers is replaced as a whole."""
        meta = session.metadata
        others = [each for each in meta.finalizers if each != labels.METERING_FLUSH]
        tenant = self._tenant_name(session)
        patch: Json = {
            "metadata": {
                "resourceVersion": str(meta.resource_version),
                "finalizers": [*others, labels.METERING_FLUSH],
                "annotations": {labels.SESSION_ID: session_uid(session)},
                **({"labels": {labels.TENANT: tenant}} if tenant else {}),
            }
        }
        await self.cluster.merge_patch(SESSIONS, meta.namespace, meta.name, patch)

    async def _register(self, session: TrainingSession) -> None:
        check_identity(session, self.cache.list(SESSIONS))
        tenant = tenant_of(session)
        request = RegisterSession(
            uid=session_uid(session),
            tenant=tenant,
            project=session.spec.project,
            name=session_name(session),
            model=session.spec.base_model_ref.name,
            rank=session.spec.lora.rank,
            created_us=session.metadata.creation_time_us,
            price_book=self._price_book(session),
        )
        try:
            await self.ledger.put_tenant(tenant)
            await self.ledger.register_session(request)
            await self._tell_budgets(session)
        except ConflictError as error:
            # Not a stale object: to look again would not help.
            raise ForbiddenError(f"the ledger refuses the session: {error.message}") from error
        self.memory.registered.add(session.metadata.uid)

    async def keep_budgets(self, session: TrainingSession) -> None:
        if session.metadata.uid not in self.memory.registered:
            return
        try:
            await self._tell_budgets(session)
        except GristmillError as error:
            logger.warning(
                "budget_not_told",
                extra={"session": session_uid(session), "error": error.message},
            )

    async def _tell_budgets(self, session: TrainingSession) -> None:
        """Before its first start, and whenever the spec says something else."""
        uid = session_uid(session)
        wanted = session_budgets(session, uid, self._currency(session))
        if self.memory.budgets.get(session.metadata.uid) == wanted:
            return
        await keep_budgets(self.ledger, tenant_of(session), "session", uid, wanted)
        self.memory.budgets[session.metadata.uid] = wanted

    async def _place(self, session: TrainingSession, attempt: int, beside: tuple[str, ...]) -> None:
        key = session.metadata.uid
        placer = Placer(cluster=self.cluster, cache=self.cache, key=self.key)
        try:
            check_identity(session, self.cache.list(SESSIONS))
            seating = self._seating(session, attempt)
            if session.spec.egress_profiles:
                options = options_beside(seating.options, await self._own.cidrs())
                seating = replace(seating, options=options)
            await placer.place(seating, beside)
        except GristmillError as error:
            failure = failure_of(error)
            if failure is not None:
                self.memory.refused[key] = failure
            raise
        self.memory.refused.pop(key, None)
        self.memory.placed[key] = attempt, seating.workers

    # --- coming to an end ------------------------------------------------------------------------

    async def _drain(self, session: TrainingSession) -> None:
        attempt = session.status.attempt
        directive = Directive(attempt=attempt, desired="stop")
        await self.ledger.put_directive(session_uid(session), directive)
        self.memory.directives[session.metadata.uid] = attempt

    async def _delete_pods(
        self, session: TrainingSession, pods: tuple[PodRef, ...], *, force: bool
    ) -> None:
        grace_s = FORCED_GRACE_S if force else None
        ends = await asyncio.gather(
            *(
                self.cluster.delete(
                    PODS, session.metadata.namespace, pod.name, uid=pod.uid, grace_s=grace_s
                )
                for pod in pods
            ),
            return_exceptions=True,
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def _start_drain_job(self, session: TrainingSession, attempt: int) -> None:
        seating = self._seating(session, attempt, stand_in=True)
        placer = Placer(cluster=self.cluster, cache=self.cache, key=self.key)
        await placer.secret(seating)
        job = drain_job(seating)
        try:
            await self.cluster.create(JOBS, job)
        except AlreadyExistsError:
            meta = job["metadata"]
            found = await self.cluster.get(JOBS, meta["namespace"], meta["name"])
            check_owned(found, session, "job")

    async def _record_gap(self, session: TrainingSession, action: planned.RecordGap) -> None:
        if action.reason == planned.VOLUME_LOST:
            await self._check_lost(session)
        gap = UsageGap(
            attempt=action.attempt,
            acked_seq=action.acked_seq,
            head_seq=action.head_seq,
            reason=action.reason,
            at_us=self.clock(),
        )
        await self.ledger.record_gap(session_uid(session), gap)
        self.memory.gaps[session.metadata.uid] = action.attempt

    async def _check_lost(self, session: TrainingSession) -> None:
        """Past the cache: a record of what is not lost could not be taken back. Raises ConflictError."""
        namespace, name = session.metadata.namespace, state_claim_name(session.metadata.name)
        try:
            found = await self.cluster.get(CLAIMS, namespace, name)
        except NotFoundError:
            return
        if "deletionTimestamp" not in found["metadata"]:
            raise ConflictError(f"volume claim {namespace}/{name} is there after all")

    async def _keep_volume(self, session: TrainingSession, *, unflushed: bool) -> None:
        """From now on the session does not own it. It says until when it is kept, if it may go at all."""
        claim = self._claim(session)
        if claim is None:
            return
        until_us = self.clock() + session.spec.storage.retain_seconds * 1_000_000
        patch = kept_patch(
            claim, session.metadata.uid, unflushed=unflushed, until=format_time(until_us)
        )
        if patch is not None:
            meta = claim["metadata"]
            await self.cluster.merge_patch(CLAIMS, meta["namespace"], meta["name"], patch)

    async def _remove_volume(self, session: TrainingSession) -> None:
        claim = self._claim(session)
        if claim is None or labels.UNFLUSHED in (claim["metadata"].get("labels") or {}):
            return
        meta = claim["metadata"]
        if KEPT_UNTIL in (meta.get("annotations") or {}):
            return  # of an earlier session, which wanted it kept: it goes at that time
        await self.cluster.delete(CLAIMS, meta["namespace"], meta["name"], uid=meta["uid"])

    async def _release(self, session: TrainingSession) -> None:
        meta = session.metadata
        if labels.METERING_FLUSH in meta.finalizers:
            path = f"/metadata/finalizers/{meta.finalizers.index(labels.METERING_FLUSH)}"
            operations: list[Json] = [
                {"op": "test", "path": "/metadata/uid", "value": meta.uid},
                # Others add and remove theirs: the place in the list is ours only if it says so.
                {"op": "test", "path": path, "value": labels.METERING_FLUSH},
                {"op": "remove", "path": path},
            ]
            with contextlib.suppress(NotFoundError):
                await self.cluster.json_patch(SESSIONS, meta.namespace, meta.name, operations)
        self.memory.forget(meta.uid)

    # --- what it is made of ----------------------------------------------------------------------

    def _claim(self, session: TrainingSession) -> Json | None:
        """The session's volume, if it is the session's."""
        meta = session.metadata
        claim = self.cache.get(CLAIMS, meta.namespace, state_claim_name(meta.name))
        if claim is None:
            return None
        marks = claim["metadata"].get("labels") or {}
        return claim if marks.get(labels.SESSION) == meta.name else None

    def _seating(
        self, session: TrainingSession, attempt: int, *, stand_in: bool = False
    ) -> Seating:
        """stand_in: a tenant or model that is gone must not keep a log from being shipped."""
        parsed = self._parsed
        name = session.spec.base_model_ref.name
        tenant = parsed.tenant(self._tenant_name(session) or tenant_of(session))
        model = parsed.model(name)
        if stand_in:
            tenant = tenant or Tenant(metadata=_metadata(tenant_of(session)))
            model = model or _stand_in(session)
        if tenant is None or model is None:
            what = f"base model {name!r}" if model is None else f"tenant {tenant_of(session)!r}"
            raise UnavailableError(f"{what} is gone; make it again")
        return Seating(
            session=session,
            tenant=tenant,
            model=model,
            attempt=attempt,
            options=child_options(self.settings),
        )

    def _tenant_name(self, session: TrainingSession) -> str:
        """By the mark of the namespace, which only the operator writes; "" = it has none."""
        namespace = self.cache.get(NAMESPACES, "", session.metadata.namespace)
        marks = {} if namespace is None else namespace["metadata"].get("annotations") or {}
        return str(marks.get(labels.TENANT, ""))

    def _price_book(self, session: TrainingSession) -> str | None:
        """The name of the session's prices at the ledger; None = the ledger's own choice."""
        tenant = self._parsed.tenant(self._tenant_name(session))
        reference = session.spec.rate_card_ref or (tenant and tenant.spec.rate_card_ref)
        return reference.name if reference else None

    def _currency(self, session: TrainingSession) -> str | None:
        """Of the session's rate card; None = it has none that is known."""
        name = self._price_book(session)
        card = self._parsed.card(name) if name else None
        return card.spec.currency if card else None


def check_identity(session: TrainingSession, sessions: Iterable[Json]) -> None:
    """A restored session brings its identity along; nobody brings one that a live session has.

    The secrets of meters follow from it. Raises NameTakenError.
    """
    uid, meta = session_uid(session), session.metadata
    if uid == meta.uid:
        return
    for other in sessions:
        about = other["metadata"]
        named = (about.get("annotations") or {}).get(labels.SESSION_ID)
        if about["uid"] == meta.uid or uid not in (named, about["uid"]):
            continue
        created = parse_time(about["creationTimestamp"])
        if about["uid"] == uid or (created, about["uid"]) < (meta.creation_time_us, meta.uid):
            raise NameTakenError(
                f"the annotation {labels.SESSION_ID} of session {meta.namespace}/{meta.name} names {uid}, "
                "which is another session; make it without the annotation"
            )


def _metadata(name: str) -> Metadata:
    return Metadata(name=name, namespace="")


def _stand_in(session: TrainingSession) -> BaseModelResource:
    reference = session.spec.base_model_ref
    return BaseModelResource(
        metadata=_metadata(reference.name),
        spec=BaseModelSpec(profiles=[Profile(name=reference.profile)]),
    )
