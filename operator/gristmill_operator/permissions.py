"""What the operator must be allowed to do: asked at the start, so that nothing is missing half-way.

The chart's roles grant exactly this; what it may do in one tenant's namespace alone is not asked, since
the operator itself binds that role when it makes the namespace.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gristmill_contracts import labels, resources
from gristmill_operator.kinds import (
    CARDS,
    CLAIMS,
    ENDPOINT_SLICES,
    EVENTS,
    JOBS,
    LEASES,
    MODELS,
    NAMESPACES,
    NODES,
    PODS,
    ROLE_BINDINGS,
    SECRETS,
    SERVICES,
    SESSIONS,
    TENANTS,
    Kind,
)
from gristmill_operator.own_addresses import API_NAME
from gristmill_operator.seams import Json

REVIEWS: Final = Kind(
    group="authorization.k8s.io",
    version="v1",
    plural="selfsubjectaccessreviews",
    kind="SelfSubjectAccessReview",
    namespaced=False,
)
READ: Final = ("get", "list", "watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    group: str
    resource: str
    """With its subresource behind a slash."""
    verb: str
    namespace: str = ""
    """"" = in all."""
    name: str = ""

    def __str__(self) -> str:
        what = f"{self.resource}.{self.group}" if self.group else self.resource
        where = f"in namespace {self.namespace}" if self.namespace else "in all namespaces"
        return f"{self.verb} {what}{f' {self.name}' if self.name else ''} {where}"


def _rights(kind: Kind, *verbs: str, namespace: str = "", name: str = "") -> list[Right]:
    return [
        Right(group=kind.group, resource=kind.plural, verb=verb, namespace=namespace, name=name)
        for verb in verbs
    ]


def needed(system_namespace: str) -> Sequence[Right]:
    """All that is asked."""
    own = system_namespace
    rights = [
        right for kind in (SESSIONS, TENANTS, MODELS, CARDS) for right in _rights(kind, *READ)
    ]
    rights += [
        Right(group=resources.GROUP, resource=f"{kind.plural}/status", verb="patch")
        for kind in (SESSIONS, TENANTS, MODELS, CARDS)
    ]
    rights += _rights(SESSIONS, "patch", "delete") + _rights(TENANTS, "patch")
    rights += [
        right for kind in (PODS, SERVICES, CLAIMS, JOBS, NODES) for right in _rights(kind, *READ)
    ]
    rights += _rights(ENDPOINT_SLICES, "get", name=API_NAME)
    rights += _rights(NAMESPACES, *READ, "create", "patch")
    rights += _rights(EVENTS, "create", "patch")
    rights += _rights(ROLE_BINDINGS, "get", "create", "patch")
    rights += _rights(LEASES, "create", namespace=own)
    rights += _rights(LEASES, "get", "patch", namespace=own, name=labels.LEASE)
    rights += _rights(SECRETS, "get", namespace=own, name=labels.CLUSTER_KEY_SECRET)
    return rights


class ReviewApi(Protocol):
    async def review(self, kind: Kind, body: Json) -> Json: ...


async def missing(api: ReviewApi, system_namespace: str) -> list[Right]:
    """Those of `needed` that the API server does not grant."""
    rights = needed(system_namespace)
    granted = await asyncio.gather(*(_is_granted(api, right) for right in rights))
    return [right for right, yes in zip(rights, granted, strict=True) if not yes]


async def _is_granted(api: ReviewApi, right: Right) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "verb": right.verb,
        "namespace": right.namespace,
        "name": right.name,
    }
    answer = await api.review(REVIEWS, {"metadata": {}, "spec": {"resourceAttributes": attributes}})
    return bool(answer["status"]["allowed"])


def complaint(lacking: Sequence[Right]) -> str:
    """For a person who has to put it right."""
    lines = "\n".join(f"  {right}" for right in lacking)
    return (
        f"the operator lacks {len(lacking)} permissions and does not start:\n{lines}\n"
        "Its ClusterRole and Role come with the Helm chart: upgrade the chart together with the image."
    )
