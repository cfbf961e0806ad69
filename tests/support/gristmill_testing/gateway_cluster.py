"""Gateways over a real API server: tenants, keys and sessions as the operator would leave them, a fake meter.

The operator is played: `serve` writes into a session's status what it writes when an attempt serves.
"""

import http.client
import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from gristmill_contracts import labels, secrets
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_gateway.app import Gateway, make_app, make_gateway, open_http
from gristmill_gateway.kubernetes_cluster import open_cluster
from gristmill_gateway.settings import GatewaySettings
from gristmill_testing.cluster import ROOT, Cluster, Json, eventually
from gristmill_testing.fake_meter import FakeMeter
from gristmill_testing.gateway_world import FakeLedger, _lazily
from gristmill_testing.loopback_server import serve

CLUSTER_KEY = bytes(range(32))
SYSTEM = "gristmill-system"
REGION = "us-west-2"
RUNTIME = "sagemakertrainingsessionruntime"
API_URL = "https://127.0.0.1:6443"
IMAGE = "registry.test/gristmill-worker@sha256:" + "a" * 64
GROUP = "gristmill.dev"
QUOTA_COUNTED_S = 35
QUOTA_TRIES = 4


def account(name: str, namespace: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": name, "namespace": namespace},
    }


def role(name: str, *rules: tuple[str, list[str], list[str]]) -> Json:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [{"apiGroups": [g], "resources": r, "verbs": v} for g, r, v in rules],
    }


def binding(role_name: str, name: str, namespace: str, *, everywhere: bool = False) -> Json:
    meta: Json = {"name": f"{role_name}-{name}"}
    if not everywhere:
        meta["namespace"] = namespace
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding" if everywhere else "RoleBinding",
        "metadata": meta,
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": role_name,
        },
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }


def install(cluster: Cluster) -> None:
    """Resource definitions, policies, the gateway's account and the roles of people, as the chart has them."""
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        cluster.apply(file)
    for name in ("trainingsessions", "tenants", "basemodels"):
        cluster.wait_condition("crd", f"{name}.{GROUP}", "Established")
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    cluster.apply(
        account("gristmill-gateway", SYSTEM),
        role(
            "gristmill-gateway",
            (GROUP, ["trainingsessions", "tenants", "basemodels"], ["get", "list", "watch"]),
            (GROUP, ["trainingsessions"], ["create", "patch", "delete"]),
            ("authorization.k8s.io", ["subjectaccessreviews"], ["create"]),
        ),
        binding("gristmill-gateway", "gristmill-gateway", SYSTEM, everywhere=True),
        role("gristmill-viewer", (GROUP, ["trainingsessions"], ["get", "list", "watch"])),
        role(
            "gristmill-editor",
            (
                GROUP,
                ["trainingsessions"],
                ["get", "list", "watch", "create", "update", "patch", "delete"],
            ),
        ),
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "BaseModel",
            "metadata": {"name": "tiny"},
            "spec": {
                "image": IMAGE,
                "weights": {"pvc": {"claimName": "tiny"}},
                "vocabularySize": 100,
                "contextLength": 64,
                "huggingFaceId": "Lab/Tiny",
            },
        },
    )


