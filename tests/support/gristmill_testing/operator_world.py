"""Real operators, a real ledger and a real API server with fake nodes: what operator tests act in.

The chart is installed as it ships (its pods are fake ones), and the operators under test run as processes
with the rights of the shipped ServiceAccount, through a proxy that can answer wrongly.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gristmill_testing.api_address import api_entry, api_server
from gristmill_testing.api_proxy import ApiProxy, api_proxy
from gristmill_testing.cluster import ROOT, Cluster, eventually
from gristmill_testing.fake_meters import FakeMeters, fake_meters
from gristmill_testing.ledger import free_port

Json = dict[str, Any]
SYSTEM = "gristmill-system"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:gristmill-operator"
KEY = bytes(range(32))
IMAGE = "registry.example.com/gristmill-worker@sha256:" + "a" * 64
METER_IMAGE = "registry.example.com/gristmill-meter@sha256:" + "b" * 64
START_S = 180
READY_S = 180
"""The quota controller alone needs half a minute for a kind that is new to it."""
RESET_S = 300
STOP_S = 20


@dataclass(slots=True)
class Process:
    """One of our processes, with its log."""

    process: "subprocess.Popen[bytes]"
    log: Path
    port: int

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self, within_s: float = 30) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, path: str) -> tuple[int, str]:
        """Status and body of a probe; (0, "") if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    @property
    def rss_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True, kw_only=True)
class OperatorWorld:
    cluster: Cluster
    folder: Path
    proxy: ApiProxy
    ledger: Process
    meters: FakeMeters
    direct: bool = False
    """Operators speak to the API server itself, not through the proxy: no faults, and no time of ours."""
    operators: list[Process] = field(default_factory=list)
    started: int = 0

    # --- processes

    def start_operator(self, *, ready: bool = True, **settings: str) -> Process:
        """One more operator. `settings` by their names without the prefix, in lower case."""
        self.started += 1
        port = free_port()
        given = {
            "host": "127.0.0.1", "port": str(port), "system_namespace": SYSTEM,
            "kubeconfig": str(self._kubeconfig()), "ledger_url": self.meters.ledger_url,
            "meter_image": METER_IMAGE, "identity": f"operator-{self.started}", **settings,
        }  # fmt: skip
        process = start(
            "gristmill_operator",
            "OPERATOR",
            given,
            self.folder / f"operator-{self.started}.log",
            port,
        )
        self.operators.append(process)
        if ready:
            self.wait_ready(process)
        return process

    def wait_ready(self, process: Process, within_s: float = START_S) -> None:
        def probe() -> bool:
            assert process.alive, process.log.read_text()[-4000:]
            return process.ask("/readyz")[0] == 200

        eventually(f"{process.log.name} is ready", probe, within_s)

    def stop_operators(self) -> None:
        """As Kubernetes does: they give their Lease back, so that the next one leads at once."""
        for each in self.operators:
            if each.alive:
                each.process.terminate()
        for each in self.operators:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(STOP_S)
            each.kill()
        self.operators.clear()

    def leader(self) -> str:
        lease = self.cluster.find("lease", "gristmill-operator", SYSTEM)
        holder: str = ((lease or {}).get("spec") or {}).get("holderIdentity") or ""
        return holder

    def _kubeconfig(self) -> Path:
        """The shipped account, through the proxy unless `direct`."""
        token = self.cluster.kubectl(
            "create", "token", "gristmill-operator", f"--namespace={SYSTEM}", "--duration=4h"
        ).strip()
        path = self.folder / "operator.kubeconfig"
        target = api_entry(self.cluster) if self.direct else {"server": self.proxy.url}
        text = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": target}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(text))
        path.chmod(0o600)
        return path

    # --- objects

    def tenant(self, name: str = "acme", **spec: Any) -> str:
        """A Ready tenant; returns its namespace."""
        self.cluster.apply(tenant(name, **spec))
        self.cluster.wait_condition("tenant", name, "Ready", seconds=READY_S)
        namespace: str = spec.get("namespace", f"gm-{name}")
        return namespace

    def model(self, name: str = "tiny", **spec: Any) -> None:
        self.cluster.apply(model(name, **spec))
        self.cluster.wait_condition("basemodel", name, "Ready", seconds=READY_S)

    def session(self, name: str, namespace: str = "gm-acme") -> Json:
        return self.cluster.get("trainingsession", name, namespace)

    def state(self, name: str, namespace: str = "gm-acme") -> str:
        found = self.cluster.find("trainingsession", name, namespace)
        state: str = ((found or {}).get("status") or {}).get("state", "")
        return state

    def wait_state(
        self, name: str, state: str, namespace: str = "gm-acme", seconds: float = 60
    ) -> Json:
        def probe() -> Json | None:
            found = self.cluster.find("trainingsession", name, namespace)
            return found if found and (found.get("status") or {}).get("state") == state else None

        try:
            result: Json = eventually(f"session {name} is {state}", probe, seconds)
        except AssertionError as error:
            found = self.cluster.find("trainingsession", name, namespace)
            raise AssertionError(
                f"{error}\n{json.dumps((found or {}).get('status'), indent=1)}"
            ) from None
        return result

    def pods(self, name: str = "", namespace: str = "gm-acme") -> list[Json]:
        selector = f"gristmill.dev/session={name}" if name else "gristmill.dev/session"
        return self.cluster.objects("pods", namespace, selector)

    def pod_uids(self, name: str = "", namespace: str = "gm-acme") -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods(name, namespace)}

    def condition(self, name: str, type_: str, namespace: str = "gm-acme") -> Json:
        """The whole condition; {} where there is none."""
        found = self.cluster.find("trainingsession", name, namespace) or {}
        conditions = (found.get("status") or {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == type_), {})

    def wait_reason(
        self, name: str, type_: str, reason: str, namespace: str = "gm-acme", seconds: float = 15
    ) -> Json:
        def probe() -> Json | None:
            found = self.condition(name, type_, namespace)
            return found if found.get("reason") == reason else None

        try:
            result: Json = eventually(f"session {name}: {type_} {reason}", probe, seconds)
        except AssertionError as error:
            found = self.cluster.find("trainingsession", name, namespace)
            raise AssertionError(
                f"{error}\n{json.dumps((found or {}).get('status'), indent=1)}"
            ) from None
        return result

    def events(self, name: str, namespace: str = "gm-acme") -> list[Json]:
        """Events about a session, oldest first, as events.k8s.io/v1."""
        found = self.cluster.objects("events.events.k8s.io", namespace)
        about = [each for each in found if each.get("regarding", {}).get("name") == name]
        return sorted(about, key=lambda each: each.get("eventTime") or "")


