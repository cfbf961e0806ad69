"""The whole gateway over a real ledger and store, for official clients; no meter is behind it.

The access key id of a tenant is its name with `key-` before it, and every secret is `secret`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from gristmill_contracts.credentials import AccessKey, AccessKeySpec
from gristmill_contracts.resources import Metadata
from gristmill_contracts.tenant import Tenant, TenantStatus
from gristmill_gateway.app import make_app, make_gateway, open_http
from gristmill_gateway.s3 import S3Wire
from gristmill_gateway.s3_front import S3Front
from gristmill_gateway.s3_ledger_store import LedgerArtifactStore
from gristmill_gateway.settings import GatewaySettings
from gristmill_sessions.local import LocalStore
from gristmill_testing.control_plane import FakeContext, running_control_plane

ACCOUNTS = {"acme": "100000000001", "rival": "100000000002"}
SECRET = "secret"


def key_id(tenant: str) -> str:
    return f"key-{tenant}"


def gateway_app(
    folder: Path, contexts: list[FakeContext], *, artifacts_at_ledger: bool = False
) -> Starlette:
    """The gateway, started with its ledger; their insides are put into `contexts` once they run.

    artifacts_at_ledger: as in a cluster, the ledger keeps `<folder>/artifacts`.
    """
    gateways: list[Starlette] = []

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        ledger = {"artifacts_dir": folder / "artifacts"} if artifacts_at_ledger else {}
        async with running_control_plane(folder, **ledger) as context:
            _register(context.store)
            settings = GatewaySettings(
                ledger_url=context.ledger_admin.url, artifacts_dir=folder / "artifacts"
            )
            gateway = make_gateway(settings, context.store, b"k" * 32, open_http())
            if artifacts_at_ledger:
                wire = S3Wire(LedgerArtifactStore(context.ledger), b"key")
                parts = gateway.context
                gateway.front.s3 = S3Front(wire, parts.directory, parts.access)
            app = make_app(gateway)
            async with app.router.lifespan_context(app):
                gateways.append(app)
                contexts.append(context)
                yield

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        await gateways[0](scope, receive, send)

    outer = Starlette(lifespan=lifespan)
    outer.router.default = forward
    return outer


def _register(store: LocalStore) -> None:
    for tenant, account in ACCOUNTS.items():
        meta = Metadata(name=tenant, namespace="")
        made = store.create(Tenant(metadata=meta))
        status = TenantStatus(account_id=account)
        store.update_status(made.model_copy(update={"status": status}))
        spec = AccessKeySpec(access_key_id=key_id(tenant), secret_access_key=SECRET, tenant=tenant)
        store.create(AccessKey(metadata=Metadata(name=key_id(tenant), namespace=tenant), spec=spec))
