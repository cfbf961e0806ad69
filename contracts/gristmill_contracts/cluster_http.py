"""Messages that the ledger exchanges when the parts are pods of a cluster. Routes: see `http`."""

from typing import Literal

import msgspec

from gristmill_contracts.ids import SessionUid


class HeartbeatAnswer(msgspec.Struct, kw_only=True):
    """What the sessions of the heartbeats are to do, where somebody has said so."""

    directives: dict[str, Literal["serve", "stop"]] = {}
    """Session uid -> what the attempt that sent the heartbeat is to do."""
    fenced: list[SessionUid] = []
    """Sessions of which a newer attempt has registered: release nothing more."""
    release_until_s: dict[str, float] | None = None
    """Session uid -> for how long, counted from *sending* the heartbeat, the attempt that sent it may
    release results. A session that is missing got no grant; what it has runs on. None: a ledger of the
    release before, which knows no grants."""
    acked: dict[str, int] | None = None
    """Session uid -> highest usage sequence that is stored. A session that is missing has not registered:
    less than the meter was told once says that the ledger came back from a backup. None: a ledger of the
    release before."""
    leases: dict[str, float] = {}
    """Budget lease -> for how long, counted from sending the heartbeat, it may be spent. One that was asked
    about and is missing has ended, or is not its session's."""
    inbox: list[SessionUid] = []
    """Sessions whose inbox holds something although their meter serves: take it now."""
    budgets: dict[str, int] = {}
    """Session uid -> version of its tenant's budgets (contracts.budgets.Lease.version)."""


class Directive(msgspec.Struct, kw_only=True):
    """What one attempt of a session is to do. Kept until the next one; other attempts ignore it."""

    attempt: int
    desired: Literal["serve", "stop"]


class UsageGap(msgspec.Struct, kw_only=True):
    """Usage of a session that could not be brought in: recorded, never silent."""

    attempt: int
    acked_seq: int
    head_seq: int | None
    """None = nobody knows."""
    reason: str
    at_us: int


class ArtifactInfo(msgspec.Struct, kw_only=True):
    """One file of the artifact store. `path` is relative to the tenant's folder."""

    path: str
    size_bytes: int
    sha256: str
    modified_us: int


class ArtifactPage(msgspec.Struct, kw_only=True):
    artifacts: list[ArtifactInfo]
    next_after: str | None
    folders: list[str] = []
    """With delimiter=/: paths up to the first / behind the prefix, which other files lie below."""
