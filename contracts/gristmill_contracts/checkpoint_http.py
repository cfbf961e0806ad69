"""Messages about checkpoints between our processes. Routes: see `http`."""

from typing import Literal

import msgspec

from gristmill_contracts.ids import CheckpointId, SessionUid, TenantName


class RegisterCheckpoint(msgspec.Struct, kw_only=True):
    id: CheckpointId
    tenant: TenantName
    session: SessionUid
    group: str
    kind: Literal["weights", "state"]
    path: str
    model: str
    rank: int
    alpha: int
    size_bytes: int
    manifest_sha256: str
    description: str
    created_us: int


class Checkpoint(msgspec.Struct, kw_only=True):
    """A registered checkpoint. `version` is gapless in (tenant, group), from 1."""

    id: CheckpointId
    tenant: TenantName
    session: SessionUid
    group: str
    version: int
    kind: Literal["weights", "state"]
    path: str
    model: str
    rank: int
    alpha: int
    size_bytes: int
    manifest_sha256: str
    description: str
    created_us: int
    deleted: bool = False


class CreateGroup(msgspec.Struct, kw_only=True):
    tenant: TenantName
    name: str
    description: str = ""


class CheckpointGroup(msgspec.Struct, kw_only=True):
    tenant: TenantName
    name: str
    description: str
    created_us: int


class CheckpointPage(msgspec.Struct, kw_only=True):
    checkpoints: list[Checkpoint]
    next_after: str | None