@dataclass(slots=True, kw_only=True)
class GatewayCluster:
    """`urls`: of the gateways, which share nothing but the cluster."""

    cluster: Cluster
    urls: list[str]
    gateways: list[Gateway]
    meter: FakeMeter
    meter_url: str
    ledger: FakeLedger
    keys: dict[str, str] = field(default_factory=dict)
    clients: dict[tuple[str, str, int], Any] = field(default_factory=dict)

    def add_tenant(self, *, bind: str = "gristmill-editor", **spec: Any) -> str:
        """A tenant with namespace gm-<name>, and a key whose account has the role `bind` there."""
        name = f"t{uuid.uuid4().hex[:8]}"
        namespace = spec.get("namespace", f"gm-{name}")
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": namespace, "labels": {labels.TENANT: name}},
            },
            {
                "apiVersion": f"{GROUP}/v1alpha1",
                "kind": "Tenant",
                "metadata": {"name": name},
                "spec": {"keys": [{"name": "main"}]} | spec,
            },
        )
        objects = [account("gm-client", namespace)]
        if bind:
            objects.append(binding(bind, "gm-client", namespace))
        self.cluster.apply(*objects)
        uid = self.cluster.get("tenant", name)["metadata"]["uid"]
        self.keys[name] = secrets.access_key_id(uid, "main")
        for gateway in self.gateways:
            eventually(
                "the gateway knows the tenant", lambda g=gateway: name in _tenants(g), seconds=10
            )
        return name

    def give_namespace(self, tenant: str) -> None:
        """What the operator writes once the namespace is the tenant's."""
        ready = {"type": "NamespaceReady", "status": "True", "reason": "Ready"}
        patch = {"status": {"conditions": [ready | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}}
        self.cluster.kubectl(
            "patch", "tenant", tenant, "--subresource=status", "--type=merge",
            f"--patch={json.dumps(patch)}",
        )  # fmt: skip

    def bound_sessions(self, tenant: str, number: int) -> None:
        """A quota of `number` sessions in the tenant's namespace that counts.

        On a young cluster its controller learns of our kinds within half a minute only, and looks again at a
        quota that it could not count when that is made anew. The operator has a way of its own.
        """
        name, namespace = "gristmill", f"gm-{tenant}"
        bound = "count/trainingsessions.gristmill.dev"
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"hard": {bound: str(number)}},
        }

        def counts() -> bool:
            found = self.cluster.get("resourcequota", name, namespace)
            return bound in (found.get("status", {}).get("used") or {})

        for _ in range(QUOTA_TRIES - 1):
            self.cluster.apply(quota)
            try:
                eventually("the quota counts", counts, QUOTA_COUNTED_S)
            except AssertionError:
                self.cluster.delete("resourcequota", name, namespace, wait=True)
            else:
                return
        self.cluster.apply(quota)
        eventually("the quota counts", counts, QUOTA_COUNTED_S)

    def client(self, tenant: str, service: str = "sagemaker", at: int = 0, **config: Any) -> Any:
        """An official client of the gateway number `at`, that tries once. Kept: making one is slow."""
        if not config and (tenant, service, at) in self.clients:
            return self.clients[tenant, service, at]
        key = self.keys[tenant]
        session = boto3.Session(
            aws_access_key_id=key,
            aws_secret_access_key=secrets.access_key_secret(CLUSTER_KEY, key),
            region_name=REGION,
        )
        settings = {"retries": {"max_attempts": 0}, **config}
        made = session.client(service, endpoint_url=self.urls[at], config=Config(**settings))
        if not config:
            self.clients[tenant, service, at] = made
        return made

    def call(
        self,
        tenant: str,
        method: str,
        path: str,
        body: Json,
        headers: dict[str, str],
        *,
        at: int = 0,
    ) -> tuple[int, bytes]:
        """A signed request with headers that a client would not send; status and body of the answer."""
        key = self.keys[tenant]
        credentials = Credentials(key, secrets.access_key_secret(CLUSTER_KEY, key))
        data = json.dumps(body).encode()
        url = self.urls[at] + path
        request = AWSRequest(method=method, url=url, data=data, headers=headers)
        SigV4Auth(credentials, "sagemaker", REGION).add_auth(request)
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=40)
        try:
            connection.request(method, path, body=data, headers=dict(request.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def create(self, tenant: str, name: str, at: int = 0, **changes: Any) -> Any:
        """CreateTrainingSession as the SDK sends it."""
        body = create_body(name) | changes
        return self.client(tenant, at=at).create_training_session(**body)

    def session(self, tenant: str, name: str) -> Json:
        return self.cluster.get("trainingsession", name, f"gm-{tenant}")

    def apply_session(
        self, tenant: str, name: str, annotations: dict[str, str] | None = None, **spec: Any
    ) -> Json:
        """As somebody does it with kubectl."""
        self.cluster.apply(
            {
                "apiVersion": f"{GROUP}/v1alpha1",
                "kind": "TrainingSession",
                "metadata": {
                    "name": name,
                    "namespace": f"gm-{tenant}",
                    "annotations": annotations or {},
                },
                "spec": {
                    "baseModelRef": {"name": "tiny"},
                    "lora": {"rank": 8, "alpha": 16},
                    "output": {"path": f"s3://data/{name}/output"},
                }
                | spec,
            }
        )
        return self.session(tenant, name)

    def uid(self, tenant: str, name: str) -> SessionUid:
        meta = self.session(tenant, name)["metadata"]
        return SessionUid(meta.get("annotations", {}).get(labels.SESSION_ID) or meta["uid"])

    def write_status(self, tenant: str, name: str, **status: Any) -> None:
        self.cluster.api.patch_status("trainingsessions", name, f"gm-{tenant}", status)

    def serve(self, tenant: str, name: str, attempt: int = 1, url: str = "") -> SessionUid:
        """The attempt serves at the fake meter: what the operator writes then."""
        uid = self.uid(tenant, name)
        self.meter.attempts[uid] = attempt
        self.meter.secrets[uid] = secrets.attempt_secret(CLUSTER_KEY, uid, attempt)
        now = "2026-01-01T00:00:00Z"
        true = [("Accepted", "Valid"), ("LedgerRegistered", "Registered"), ("Started", "Started")]
        true += [("Ready", "TakesOperations"), ("Serving", "Serving")]
        self.write_status(
            tenant,
            name,
            state="Running",
            attempt=attempt,
            endpoint=url or self.meter_url,
            conditions=[
                {"type": t, "status": "True", "reason": r, "lastTransitionTime": now}
                for t, r in true
            ],
        )
        for gateway in self.gateways:
            eventually(
                "the gateway knows the attempt",
                lambda g=gateway: _attempt(g, f"gm-{tenant}", name) == attempt,
                seconds=10,
            )
        return uid

    def withdraw(self, tenant: str, name: str) -> None:
        """The attempt's pod is gone, and no other serves yet."""
        self.write_status(tenant, name, endpoint="")
        for gateway in self.gateways:
            eventually(
                "the gateway knows that nobody serves",
                lambda g=gateway: _attempt(g, f"gm-{tenant}", name) == 0,
                seconds=10,
            )


def _tenants(gateway: Gateway) -> set[str]:
    return {tenant.metadata.name for tenant in gateway.context.store.list(Tenant)}


def _attempt(gateway: Gateway, namespace: str, name: str) -> int:
    for each in gateway.context.store.list(TrainingSession, namespace):
        if each.metadata.name == name:
            return each.status.attempt if each.status.endpoint else 0
    return 0


def create_body(name: str) -> Json:
    return {
        "TrainingSessionName": name,
        "LoraConfig": {"Rank": 8, "Alpha": 16},
        "RoleArn": "arn:aws:iam::100000000001:role/Researcher",
        "ModelConfig": {
            "BaseModelArn": f"arn:aws:sagemaker:{REGION}:aws:hub-content/SageMakerPublicHub/Model/tiny/1.0.0"
        },
        "OutputConfig": {"S3Location": {"Path": f"s3://data/{name}/output"}},
    }


@contextmanager
def gateway_cluster(
    cluster: Cluster, folder: Path, replicas: int = 1, **settings: Any
) -> Iterator[GatewayCluster]:
    """Installed, and `replicas` gateways in this process, each with a store, caches and port of its own."""
    install(cluster)
    key_file, token_file, ca_file = folder / "cluster.key", folder / "token", folder / "ca.crt"
    key_file.write_bytes(CLUSTER_KEY)
    token = cluster.kubectl("create", "token", "gristmill-gateway", f"--namespace={SYSTEM}")
    token_file.write_text(token)
    ca_file.write_bytes((cluster.folder / "pki/ca.crt").read_bytes())
    meter, ledger = FakeMeter(), FakeLedger()
    with ExitStack() as stack:
        meter_url = stack.enter_context(serve(meter.app()))
        ledger_url = stack.enter_context(serve(ledger.app()))
        values: dict[str, Any] = {
            "store": "kubernetes",
            "api_url": API_URL,
            "api_token_file": token_file,
            "api_ca_file": ca_file,
            "cluster_key_file": key_file,
            "ledger_url": ledger_url,
            "result_wait_s": 0.5,
        }
        options = GatewaySettings(**(values | settings))
        made: list[Gateway] = []

        def build() -> Any:
            parts = open_cluster(options)
            key = secrets.operation_key(parts.key)
            made.append(make_gateway(options, parts.store, key, open_http(), cluster=parts))
            return make_app(made[-1])

        urls = [stack.enter_context(serve(_lazily(build))) for _ in range(replicas)]
        world = GatewayCluster(
            cluster=cluster,
            urls=urls,
            gateways=made,
            meter=meter,
            meter_url=meter_url,
            ledger=ledger,
        )
        for gateway in made:
            eventually("the gateway has listed", lambda g=gateway: not g.cluster.away(), seconds=20)
        yield world
