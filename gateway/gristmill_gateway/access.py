"""Whether a caller may do what it asks for, as a port."""

from typing import Literal, Protocol

Verb = Literal["create", "get", "list", "patch", "update", "delete"]
"""Of training sessions. patch: to stop one; update: to let one work; what a session made counts as it."""


class Access(Protocol):
    async def check(
        self,
        service_account: str,
        verb: Verb,
        namespace: str,
        name: str = "",
        *,
        lasting: bool = False,
    ) -> None:
        """Whether an account may do this to training sessions; `name` "" = to any of the namespace.

        service_account: system:serviceaccount:<namespace>:<name>. lasting: a yes holds for longer, and
        for as long as nobody can be asked: what runs is not stopped by that. Raises AccessDeniedError
        naming who, what, where and the remedy; UnavailableError where nobody can be asked.
        """
        ...


class OwnersAccess:
    """Of one machine: a tenant's keys may do everything to its sessions."""

    async def check(
        self,
        service_account: str,
        verb: Verb,
        namespace: str,
        name: str = "",
        *,
        lasting: bool = False,
    ) -> None:
        return
