"""The conditions of a tenant. Pure."""

from collections.abc import Sequence
from typing import Final

from gristmill_contracts import conditions
from gristmill_contracts.conditions import condition
from gristmill_contracts.resources import Condition
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.network import refused_cidrs
from gristmill_operator.children.options import NetworkOptions

NEEDED: Final = (conditions.NAMESPACE_READY, conditions.NETWORK_READY, conditions.QUOTA_READY)
"""Without one of these no session is started: its pods would stand open, or nowhere."""


def network_condition(tenant: Tenant, options: NetworkOptions, refused: str) -> Condition:
    """refused: the API's words, if it took no policies."""
    if refused:
        return condition(conditions.NETWORK_READY, False, "Refused", refused)
    cidrs = refused_cidrs(tenant, options)
    if cidrs:
        return condition(
            conditions.NETWORK_READY,
            True,
            "EgressReduced",
            f"nothing may connect to {', '.join(cidrs)}: no range of addresses, or one of the cluster's own "
            "or of the metadata service; take it out of the tenant's network",
        )
    return condition(conditions.NETWORK_READY, True, "PoliciesSet")


def quota_condition(refused: str, uncounted: str) -> Condition:
    """refused: the API's words, if it took no quota. uncounted: why what it bounds is refused still."""
    if refused:
        return condition(conditions.QUOTA_READY, False, "Refused", refused)
    if uncounted:
        return condition(conditions.QUOTA_READY, False, "NotCounted", uncounted)
    return condition(conditions.QUOTA_READY, True, "Set")


def ready_condition(noted: Sequence[Condition]) -> Condition:
    """The first thing that is missing, in its own words."""
    for type_ in NEEDED:
        found = conditions.find(noted, type_)
        if found is None:
            return condition(conditions.READY, False, "Pending", f"{type_} is not known yet")
        if found.status != "True":
            return condition(conditions.READY, False, found.reason, found.message)
    return condition(conditions.READY, True, "Ready")
