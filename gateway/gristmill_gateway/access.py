"""Whether a caller may do what it asks for, as a port."""

from typing import Literal, Protocol

Verb = Literal["create", "get", "list", "patch", "delete"]


class Access(Protocol):
    async def check(self, service_account: str, verb: Verb, namespace: str, name: str = "") -> None:
        """Whether an account may do this to training sessions.

        service_account: system:serviceaccount:<namespace>:<name>. Raises ForbiddenError naming who,
        what, where and the remedy; UnavailableError where nobody can be asked.
        """
        ...


class OwnersAccess:
    """Of one machine: a tenant's keys may do everything to its sessions."""

    async def check(self, service_account: str, verb: Verb, namespace: str, name: str = "") -> None:
        return