def start(
    package: str, part: str, settings: dict[str, str], log: Path, port: int, *arguments: str
) -> Process:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GRISTMILL_")}
    given = {f"GRISTMILL_{part}_{name.upper()}": value for name, value in settings.items()}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", package, *arguments],
            env={**kept, **given},
            stdout=file,
            stderr=file,
        )
    return Process(process, log, port)


def start_ledger(folder: Path, port: int = 0) -> Process:
    """A ledger on SQLite that asks for the secrets of KEY."""
    folder.mkdir(parents=True, exist_ok=True)
    key_file = folder / "cluster.key"
    key_file.write_bytes(KEY)
    port = port or free_port()
    settings = {
        "host": "127.0.0.1", "port": str(port), "data_dir": str(folder),
        "artifacts_dir": str(folder / "artifacts"), "cluster_key_file": str(key_file),
    }  # fmt: skip
    process = start("gristmill_ledger", "LEDGER", settings, folder / "ledger.log", port)
    eventually("the ledger is ready", lambda: process.ask("/readyz")[0] == 200, START_S)
    return process


def tenant(name: str = "acme", **spec: Any) -> Json:
    return {
        "apiVersion": "gristmill.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name},
        "spec": spec,
    }


def model(name: str = "tiny", **spec: Any) -> Json:
    given = {
        "image": IMAGE,
        "weights": {"pvc": {"claimName": "weights"}},
        "profiles": [{"name": "default", "resources": {"cpu": "100m", "memory": "64Mi"}}],
        **spec,
    }
    return {
        "apiVersion": "gristmill.dev/v1alpha1",
        "kind": "BaseModel",
        "metadata": {"name": name},
        "spec": given,
    }


