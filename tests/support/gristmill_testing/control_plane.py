"""What a control plane handler needs, over a real store and a real ledger, without the HTTP around it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill_contracts.base_model import BaseModelResource, BaseModelSpec
from gristmill_contracts.http import RegisterCheckpoint, SessionView
from gristmill_contracts.ids import CheckpointId, SessionUid, TenantName
from gristmill_contracts.resources import Condition, Metadata
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.usage import Counts
from gristmill_gateway.access import Access, OwnersAccess
from gristmill_gateway.ledger_client import LedgerClient
from gristmill_gateway.sagemaker.arns import Scope
from gristmill_sessions.identity import session_uid
from gristmill_sessions.local import LocalStore, open_local_store
from gristmill_testing import ledger as ledger_support

ACCOUNT = "100000000001"
REGION = "us-west-2"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/Researcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCaller:
    tenant: str = "acme"
    account_id: str = ACCOUNT
    invocation_id: str = ""
    service_account: str = ""

    @property
    def scope(self) -> Scope:
        return Scope(REGION, self.account_id)


@dataclass(slots=True, kw_only=True)
class FakeContext:
    """`views`: what meters say, by session uid. A session without one has no meter."""

    store: LocalStore
    ledger: LedgerClient
    ledger_admin: ledger_support.LedgerClient
    token_key: bytes = b"key"
    views: dict[str, SessionView] = field(default_factory=dict)
    access: Access = field(default_factory=OwnersAccess)
    in_cluster: bool = False

    async def fresh(self, session: TrainingSession) -> TrainingSession | None:
        return session

    async def namespace(self, tenant: str) -> str:
        return tenant

    async def session_view(self, session: TrainingSession) -> SessionView | None:
        return self.views.get(session_uid(session))

    async def last_received_number(self, session: TrainingSession) -> int:
        return 0


@asynccontextmanager
async def running_control_plane(folder: Path, **ledger: Any) -> AsyncIterator[FakeContext]:
    """A store with the base model `tiny`, and a ledger with these settings, for the length of the block."""
    async with ledger_support.running_ledger(folder / "ledger", **ledger) as admin:
        store = open_local_store(folder / "store.sqlite3")
        store.create(base_model("tiny"))
        client = LedgerClient(admin.http, admin.url)
        yield FakeContext(store=store, ledger=client, ledger_admin=admin)


def base_model(name: str, hugging_face_id: str = "") -> BaseModelResource:
    return BaseModelResource(
        metadata=Metadata(name=name, namespace=""),
        spec=BaseModelSpec(hugging_face_id=hugging_face_id or f"Lab/{name.title()}"),
    )


def create_body(name: str = "run-1", **changes: Any) -> dict[str, Any]:
    """A CreateTrainingSession as the SDK sends it; a change of None leaves the member out."""
    body: dict[str, Any] = {
        "TrainingSessionName": name,
        "LoraConfig": {"Rank": 8, "Alpha": 16},
        "RoleArn": ROLE,
        "ModelConfig": {"BaseModelArn": model_arn("tiny")},
        "OutputConfig": {"S3Location": {"Path": f"s3://data/{name}/output"}},
    }
    return {key: value for key, value in (body | changes).items() if value is not None}


def model_arn(name: str, version: str = "/1.0.0", account: str = "aws") -> str:
    return (
        f"arn:aws:sagemaker:{REGION}:{account}:hub-content/SageMakerPublicHub/Model/{name}{version}"
    )


def accept(store: LocalStore, name: str, namespace: str = "acme", **status: Any) -> None:
    """Play the planner: the session has a meter that takes operations, or what `status` says."""
    session = store.get(TrainingSession, namespace, name)
    ready = Condition(type="Ready", status="True", reason="TakesOperations")
    changes = {"conditions": [ready]} | status
    store.update_status(
        session.model_copy(update={"status": session.status.model_copy(update=changes)})
    )


def view(session: TrainingSession, **changes: Any) -> SessionView:
    fields: dict[str, Any] = {
        "uid": session_uid(session),
        "attempt": 1,
        "last_received_number": 0,
        "next_number": 1,
        "missing_number": None,
        "missing_since_us": None,
        "state": "Serving",
        "error": None,
        "counts": Counts(),
        "last_activity_us": 0,
    }
    return SessionView(**(fields | changes))


def checkpoint(number: int, **changes: Any) -> RegisterCheckpoint:
    """A checkpoint of session s-1 of acme; `number` makes id, path and time."""
    fields: dict[str, Any] = {
        "id": CheckpointId(f"00000000-0000-4000-8000-{number:012d}"),
        "tenant": TenantName("acme"),
        "session": SessionUid("s-1"),
        "group": "runs",
        "kind": "weights",
        "path": f"acme/data/run-1/output/00000000-0000-4000-8000-{number:012d}",
        "model": "tiny",
        "rank": 8,
        "alpha": 16,
        "size_bytes": 1000 + number,
        "manifest_sha256": "ab" * 32,
        "description": f"checkpoint {number}",
        "created_us": 1_764_460_800_000_000 + number * 1_000_000,
    }
    return RegisterCheckpoint(**(fields | changes))
