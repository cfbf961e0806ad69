"""Network policies of one session: its ranks among themselves, and the destinations that it asked for."""

from gristmill_contracts import labels
from gristmill_operator.children.manifest import Manifest, owner, session_labels
from gristmill_operator.children.network import egress_to, policy
from gristmill_operator.children.seating import Seating


def session_mesh(seating: Seating) -> Manifest:
    """Every port between the ranks: collectives choose theirs at random.

    A policy cannot say "the same label as mine", so each session has one of its own.
    """
    same = {"podSelector": {"matchLabels": {labels.SESSION: seating.name}}}
    return _owned(
        seating,
        policy(
            f"{seating.name}-mesh",
            seating.namespace,
            same["podSelector"],
            ingress=[{"from": [same]}],
            egress=[{"to": [same]}],
        ),
    )


def session_egress(seating: Seating) -> Manifest | None:
    """Where the profiles lead that the session names; None = nowhere."""
    wanted = set(seating.session.spec.egress_profiles)
    cidrs = [
        cidr
        for profile in seating.tenant.spec.network.egress_profiles
        if profile.name in wanted
        for cidr in profile.cidrs
    ]
    to = egress_to(cidrs, seating.options.network)
    if not to:
        return None
    selector = {"matchLabels": {labels.SESSION: seating.name}}
    made = policy(f"{seating.name}-egress", seating.namespace, selector, egress=[{"to": to}])
    return _owned(seating, made)


def missing_profiles(seating: Seating) -> list[str]:
    """Names that the session asks for and the tenant does not have."""
    known = {each.name for each in seating.tenant.spec.network.egress_profiles}
    return sorted(set(seating.session.spec.egress_profiles) - known)


def _owned(seating: Seating, manifest: Manifest) -> Manifest:
    extra = {
        "labels": session_labels(seating.session),
        "ownerReferences": owner(seating.session),
    }
    return {**manifest, "metadata": {**manifest["metadata"], **extra}}
