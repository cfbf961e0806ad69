"""Network policies of one session: its ranks among themselves, and the destinations that it asked for."""

from typing import Final

from gristmill_contracts import labels
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.manifest import Manifest, owner, session_labels
from gristmill_operator.children.network import egress_to, policy
from gristmill_operator.children.options import NetworkOptions

EGRESS_SUFFIX: Final = "-egress"


def session_mesh(session: TrainingSession) -> Manifest:
    """Every port between the ranks: collectives choose theirs at random.

    A policy cannot say "the same label as mine", so each session has one of its own.
    """
    meta = session.metadata
    selector = {"matchLabels": {labels.SESSION: meta.name}}
    same = [{"podSelector": selector}]
    made = policy(
        f"{meta.name}-mesh",
        meta.namespace,
        selector,
        ingress=[{"from": same}],
        egress=[{"to": same}],
    )
    return _owned(session, made)


def session_egress(
    session: TrainingSession, tenant: Tenant, options: NetworkOptions
) -> Manifest | None:
    """Where the profiles lead that the session names; None = nowhere."""
    wanted, meta = set(session.spec.egress_profiles), session.metadata
    cidrs = [
        cidr
        for profile in tenant.spec.network.egress_profiles
        if profile.name in wanted
        for cidr in profile.cidrs
    ]
    to = egress_to(cidrs, options)
    if not to:
        return None
    selector = {"matchLabels": {labels.SESSION: meta.name}}
    name = f"{meta.name}{EGRESS_SUFFIX}"
    return _owned(session, policy(name, meta.namespace, selector, egress=[{"to": to}]))


def missing_profiles(session: TrainingSession, tenant: Tenant) -> list[str]:
    """Names that the session asks for and the tenant does not have."""
    known = {each.name for each in tenant.spec.network.egress_profiles}
    return sorted(set(session.spec.egress_profiles) - known)


def _owned(session: TrainingSession, manifest: Manifest) -> Manifest:
    extra = {"labels": session_labels(session), "ownerReferences": owner(session)}
    return {**manifest, "metadata": {**manifest["metadata"], **extra}}
