"""The shipped chart, a tenant and two base models on the test cluster's node, and the SDK's environment.

The SDK runs in the test process, outside the pods, and reaches the gateway's Service.
"""

import base64
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gristmill_cli.environment import sdk_environment, user_config
from gristmill_contracts import secrets
from gristmill_contracts.credentials import AccessKey, AccessKeySpec
from gristmill_contracts.resources import Metadata
from gristmill_contracts.tenant import Tenant, TenantStatus
from gristmill_testing.chart import CHART, NAMESPACE, ROOT
from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.node_models import PACKAGES, base_model, place_model, share_model
from gristmill_testing.release import install, service_ip
from gristmill_testing.tiny_models import build_tiny_llama

Json = dict[str, Any]
SAMPLES: Final = ROOT / "recipes/manifests"
TENANT: Final = "research"
PLACE: Final = "gm-research"
TINY: Final = "tiny"
SMOL: Final = "smollm2-135m-instruct"
TOKEN_TYPES: Final = ("prefill", "cached_prefill", "sample", "train")
FIELDS: Final = ("prefill", "cachedPrefill", "sample", "train")


LAB_VALUES: Final[dict[str, Any]] = {
    "sessions.environment": {"PYTHONPATH": f"/models/{TINY}/{PACKAGES}:/models/{SMOL}/{PACKAGES}"}
}
PROFILES: Final = [
    {"name": "default", "resources": {"cpu": "1", "memory": "2Gi"}},
    {"name": "half", "resources": {"cpu": "600m", "memory": "2Gi"}},
]
"""The node has two processors, and the system's own pods ask for a few hundredths."""


@dataclass(slots=True, kw_only=True)
class Lab:
    cluster: Cluster
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        return f"http://{service_ip(self.cluster, 'gateway')}:8450"

    @property
    def ledger(self) -> str:
        return f"http://{service_ip(self.cluster, 'ledger')}:8460"

    @property
    def key(self) -> bytes:
        data = self.cluster.get("secret", "gristmill-cluster-key", NAMESPACE)["data"]
        return base64.b64decode(data["cluster.key"])

    # --- sessions

    def session(self, name: str) -> Json:
        return self.cluster.get("trainingsession", name, PLACE)

    def wait_state(self, name: str, state: str, seconds: float = 180) -> Json:
        last: Json = {}

        def probe() -> bool:
            nonlocal last
            last = self.cluster.find("trainingsession", name, PLACE) or {}
            return bool((last.get("status") or {}).get("state") == state)

        try:
            eventually(f"session {name} is {state}", probe, seconds)
        except AssertionError as error:
            text = json.dumps(last.get("status"), indent=1)
            raise AssertionError(f"{error}\n{text}\n{self.logs(name)}") from None
        return last

    def pods(self, name: str) -> list[Json]:
        return self.cluster.objects("pods", PLACE, f"gristmill.dev/session={name}")

    def logs(self, name: str) -> str:
        """The last lines of the session's containers."""
        lines = []
        for pod in self.pods(name):
            for container in ("meter", "worker"):
                said = self.cluster.try_kubectl(
                    "logs", f"-n{PLACE}", pod["metadata"]["name"], f"-c{container}", "--tail=15"
                )
                lines.append(f"--- {pod['metadata']['name']} {container}\n{said.out}{said.err}")
        return "\n".join(lines)

    # --- the four who count

    def ledger_tokens(self, name: str) -> dict[str, int]:
        """Billed tokens of a session by the ledger's usage API."""
        request = urllib.request.Request(
            f"{self.ledger}/v1/usage?group_by=session",
            headers={
                "Authorization": f"Bearer {secrets.service_secret(self.key, 'cli')}",
                "X-Gristmill-Service": "cli",
            },
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            rows = json.load(answer)["rows"]
        return _tokens(rows, name)

    def status_tokens(self, name: str) -> dict[str, int]:
        """What kubectl shows."""
        usage = (self.session(name).get("status") or {}).get("usage") or {}
        return {kind: usage.get(camel, 0) for kind, camel in zip(TOKEN_TYPES, FIELDS, strict=True)}

    def cli_tokens(self, name: str) -> dict[str, int]:
        """What `gristmill usage` prints."""
        key_file = self.folder / "cluster.key"
        key_file.write_bytes(self.key)
        said = self.cli(
            "usage", "--group-by", "session", "--output", "json", "--ledger-url", self.ledger,
            "--cluster-key-file", str(key_file),
        )  # fmt: skip
        return _tokens(json.loads(said)["rows"], name)

    def cli(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gristmill_cli", *arguments],
            env={**os.environ, **self.environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def expect_tokens(self, name: str, tokens: Mapping[str, int], seconds: float = 90) -> None:
        """Ledger, custom resource and CLI say exactly this."""
        wanted = {kind: tokens.get(kind, 0) for kind in TOKEN_TYPES}
        for who in (self.ledger_tokens, self.cli_tokens, self.status_tokens):
            eventually(
                f"{who.__name__} of {name} is {wanted}, not {who(name)}",
                lambda who=who: who(name) == wanted, seconds, every=0.5,
            )  # fmt: skip


def _tokens(rows: list[Json], name: str) -> dict[str, int]:
    mine = [row for row in rows if row["session_name"] == name]
    return {kind: sum(row[kind] for row in mine) for kind in TOKEN_TYPES}


def open_lab(
    cluster: Cluster,
    folder: Path,
    values: Mapping[str, Any] | None = None,
    *,
    chart: Path = CHART,
) -> Lab:
    """Chart, rate card, tenant and the tiny model; returns when a session can be made."""
    place = place_model(cluster, TINY, build_tiny_llama)
    install(cluster, {**LAB_VALUES, **(values or {})}, chart=chart)
    cluster.apply(SAMPLES / "ratecard.yaml", SAMPLES / "tenant.yaml")
    cluster.wait_condition("ratecard", "standard-2026", "Recorded")
    tenant = cluster.wait_condition("tenant", TENANT, "Ready")
    claim = share_model(cluster, PLACE, place)
    cluster.apply(base_model(cluster, TINY, claim, profiles=PROFILES))
    cluster.wait_condition("basemodel", TINY, "Ready")
    lab = Lab(cluster=cluster, folder=folder)
    lab.environment = _environment(lab, tenant)
    return lab


def _environment(lab: Lab, tenant: Json) -> dict[str, str]:
    """As `gristmill env` prints it for one machine; the key is the tenant's own Secret."""
    secret = lab.cluster.get("secret", "gristmill-key-laptop", PLACE)["data"]
    halves = {name: base64.b64decode(value).decode() for name, value in secret.items()}
    owner = Tenant(
        metadata=Metadata(name=TENANT, namespace=""),
        status=TenantStatus(account_id=tenant["status"]["accountId"]),
    )
    key = AccessKey(
        metadata=Metadata(name="laptop"),
        spec=AccessKeySpec(
            access_key_id=halves["accessKeyId"],
            secret_access_key=halves["secretAccessKey"],
            tenant=TENANT,
        ),
    )
    config = lab.folder / "sdk.yaml"
    config.write_text(user_config(owner))
    return sdk_environment(lab.gateway, owner, key, config=config, data_dir=lab.folder)
