"""Keeps each tenant's namespace, and all in it that stands between tenants, as the Tenant says.

A namespace is never taken from anybody, and nothing of it is deleted but by a tenant whose deletionPolicy
says so, where the operator was given that right. Its children have no owner: a custom resource
definition that is deleted and made again takes none of them along.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gristmill_contracts import conditions, labels
from gristmill_contracts.conditions import condition
from gristmill_contracts.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import TenantAccount
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.units import now_us
from gristmill_operator.children.manifest import Manifest, asked
from gristmill_operator.children.namespace import (
    Claim,
    claim_namespace,
    namespace_name,
    tenant_namespace,
)
from gristmill_operator.children.options import ChildOptions, beside, child_options
from gristmill_operator.children.quota import resource_quota
from gristmill_operator.codec import status_patch, tenant_from
from gristmill_operator.drift import differs
from gristmill_operator.kinds import (
    CLAIMS,
    NAMESPACES,
    SECRETS,
    SESSIONS,
    TENANTS,
    Kind,
)
from gristmill_operator.own_addresses import OwnAddresses
from gristmill_operator.parsed import Parsed
from gristmill_operator.problems import AlreadyExistsError
from gristmill_operator.quota_count import COUNTED, keep_counted
from gristmill_operator.seams import Cache, Cluster, Json, Recorder
from gristmill_operator.settings import OperatorSettings
from gristmill_operator.tenant_budget import look_at_budget
from gristmill_operator.tenant_children import (
    Wanted,
    access_children,
    growths,
    key_children,
    network_children,
    outdated,
    purge,
    quota_children,
    revoked_secrets,
)
from gristmill_operator.tenant_status import (
    network_condition,
    quota_condition,
    ready_condition,
)
from gristmill_sessions.budgets import BudgetLedger

logger = logging.getLogger(__name__)

FOREIGN_AGAIN_S: Final = 60.0
"""Nobody tells of namespaces that are not ours."""
TERMINATING_AGAIN_S: Final = 10.0
REFUSED_AGAIN_S: Final = 15.0
LEDGER_AGAIN_S: Final = 5.0
RIGHTS_AGAIN_S: Final = 0.5
REFUSALS: Final = (ForbiddenError, InvalidRequestError, NotFoundError)
SELECTOR: Final = f"{labels.MANAGED_BY}={labels.MANAGER}"


class Ledger(BudgetLedger, Protocol):
    async def put_tenant(self, tenant: str) -> TenantAccount: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a look came to."""

    conditions: Sequence[Condition]
    account_id: str = ""
    again_s: float | None = None