def session(name: str, namespace: str = "gm-acme", **spec: Any) -> Json:
    given = {
        "baseModelRef": {"name": "tiny"}, "lora": {}, "storage": {"size": "1Gi", "retain": "Delete"}, **spec,
    }  # fmt: skip
    meta = {"name": name, "namespace": namespace}
    return {
        "apiVersion": "gristmill.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": meta,
        "spec": given,
    }


def install_chart(cluster: Cluster, *options: str) -> None:
    """The shipped chart, whose own operator has no replicas: the tests start theirs."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    cluster.apply(
        {
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
            "metadata": {"name": "gristmill-cluster-key", "namespace": SYSTEM},
            "data": {"cluster.key": base64.b64encode(KEY).decode()},
        }
    )  # fmt: skip
    cluster.helm(
        "upgrade",
        "--install",
        "gristmill",
        str(ROOT / "charts/gristmill"),
        f"--namespace={SYSTEM}",
        # Tests change definitions and roles, and what they changed must not stand in the way.
        "--force-conflicts",
        *options,
    )


@contextmanager
def operator_world(
    cluster: Cluster,
    folder: Path,
    *,
    nodes: int = 3,
    meters: bool = True,
    direct: bool = False,
) -> Iterator[OperatorWorld]:
    """Chart installed, ledger up, fake nodes ready; no operator yet."""
    install_chart(cluster)
    sweep(cluster)
    # The chart's own operators would take the Lease if a real node ran them.
    cluster.start_fake_nodes(nodes)
    with ExitStack() as stack:
        ledger = start_ledger(folder / "ledger")
        stack.callback(ledger.kill)
        proxy = stack.enter_context(api_proxy(*api_server(cluster)))
        running = stack.enter_context(
            fake_meters(
                ledger_url=f"http://127.0.0.1:{ledger.port}",
                key=KEY,
                pods=lambda: (
                    cluster.objects("pods", selector="gristmill.dev/session") if meters else []
                ),
                sessions=lambda: cluster.objects("trainingsessions") if meters else [],
            )
        )
        world = OperatorWorld(
            cluster=cluster,
            folder=folder,
            proxy=proxy,
            ledger=ledger,
            meters=running,
            direct=direct,
        )
        stack.callback(world.stop_operators)
        yield world


def reset(world: OperatorWorld) -> None:
    """Faults gone, sessions, tenants and models deleted, by an operator that lives for it alone."""
    world.proxy.heal()
    world.meters.deaf.clear()
    world.meters.mute.clear()
    if not any(each.alive for each in world.operators):
        world.start_operator()
    world.cluster.kubectl("delete", "trainingsessions", "--all", "--all-namespaces", "--wait=false")
    eventually(
        "all sessions are gone", lambda: not world.cluster.objects("trainingsessions"), RESET_S
    )
    for kind in ("tenants", "basemodels", "ratecards"):
        world.cluster.kubectl("delete", kind, "--all", "--wait=false")
    world.stop_operators()


def sweep(cluster: Cluster) -> None:
    """What a module that failed left behind, without asking an operator: the next one starts clean."""
    left: dict[str, list[str]] = {}
    for found in cluster.objects("trainingsessions"):
        left.setdefault(found["metadata"]["namespace"], []).append(found["metadata"]["name"])
    for namespace, names in left.items():
        place = f"--namespace={namespace}"
        cluster.kubectl("delete", "trainingsessions", *names, place, "--wait=false", timeout=120)
        for name in names:
            cluster.try_kubectl(
                "patch", "trainingsession", name, place, "--type=merge",
                '--patch={"metadata":{"finalizers":null}}',
            )  # fmt: skip
    if left:
        for kind in ("pods", "persistentvolumeclaims", "jobs"):
            cluster.kubectl(
                "delete", kind, "--all-namespaces", "--selector=app.kubernetes.io/managed-by=gristmill",
                "--wait=false", "--grace-period=0", "--force", timeout=120,
            )  # fmt: skip
        cluster.kubectl("delete", "tenants,basemodels,ratecards", "--all", "--wait=false")


def now() -> float:
    """The clock of `ApiProxy.requests(since=)`."""
    return time.monotonic()
