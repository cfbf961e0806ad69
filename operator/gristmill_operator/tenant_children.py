"""All that a tenant's namespace should hold, and what of what it holds should go. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gristmill_contracts import labels
from gristmill_contracts.resources import parse_time
from gristmill_contracts.session import TERMINAL_STATES, TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.access import accounts, operator_binding, people_bindings
from gristmill_operator.children.fetch import MODEL
from gristmill_operator.children.keys import client_keys
from gristmill_operator.children.manifest import ASKED_HASH, Manifest
from gristmill_operator.children.network import tenant_policies
from gristmill_operator.children.options import ChildOptions
from gristmill_operator.children.quota import limit_range, resource_quota
from gristmill_operator.children.seating import key_secret_name, state_claim_name
from gristmill_operator.children.session_policy import (
    EGRESS_SUFFIX,
    session_egress,
    session_mesh,
)
from gristmill_operator.children.volume import KEPT_UNTIL
from gristmill_operator.drift import quantity
from gristmill_operator.kinds import (
    LIMIT_RANGES,
    NETWORK_POLICIES,
    RESOURCE_QUOTAS,
    ROLE_BINDINGS,
    SECRETS,
    SERVICE_ACCOUNTS,
    Kind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Objects of one kind, in the order in which they are written."""

    kind: Kind
    manifests: Sequence[Manifest]


def access_children(tenant: Tenant, options: ChildOptions) -> list[Wanted]:
    """The operator's own rights come first: they cover those that it gives to others."""
    bindings = [operator_binding(tenant, options), *people_bindings(tenant, options)]
    return [
        Wanted(kind=ROLE_BINDINGS, manifests=bindings),
        Wanted(kind=SERVICE_ACCOUNTS, manifests=accounts(tenant)),
    ]


def network_children(
    tenant: Tenant, sessions: Iterable[TrainingSession], options: ChildOptions
) -> list[Wanted]:
    """Also those of sessions that have pods: a profile that the tenant loses is closed to them."""
    made = tenant_policies(tenant, options)
    for session in sessions:
        if not _has_pods(session):
            continue
        if max(session.status.workers.desired, session.spec.workers) > 1:
            made.append(session_mesh(session))
        egress = session_egress(session, tenant, options.network)
        if egress is not None:
            made.append(egress)
    return [Wanted(kind=NETWORK_POLICIES, manifests=made)]


def _has_pods(session: TrainingSession) -> bool:
    is_over = session.status.state in TERMINAL_STATES
    return session.status.attempt > 0 and not is_over and session.metadata.deletion_time_us is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A volume that its session wants larger."""

    claim: Manifest
    size: str


def growths(sessions: Iterable[TrainingSession], claims: Iterable[Manifest]) -> list[Growth]:
    """Volumes never shrink."""
    sizes = {
        state_claim_name(each.metadata.name): each.spec.storage.size
        for each in sessions
        if _has_pods(each)
    }
    return [
        Growth(claim=claim, size=wanted)
        for claim in claims
        if (wanted := sizes.get(claim["metadata"]["name"])) is not None
        and (quantity(wanted) or 0)
        > (quantity(claim["spec"]["resources"]["requests"]["storage"]) or 0)
    ]


def quota_children(tenant: Tenant) -> list[Wanted]:
    quota = resource_quota(tenant)
    return [
        Wanted(kind=RESOURCE_QUOTAS, manifests=[] if quota is None else [quota]),
        Wanted(kind=LIMIT_RANGES, manifests=[limit_range(tenant)]),
    ]


def key_children(tenant: Tenant, cluster_key: bytes) -> Wanted:
    return Wanted(kind=SECRETS, manifests=client_keys(tenant, cluster_key))


def revoked_secrets(tenant: Tenant) -> list[str]:
    return [key_secret_name(key.name) for key in tenant.spec.keys if key.revoked]


def outdated(found: Iterable[Manifest], wanted: Wanted, tenant: str) -> list[Manifest]:
    """Children of the tenant that nothing asks for any more; of those of its sessions, egress alone."""
    names = {each["metadata"]["name"] for each in wanted.manifests}
    return [
        each
        for each in found
        if each["metadata"]["name"] not in names and _is_kept_here(each["metadata"], tenant)
    ]


def _is_kept_here(meta: Manifest, tenant: str) -> bool:
    known = meta.get("labels") or {}
    session = known.get(labels.SESSION)
    return (
        known.get(labels.MANAGED_BY) == labels.MANAGER
        and known.get(labels.TENANT) == tenant
        and MODEL not in known
        and ASKED_HASH in (meta.get("annotations") or {})
        and (session is None or meta["name"] == f"{session}{EGRESS_SUFFIX}")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """Kept volumes whose time is over, and when the next one's is."""

    now: Sequence[Manifest]
    next_us: int | None


def purge(claims: Iterable[Manifest], sessions: Iterable[str], now_us: int) -> Purge:
    """sessions: names of those that there are; what carries one's name is in use."""
    present, due, later = set(sessions), [], []
    for claim in claims:
        meta = claim["metadata"]
        known = meta.get("labels") or {}
        until = parse_time((meta.get("annotations") or {}).get(KEPT_UNTIL))
        is_held = labels.UNFLUSHED in known or known.get(labels.SESSION) in present
        if not isinstance(until, int) or is_held or "deletionTimestamp" in meta:
            continue
        if until <= now_us:
            due.append(claim)
        else:
            later.append(until)
    return Purge(now=due, next_us=min(later, default=None))
