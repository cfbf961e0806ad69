"""A whole gateway on a loopback port, over a real store, a fake meter and a few ledger answers."""

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import msgspec
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gristmill_contracts import conditions, labels
from gristmill_contracts.base_model import BaseModelResource, BaseModelSpec
from gristmill_contracts.credentials import (
    AccessKey,
    AccessKeySpec,
    EndpointSecret,
    EndpointSecretSpec,
)
from gristmill_contracts.http import (
    Checkpoint,
    CheckpointGroup,
    CreateGroup,
    Problem,
    TenantAccount,
)
from gristmill_contracts.ids import CheckpointId, SessionUid, TenantName
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import (
    BaseModelRef,
    OutputSpec,
    TrainingSession,
    TrainingSessionSpec,
)
from gristmill_contracts.tenant import Tenant, TenantStatus
from gristmill_gateway.app import Gateway, make_app, make_gateway, open_http
from gristmill_gateway.settings import GatewaySettings
from gristmill_sessions.local import LocalStore, open_local_store
from gristmill_testing.fake_meter import SECRET, FakeMeter
from gristmill_testing.loopback_server import serve

ACCOUNT = "100000000001"
REGION = "us-west-2"
VOCABULARY = 100
CONTEXT = 64
UID = "11111111-2222-4333-8444-555555555555"
RUNTIME = "sagemakertrainingsessionruntime"


@dataclass(slots=True)
class FakeLedger:
    """Accounts and checkpoints; anything else is not found."""

    accounts: dict[str, str] = field(default_factory=lambda: {"acme": ACCOUNT})
    checkpoints: dict[tuple[str, str, int], Checkpoint] = field(default_factory=dict)
    down: bool = False

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/healthz", lambda _request: Response("ok")),
                Route("/v1/tenants/{name}", self._tenant, methods=["PUT"]),
                Route("/v1/checkpoint-groups", self._group, methods=["POST"]),
                Route("/v1/checkpoint-groups/{tenant}/{name}", self._named_group),
                Route("/v1/usage", lambda _request: Response(b'{"rows": []}')),
                Route("/v1/checkpoints/{tenant}/{group}/{version:int}", self._checkpoint),
                Route("/{path:path}", self._nothing, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    async def _tenant(self, request: Request) -> Response:
        name = request.path_params["name"]
        account = self.accounts.setdefault(name, f"2{len(self.accounts):011d}")
        return self._answer(TenantAccount(tenant=TenantName(name), account_id=account))

    async def _group(self, request: Request) -> Response:
        wanted = msgspec.msgpack.decode(await request.body(), type=CreateGroup)
        return self._answer(
            CheckpointGroup(tenant=wanted.tenant, name=wanted.name, description="", created_us=0)
        )

    async def _named_group(self, request: Request) -> Response:
        parts = request.path_params
        tenant = TenantName(parts["tenant"])
        return self._answer(
            CheckpointGroup(tenant=tenant, name=parts["name"], description="", created_us=0)
        )

    async def _nothing(self, _request: Request) -> Response:
        return self._answer(None)

    async def _checkpoint(self, request: Request) -> Response:
        parts = request.path_params
        return self._answer(
            self.checkpoints.get((parts["tenant"], parts["group"], parts["version"]))
        )

    def _answer(self, message: msgspec.Struct | None) -> Response:
        if self.down:
            return Response(b"", 500)
        if message is None:
            problem = Problem(code="not_found", message="there is no such thing")
            return Response(msgspec.msgpack.encode(problem), 404)
        return Response(msgspec.msgpack.encode(message))


def checkpoint(version: int, kind: str, model: str = "tiny", tenant: str = "acme") -> Checkpoint:
    uid = CheckpointId(f"00000000-0000-4000-8000-{version:012d}")
    return Checkpoint(
        id=uid,
        tenant=TenantName(tenant),
        session=SessionUid(UID),
        group="runs",
        version=version,
        kind=kind,  # type: ignore[arg-type]
        path=f"{tenant}/data/run-1/output/{uid}",
        model=model,
        rank=8,
        alpha=16,
        size_bytes=1,
        manifest_sha256="ab" * 32,
        description="",
        created_us=1_764_460_800_000_000,
    )


def package_arn(version: int, group: str = "runs", account: str = ACCOUNT) -> str:
    return f"arn:aws:sagemaker:{REGION}:{account}:model-package/{group}/{version}"


@dataclass(slots=True, kw_only=True)
class World:
    """`url` answers; `store`, `meter` and `ledger` are what it sees."""

    url: str
    gateway: Gateway
    store: LocalStore
    meter: FakeMeter
    meter_url: str
    ledger: FakeLedger
    keys: dict[str, str] = field(default_factory=dict)
    clients: dict[tuple[str, str], Any] = field(default_factory=dict)

    def reset(self) -> None:
        """As at the start: a meter and a ledger that know nothing, and the session `run-1` alone."""
        for name, value in vars_of(FakeMeter()).items():
            setattr(self.meter, name, value)
        for name, value in vars_of(FakeLedger()).items():
            setattr(self.ledger, name, value)
        for kind in (TrainingSession, EndpointSecret):
            for each in self.store.list(kind):
                self.store.delete(kind, each.metadata.namespace, each.metadata.name)
        self.add_session()

    def add_key(self, tenant: str = "acme", *, revoked: bool = False) -> str:
        """Make an access key; returns its id. Its secret is `secret-of-<id>`."""
        key_id = f"AKIA{tenant.upper():X<8}{len(self.keys):08d}"
        spec = AccessKeySpec(
            access_key_id=key_id,
            secret_access_key=f"secret-of-{key_id}",
            tenant=tenant,
            revoked_us=1 if revoked else None,
        )
        self.store.create(
            AccessKey(metadata=Metadata(name=key_id.lower(), namespace=tenant), spec=spec)
        )
        self.keys[tenant] = key_id
        return key_id

    def add_session(
        self, name: str = "run-1", uid: str = UID, tenant: str = "acme", *, served: bool = True
    ) -> TrainingSession:
        """An accepted session that runs; `served`: with a meter."""
        created = self.store.create(
            TrainingSession(
                metadata=Metadata(
                    name=name.lower(),
                    namespace=tenant,
                    annotations={labels.SESSION_ID: uid},
                ),
                spec=TrainingSessionSpec(
                    display_name=name,
                    base_model_ref=BaseModelRef(name="tiny"),
                    output=OutputSpec(path=f"s3://data/{name}/output"),
                ),
            )
        )
        if served:
            self.serve_session(created, attempt=1)
        return self.set_state(created, "Running")

    def serve_session(self, session: TrainingSession, attempt: int, url: str = "") -> None:
        """Give a session an endpoint, or another one."""
        meta = session.metadata
        uid = meta.annotations[labels.SESSION_ID]
        if attempt > 1:
            self.store.delete(EndpointSecret, meta.namespace, meta.name)
        self.meter.attempts[uid] = attempt
        self.store.create(
            EndpointSecret(
                metadata=Metadata(name=meta.name, namespace=meta.namespace),
                spec=EndpointSecretSpec(
                    session_uid=uid,
                    attempt=attempt,
                    endpoint=url or self.meter_url,
                    secret=SECRET,
                ),
            )
        )

    def set_state(self, session: TrainingSession, state: str) -> TrainingSession:
        current = self.store.get(TrainingSession, session.metadata.namespace, session.metadata.name)
        accepted = conditions.condition(conditions.ACCEPTED, True, "Valid")
        changes = {"state": state, "conditions": [accepted], "endpoint": self.meter_url}
        status = current.status.model_copy(update=changes)
        return self.store.update_status(current.model_copy(update={"status": status}))

    def client(self, service: str = RUNTIME, tenant: str = "acme", **config: Any) -> Any:
        """An official client that checks nothing and tries once. Kept, for making one is slow."""
        if not config and (service, tenant) in self.clients:
            return self.clients[service, tenant]
        key_id = self.keys[tenant]
        session = boto3.Session(
            aws_access_key_id=key_id,
            aws_secret_access_key=f"secret-of-{key_id}",
            region_name=REGION,
        )
        settings = {"retries": {"max_attempts": 0}, "parameter_validation": False, **config}
        made = session.client(service, endpoint_url=self.url, config=Config(**settings))
        if not config:
            self.clients[service, tenant] = made
        return made

    def call(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] = b"",
        headers: dict[str, str] | None = None,
        tenant: str = "acme",
    ) -> tuple[int, dict[str, str], bytes]:
        """A signed request; returns status, headers in lower case, and body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = AWSRequest(method=method, url=self.url + path, data=data, headers=headers or {})
        key_id = self.keys[tenant]
        SigV4Auth(Credentials(key_id, f"secret-of-{key_id}"), "sagemaker", REGION).add_auth(request)
        return self.send(method, path, data, dict(request.headers.items()))

    def send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """A request as it is, on a connection of its own."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()


