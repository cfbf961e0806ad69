"""Addresses of the cluster itself, as it shows them: no egress of a tenant may lead there. Pure but for `OwnAddresses`.

Nodes tell theirs and those of their pods, and the Service `kubernetes` with its endpoints those of the API
server. A cluster whose pods have addresses from elsewhere (pools of a CNI, a cloud's own network) shows them
nowhere, nor does one tell the range of its Services: for those the chart has values.
"""

import ipaddress
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    ForbiddenError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from gristmill_operator.kinds import ENDPOINT_SLICES, NODES, SERVICES, Kind
from gristmill_operator.seams import Cache, Cluster, Json

logger = logging.getLogger(__name__)

API_NAMESPACE: Final = "default"
API_NAME: Final = "kubernetes"
"""Name of the API server's Service, and of the slice with its endpoints."""
ASK_EVERY_S: Final = 60.0
COARSER: Final = {4: (32, 28, 24, 20, 16), 6: (128, 96, 64, 56, 48)}
"""Prefixes to which single addresses are widened where there are too many for one policy."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(slots=True, kw_only=True)
class OwnAddresses:
    """Keeps what the API server said of itself for a minute: it is asked by every look at a tenant."""

    cluster: Cluster
    cache: Cache
    clock: Callable[[], float] = time.monotonic
    _api: frozenset[str] = frozenset()
    _asked_at: float = float("-inf")
    _known: tuple[frozenset[str], tuple[str, ...]] = field(default=(frozenset(), ()))

    async def cidrs(self) -> tuple[str, ...]:
        """Ranges in a fixed order, not too many, none within another.

        Raises what the API server's silence is, where it never told of itself: policies without it would be open.
        """
        if self.clock() - self._asked_at >= ASK_EVERY_S:
            await self._ask()
        shown = frozenset(each for node in self.cache.list(NODES) for each in of_node(node))
        shown |= self._api
        if shown != self._known[0]:
            self._known = (shown, merged(shown))
        return self._known[1]

    async def _ask(self) -> None:
        try:
            service, slice_ = await self._get(SERVICES), await self._get(ENDPOINT_SLICES)
        except (UnavailableError, OverloadedError):
            if not self._api:
                raise
            return
        self._asked_at = self.clock()
        self._api = frozenset((*of_service(service), *of_slice(slice_)))

    async def _get(self, kind: Kind) -> Json:
        """Empty where there is none, or no right to see it."""
        try:
            return await self.cluster.get(kind, API_NAMESPACE, API_NAME)
        except (NotFoundError, ForbiddenError) as error:
            extra = {"kind": kind.plural, "reason": error.message}
            logger.warning("api_addresses_unknown", extra=extra)
            return {}


def of_node(node: Json) -> frozenset[str]:
    """Its own addresses and the ranges of its pods."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ranges = [*(spec.get("podCIDRs") or ()), *([spec["podCIDR"]] if spec.get("podCIDR") else [])]
    addresses = [each.get("address", "") for each in status.get("addresses") or ()]
    return frozenset(each for each in (*ranges, *addresses) if _parsed(each) is not None)


def of_service(service: Json) -> list[str]:
    spec = service.get("spec") or {}
    given = [*(spec.get("clusterIPs") or ()), spec.get("clusterIP") or ""]
    return [each for each in dict.fromkeys(given) if _parsed(each) is not None]


def of_slice(slice_: Json) -> list[str]:
    given = [
        each
        for endpoint in slice_.get("endpoints") or ()
        for each in endpoint.get("addresses") or ()
    ]
    return [each for each in dict.fromkeys(given) if _parsed(each) is not None]


def merged(texts: Iterable[str]) -> tuple[str, ...]:
    """Few ranges that hold all of them; where there are too many, ranges that hold their neighbours, too."""
    networks = [each for each in map(_parsed, texts) if each is not None]
    found: list[Network] = []
    for version in (4, 6):
        found += _few([each for each in networks if each.version == version], version)
    return tuple(str(each) for each in found)


def _few(networks: Sequence[Network], version: int) -> list[Network]:
    few: list[Network] = []
    for prefix in COARSER[version]:
        wide = [
            each if each.prefixlen <= prefix else each.supernet(new_prefix=prefix)
            for each in networks
        ]
        few = list(ipaddress.collapse_addresses(wide))  # type: ignore[type-var]
        if len(few) <= limits.OWN_RANGES_MAX:
            break
    return few


def _parsed(text: str) -> Network | None:
    """None for a host's name, and for what means every address."""
    try:
        found = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    return found if found.prefixlen else None
