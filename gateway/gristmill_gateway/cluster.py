"""What a gateway has in a cluster and not on one machine."""

from typing import Protocol

from gristmill_gateway.access import Access
from gristmill_gateway.directory import ReadSession
from gristmill_gateway.tenancy import Tenancy


class Cluster(Protocol):
    """Made by `kubernetes_cluster.open_cluster`, on the event loop that it is used on."""

    @property
    def key(self) -> bytes:
        """The cluster key."""
        ...

    @property
    def tenancy(self) -> Tenancy: ...
    @property
    def read_session(self) -> ReadSession:
        """Past all caches."""
        ...

    @property
    def access(self) -> Access: ...

    def start(self) -> None:
        """Begin to watch."""
        ...

    async def stop(self) -> None: ...

    def away(self) -> list[str]:
        """`watch of <kind>` for what is read as it last was."""
        ...