def vars_of(fake: Any) -> dict[str, Any]:
    return {each.name: getattr(fake, each.name) for each in fields(fake)}


@contextmanager
def gateway_world(
    folder: Path,
    result_wait_s: float = 0.5,
    submit_hold_s: float = 0.0,
    ledger_app: Any = None,
) -> Iterator[World]:
    """A tenant `acme` with a key, the base model `tiny`, and the session `run-1`.

    ledger_app: a ledger in the place of the few answers.
    """
    store = open_local_store(folder / "store.sqlite3")
    model = BaseModelSpec(
        hugging_face_id="Lab/Tiny", vocabulary_size=VOCABULARY, context_length=CONTEXT
    )
    store.create(
        Tenant(
            metadata=Metadata(name="acme", namespace=""), status=TenantStatus(account_id=ACCOUNT)
        )
    )
    store.create(BaseModelResource(metadata=Metadata(name="tiny", namespace=""), spec=model))
    meter, ledger = FakeMeter(), FakeLedger()
    with ExitStack() as stack:
        meter_url = stack.enter_context(serve(meter.app()))
        ledger_url = stack.enter_context(serve(ledger_app or ledger.app()))
        settings = GatewaySettings(
            store_path=folder / "store.sqlite3",
            ledger_url=ledger_url,
            artifacts_dir=folder / "artifacts",
            result_wait_s=result_wait_s,
            submit_hold_s=submit_hold_s,
        )
        made: list[Gateway] = []

        def build() -> FastAPI:
            made.append(make_gateway(settings, store, b"k" * 32, open_http()))
            return make_app(made[0])

        url = stack.enter_context(serve(_lazily(build)))
        world = World(
            url=url,
            gateway=made[0],
            store=store,
            meter=meter,
            meter_url=meter_url,
            ledger=ledger,
        )
        world.add_key()
        world.add_session()
        yield world


def _lazily(build: Any) -> Any:
    """An app that is made on the event loop that serves it, as an aiohttp session must be."""
    app: list[Any] = []

    async def lazy(scope: Any, receive: Any, send: Any) -> None:
        if not app:
            app.append(build())
        await app[0](scope, receive, send)

    return lazy
