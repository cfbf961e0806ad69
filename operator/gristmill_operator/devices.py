"""Devices that the nodes of a cluster offer, by the names that their plug-ins gave them. Pure."""

from collections.abc import Iterable
from typing import Final

from gristmill_operator.seams import Json

NO_DEVICES: Final = frozenset({"cpu", "memory", "pods", "ephemeral-storage"})
NO_DEVICE_PREFIXES: Final = ("hugepages-", "attachable-volumes-")


def offered_devices(nodes: Iterable[Json]) -> frozenset[str]:
    """Names of extended resources of which some node has at least one."""
    return frozenset(
        name
        for node in nodes
        for name, amount in ((node.get("status") or {}).get("allocatable") or {}).items()
        if name not in NO_DEVICES and not name.startswith(NO_DEVICE_PREFIXES) and amount != "0"
    )