@dataclass(slots=True, kw_only=True)
class TenantReconciler:
    """The implementation of `seams.Reconciler` for Tenants."""

    cluster: Cluster
    cache: Cache
    ledger: Ledger
    key: bytes
    """The cluster key."""
    recorder: Recorder
    settings: OperatorSettings
    clock: Callable[[], int] = now_us
    _options: ChildOptions = field(init=False)
    _parsed: Parsed = field(init=False)
    _own: OwnAddresses = field(init=False)

    def __post_init__(self) -> None:
        self._own = OwnAddresses(cluster=self.cluster, cache=self.cache)
        self._options = child_options(self.settings)
        self._parsed = Parsed(cache=self.cache)

    async def reconcile(self, name: str) -> float | None:
        body = self.cache.get(TENANTS, "", name)
        if body is None:
            return None
        tenant = tenant_from(body)
        if tenant.metadata.deletion_time_us is not None:
            return await self._end(tenant)
        if await self._finalizer(tenant):
            # The next look has the version that this write made.
            return 0.0
        outcome = await self._keep(body, tenant)
        await self._write_status(body, tenant, outcome)
        return outcome.again_s

    # --- the namespace ---------------------------------------------------------------------------

    async def _keep(self, body: Json, tenant: Tenant) -> Outcome:
        found = await self._namespace(tenant)
        claim = claim_namespace(tenant, found, self._options)
        if claim.verdict in ("Foreign", "Terminating"):
            return self._without_namespace(body, claim)
        try:
            await self._take(body, tenant, found, claim)
        except AlreadyExistsError:
            # Somebody made it between the look and the write: whose it is shows at the next look.
            return Outcome(
                conditions=[_namespace_note(False, "Creating", "it is being made")],
                again_s=RIGHTS_AGAIN_S,
            )
        except REFUSALS as error:
            note = _namespace_note(False, "Refused", error.message)
            return Outcome(conditions=[note], again_s=REFUSED_AGAIN_S)
        return await self._fill(tenant, claim)

    async def _namespace(self, tenant: Tenant) -> Json | None:
        """The cache holds our own alone: one that it lacks may be somebody else's."""
        name = namespace_name(tenant)
        known = self.cache.get(NAMESPACES, "", name)
        if known is not None:
            return known
        try:
            return await self.cluster.get(NAMESPACES, "", name)
        except NotFoundError:
            return None

    def _without_namespace(self, body: Json, claim: Claim) -> Outcome:
        if claim.verdict == "Terminating":
            note = _namespace_note(False, "NamespaceTerminating", claim.message)
            return Outcome(conditions=[note], again_s=TERMINATING_AGAIN_S)
        self._tell(body, "NamespaceForeign", claim.message, warning=True)
        note = _namespace_note(False, "NamespaceForeign", claim.message)
        return Outcome(conditions=[note], again_s=FOREIGN_AGAIN_S)

    async def _take(self, body: Json, tenant: Tenant, found: Json | None, claim: Claim) -> None:
        wanted = asked(tenant_namespace(tenant, self._options))
        if found is None:
            # Not an apply: that would take over a namespace that somebody made meanwhile.
            await self.cluster.create(NAMESPACES, wanted)
            self._tell(body, "NamespaceCreated", f"made namespace {namespace_name(tenant)!r}")
        elif differs(found, wanted):
            await self.cluster.apply(NAMESPACES, wanted)
        if claim.verdict == "Adopt":
            self._tell(body, "NamespaceAdopted", claim.message)

    # --- what is in it ---------------------------------------------------------------------------

    async def _fill(self, tenant: Tenant, claim: Claim) -> Outcome:
        ready = [_namespace_note(True, "Active", f"namespace {namespace_name(tenant)!r}")]
        again_s: list[float] = []
        refused = await self._refusal(tenant, access_children(tenant, self._options))
        if refused:
            # Right after the operator bound its role, not every API server knows of it.
            ready = [_namespace_note(False, "AccessRefused", refused)]
            again_s.append(RIGHTS_AGAIN_S if claim.verdict == "New" else REFUSED_AGAIN_S)
            return Outcome(conditions=ready, again_s=min(again_s))
        sessions = self._parsed.sessions(namespace_name(tenant))
        options = beside(self._options, await self._own.cidrs())
        network = await self._refusal(tenant, network_children(tenant, sessions, options))
        quota = await self._refusal(tenant, quota_children(tenant))
        count = COUNTED
        if not quota and resource_quota(tenant) is not None:
            count = await keep_counted(self.cluster, namespace_name(tenant), self.clock())
        again_s += [] if count.again_s is None else [count.again_s]
        keys = await self._keys(tenant)
        if network or quota or keys:
            again_s.append(RIGHTS_AGAIN_S if claim.verdict == "New" else REFUSED_AGAIN_S)
        if keys:
            ready = [_namespace_note(False, "KeysRefused", keys)]
        account_id, away = await self._account(tenant)
        again_s += [LEDGER_AGAIN_S] if away else []
        budget = await look_at_budget(self.ledger, tenant)
        again_s += [] if budget.again_s is None else [budget.again_s]
        await self._grow(tenant, sessions)
        purged_s = await self._purge(tenant)
        again_s += [] if purged_s is None else [purged_s]
        notes = [
            *ready,
            network_condition(tenant, options.network, network),
            quota_condition(quota, count.message),
            *([] if budget.condition is None else [budget.condition]),
        ]
        return Outcome(
            conditions=[*notes, *([_away(away)] if away else [])],
            account_id=account_id,
            again_s=min(again_s, default=None),
        )

    async def _refusal(self, tenant: Tenant, groups: Sequence[Wanted]) -> str:
        """Make them so. The API's words if it refuses; "" = done."""
        try:
            for group in groups:
                await self._ensure(tenant, group)
        except REFUSALS as error:
            return error.message
        return ""

    async def _ensure(self, tenant: Tenant, wanted: Wanted) -> None:
        namespace, kind = namespace_name(tenant), wanted.kind
        try:
            listed = await self.cluster.list(kind, namespace, selector=SELECTOR)
        except ForbiddenError:
            # The first binding is what gives the right to list.
            listed = []
        found = {each["metadata"]["name"]: each for each in listed}
        for manifest in wanted.manifests:
            await self._apply(kind, manifest, found.get(manifest["metadata"]["name"]))
        for each in outdated(listed, wanted, tenant.metadata.name):
            meta = each["metadata"]
            await self.cluster.delete(kind, namespace, meta["name"], uid=meta["uid"])

    async def _apply(self, kind: Kind, manifest: Manifest, found: Json | None) -> None:
        wanted = asked(manifest)
        if differs(found, wanted):
            await self.cluster.apply(kind, wanted)

    async def _keys(self, tenant: Tenant) -> str:
        """Secrets are read by name: the operator has no right to list them."""
        namespace = namespace_name(tenant)
        try:
            for manifest in key_children(tenant, self.key).manifests:
                found = await self._secret(namespace, manifest["metadata"]["name"])
                await self._apply(SECRETS, manifest, found)
            for name in revoked_secrets(tenant):
                found = await self._secret(namespace, name)
                if found is not None:
                    uid = found["metadata"]["uid"]
                    await self.cluster.delete(SECRETS, namespace, name, uid=uid)
        except REFUSALS as error:
            return error.message
        return ""

    async def _secret(self, namespace: str, name: str) -> Json | None:
        try:
            return await self.cluster.get(SECRETS, namespace, name)
        except NotFoundError:
            return None

    async def _account(self, tenant: Tenant) -> tuple[str, str]:
        """The account id, and why there is none yet."""
        if tenant.status.account_id:
            return tenant.status.account_id, ""
        try:
            return (await self.ledger.put_tenant(tenant.metadata.name)).account_id, ""
        except UnavailableError as error:
            return "", error.message

    async def _grow(self, tenant: Tenant, sessions: Sequence[TrainingSession]) -> None:
        """A class that lets no volume grow says so; the sessions run on with what they have."""
        namespace = namespace_name(tenant)
        for growth in growths(sessions, self.cache.list(CLAIMS, namespace)):
            name = growth.claim["metadata"]["name"]
            patch: Json = {"spec": {"resources": {"requests": {"storage": growth.size}}}}
            try:
                await self.cluster.merge_patch(CLAIMS, namespace, name, patch)
            except REFUSALS as error:
                body = self.cache.get(TENANTS, "", tenant.metadata.name)
                if body is not None:
                    self._tell(body, "VolumeNotGrown", error.message, warning=True)

    async def _purge(self, tenant: Tenant) -> float | None:
        """Remove kept volumes whose time is over. Seconds until the next one's is."""
        namespace, now = namespace_name(tenant), self.clock()
        sessions = [each["metadata"]["name"] for each in self.cache.list(SESSIONS, namespace)]
        found = purge(self.cache.list(CLAIMS, namespace), sessions, now)
        for claim in found.now:
            meta = claim["metadata"]
            logger.info("kept_volume_purged", extra={"namespace": namespace, "claim": meta["name"]})
            await self.cluster.delete(CLAIMS, namespace, meta["name"], uid=meta["uid"])
        return None if found.next_us is None else max(1.0, (found.next_us - now) / 1e6)

    # --- status ----------------------------------------------------------------------------------

    async def _write_status(self, body: Json, tenant: Tenant, outcome: Outcome) -> None:
        status, generation = tenant.status, tenant.metadata.generation
        noted = conditions.merge(
            status.conditions, outcome.conditions, now_us=self.clock(), generation=generation
        )
        away = next((each for each in outcome.conditions if each.type == conditions.READY), None)
        ready = ready_condition(noted) if away is None else away
        merged = conditions.merge(noted, [ready], now_us=self.clock(), generation=generation)
        fresh = status.model_copy(
            update={
                "observed_generation": generation,
                "account_id": outcome.account_id or status.account_id,
                "namespace": namespace_name(tenant),
                "conditions": merged,
            }
        )
        patch = status_patch(body, fresh)
        if patch is not None:
            name = tenant.metadata.name
            await self.cluster.merge_patch(TENANTS, "", name, patch, subresource="status")

    def _tell(self, body: Json, reason: str, note: str, *, warning: bool = False) -> None:
        regarding = {"apiVersion": TENANTS.api_version, "kind": TENANTS.kind, **body}
        self.recorder.record(regarding, reason, note, warning=warning)

    # --- the end ---------------------------------------------------------------------------------

    async def _finalizer(self, tenant: Tenant) -> bool:
        """Only who takes the namespace along has to be waited for. True if it was changed."""
        meta = tenant.metadata
        takes_along = tenant.spec.deletion_policy == "Delete" and self.settings.namespace_deletion
        if takes_along == (labels.TENANT_FINALIZER in meta.finalizers):
            return False
        others = [each for each in meta.finalizers if each != labels.TENANT_FINALIZER]
        finalizers = [*others, labels.TENANT_FINALIZER] if takes_along else others
        await self._set_finalizers(tenant, finalizers)
        return True

    async def _set_finalizers(self, tenant: Tenant, finalizers: list[str]) -> None:
        meta = tenant.metadata
        version = str(meta.resource_version)
        patch: Json = {"metadata": {"resourceVersion": version, "finalizers": finalizers}}
        await self.cluster.merge_patch(TENANTS, "", meta.name, patch)

    async def _end(self, tenant: Tenant) -> float | None:
        """Sessions first, so that they can hand in their usage; then the namespace; then the tenant."""
        meta = tenant.metadata
        if labels.TENANT_FINALIZER not in meta.finalizers:
            return None
        found = await self._namespace(tenant)
        claim = claim_namespace(tenant, found, self._options)
        is_ours = found is not None and claim.verdict in ("Ours", "Terminating")
        if is_ours and tenant.spec.deletion_policy == "Delete":
            return await self._end_namespace(tenant, claim)
        left = [each for each in meta.finalizers if each != labels.TENANT_FINALIZER]
        try:
            await self._set_finalizers(tenant, left)
        except NotFoundError:
            return None
        return None

    async def _end_namespace(self, tenant: Tenant, claim: Claim) -> float:
        name = namespace_name(tenant)
        if claim.verdict == "Terminating":
            return TERMINATING_AGAIN_S
        sessions = self.cache.list(SESSIONS, name)
        for session in sessions:
            meta = session["metadata"]
            if "deletionTimestamp" not in meta:
                await self.cluster.delete(SESSIONS, name, meta["name"], uid=meta["uid"])
        unflushed = [
            each["metadata"]["name"]
            for each in self.cache.list(CLAIMS, name)
            if labels.UNFLUSHED in (each["metadata"].get("labels") or {})
        ]
        if unflushed:
            note = f"volumes hold usage that nobody has, and keep the namespace: {', '.join(unflushed)}"
            body = self.cache.get(TENANTS, "", tenant.metadata.name)
            if body is not None:
                self._tell(body, "VolumesUnflushed", note, warning=True)
        if not sessions and not unflushed:
            namespace = await self.cluster.get(NAMESPACES, "", name)
            await self.cluster.delete(NAMESPACES, "", name, uid=namespace["metadata"]["uid"])
        return TERMINATING_AGAIN_S


def _namespace_note(ready: bool, reason: str, message: str) -> Condition:
    return condition(conditions.NAMESPACE_READY, ready, reason, message)


def _away(message: str) -> Condition:
    return condition(conditions.READY, False, "LedgerUnavailable", message)
