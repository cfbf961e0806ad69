"""`helm install` from nothing on a real node, its test, a rolling update, and the way out."""

import base64
import contextlib
import re
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gristmill_testing.chart import NAMESPACE, ROOT
from gristmill_testing.cluster import Cluster, condition, eventually
from gristmill_testing.cluster_pods import connections, pod
from gristmill_testing.node_lab import PLACE, TINY, open_lab
from gristmill_testing.release import (
    install,
    pods,
    refused_requests,
    remove_everything,
    service_ip,
    try_uninstall,
)

SAMPLES = ROOT / "recipes/manifests"
SESSION = """
apiVersion: gristmill.dev/v1alpha1
kind: TrainingSession
metadata: {name: waits, namespace: gm-research}
spec:
  baseModelRef: {name: not-there}
  lora: {}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    cluster: Cluster
    mark: int
    """Length of the audit log before the install."""
    seconds: float
    """From nothing until all pods were Ready."""


@pytest.fixture(scope="module")
def release(node_cluster: Cluster) -> Iterator[Release]:
    remove_everything(node_cluster)
    mark, begin = node_cluster.audit_mark(), time.monotonic()
    install(node_cluster)
    yield Release(cluster=node_cluster, mark=mark, seconds=time.monotonic() - begin)
    remove_everything(node_cluster)


def test_it_installs_from_nothing(release: Release) -> None:
    print(f"helm install --wait: {release.seconds:.1f} s")
    for component, replicas in (("operator", 2), ("gateway", 2), ("ledger", 1)):
        found = pods(release.cluster, component)
        assert [condition(each, "Ready") for each in found] == ["True"] * replicas
        assert {
            s["restartCount"] for each in found for s in each["status"]["containerStatuses"]
        } == {0}


def test_one_operator_leads_and_made_the_key(release: Release) -> None:
    lease = release.cluster.get("lease", "gristmill-operator", NAMESPACE)
    holder = lease["spec"]["holderIdentity"]
    assert any(
        holder.startswith(each["metadata"]["name"]) for each in pods(release.cluster, "operator")
    )
    secret = release.cluster.get("secret", "gristmill-cluster-key", NAMESPACE)
    assert set(secret["data"]) == {"cluster.key"}


def test_helm_test_passes(release: Release) -> None:
    said = release.cluster.helm("test", "gristmill", f"-n{NAMESPACE}", "--logs")
    assert "gateway: 200" in said
    assert "ledger: 200" in said


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_ledger_asks_who_calls(release: Release) -> None:
    address = f"http://{service_ip(release.cluster, 'ledger')}:8460"
    assert status_of(f"{address}/healthz") == 200
    assert status_of(f"{address}/v1/usage") == 401


def test_strangers_reach_the_gateway_and_nothing_else_of_ours(
    release: Release, node_cluster: Cluster, namespace: str
) -> None:
    cluster = release.cluster
    cluster.apply(pod("stranger", "-c", "import time; time.sleep(600)"), namespace=namespace)
    cluster.wait_condition("pod", "stranger", "Ready", namespace)
    ledger, gateway = service_ip(cluster, "ledger"), service_ip(cluster, "gateway")
    operator = pods(cluster, "operator")[0]["status"]["podIP"]
    targets = ((gateway, 8450), (ledger, 8460), (operator, 8480))
    assert connections(cluster, namespace, "stranger", *targets) == {
        f"{gateway}:8450": "open",
        f"{ledger}:8460": "dropped",
        f"{operator}:8480": "dropped",
    }
    install(cluster, {"networkPolicy.enabled": False})
    try:
        found = connections(cluster, namespace, "stranger", *targets)
        assert set(found.values()) == {"open"}, "without policies all of it is reached"
    finally:
        install(cluster)


def test_the_samples_of_a_platform_team_are_ready_in_a_minute(release: Release) -> None:
    cluster = release.cluster
    cluster.apply(SAMPLES / "ratecard.yaml", SAMPLES / "tenant.yaml", SAMPLES / "model.yaml")
    cluster.wait_condition("tenant", "research", "Ready")
    cluster.wait_condition("ratecard", "standard-2026", "Recorded")
    cluster.wait_condition("basemodel", "smollm2-135m-instruct", "Ready")
    assert cluster.get("secret", "gristmill-key-laptop", "gm-research")
    members = cluster.kubectl(
        "auth", "can-i", "create", "trainingsessions.gristmill.dev", "-n=gm-research",
        "--as=rita", "--as-group=research", "--as-group=system:authenticated",
    )  # fmt: skip
    assert members.strip() == "yes"


def test_the_books_are_backed_up_while_the_ledger_runs(release: Release, tmp_path: Path) -> None:
    """The program of docs/how-to/back-up-a-cluster.md."""
    page = (ROOT / "docs/how-to/back-up-a-cluster.md").read_text()
    program = re.search(r"python -c '\n(import sqlite3.*?)'", page, re.DOTALL)
    copied = re.search(r"-- cat (\S+) > books.sqlite3", page)
    assert program is not None
    assert copied is not None
    (ledger,) = pods(release.cluster, "ledger")
    name = ledger["metadata"]["name"]
    release.cluster.pod_exec(NAMESPACE, name, "python", "-c", program.group(1))
    encoded = release.cluster.pod_exec(
        NAMESPACE, name, "python", "-c",
        f"import base64; print(base64.b64encode(open('{copied.group(1)}', 'rb').read()).decode())",
    )  # fmt: skip
    (tmp_path / "books.sqlite3").write_bytes(base64.b64decode(encoded))
    with contextlib.closing(sqlite3.connect(tmp_path / "books.sqlite3")) as books:
        assert books.execute("pragma integrity_check").fetchone() == ("ok",)
        accounts = books.execute("select count(*) from tenant").fetchone()
    assert accounts == (1,), "the tenant of the samples"


@pytest.mark.timeout(600)
def test_helm_test_runs_a_session_on_a_model_that_is_named(
    release: Release, tmp_path: Path
) -> None:
    lab = open_lab(release.cluster, tmp_path, {"test.model": TINY, "test.namespace": PLACE})
    said = lab.cluster.helm(
        "test", "gristmill", f"-n{NAMESPACE}", "--logs", "--timeout=400s", timeout=420
    )
    assert f"session {PLACE}/helm-test on {TINY}: Running after" in said
    assert "deleted, its usage is in the ledger" in said
    assert lab.cluster.find("trainingsession", "helm-test", PLACE) is None


def test_g56_nothing_was_refused_to_us_for_want_of_a_right(release: Release) -> None:
    for account in ("gristmill-operator", "gristmill-gateway"):
        assert refused_requests(release.cluster, release.mark, account) == []


@dataclass(slots=True, kw_only=True)
class Caller:
    """Calls a URL again and again from a thread, each time over a connection of its own."""

    url: str
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.done.is_set():
            try:
                status = status_of(self.url)
                self.answered += 1
                if status != 200:
                    self.failed.append(f"status {status}")
            except OSError as error:
                self.failed.append(str(error))
            self.done.wait(0.02)


def test_the_gateways_address_answers_throughout_its_rolling_update(release: Release) -> None:
    caller = Caller(url=f"http://{service_ip(release.cluster, 'gateway')}:8450/healthz")
    thread = threading.Thread(target=caller.run)
    thread.start()
    before = {each["metadata"]["uid"] for each in pods(release.cluster, "gateway")}
    try:
        eventually("calls are answered", lambda: caller.answered > 20)
        release.cluster.kubectl(
            "rollout", "restart", "deployment/gristmill-gateway", f"-n{NAMESPACE}"
        )
        release.cluster.kubectl(
            "rollout", "status", "deployment/gristmill-gateway", f"-n{NAMESPACE}", timeout=120
        )

        def replaced() -> bool:
            found = {each["metadata"]["uid"] for each in pods(release.cluster, "gateway")}
            return len(found) == 2 and not found & before

        eventually("the old pods are gone", replaced, seconds=90)
    finally:
        caller.done.set()
        thread.join()
    assert caller.failed == []
    assert caller.answered > 100


def test_an_uninstall_is_refused_while_there_are_sessions(release: Release) -> None:
    cluster = release.cluster
    cluster.apply(SAMPLES / "tenant.yaml")
    cluster.wait_condition("tenant", "research", "Ready")
    cluster.apply(SESSION)
    answer = try_uninstall(cluster)
    assert answer.code != 0
    assert "gm-research/waits" in answer.out + answer.err
    assert "kubectl delete trainingsessions --all" in answer.out + answer.err
    assert len(pods(cluster, "operator")) == 2, "all of it is still there"
    cluster.kubectl("delete", "trainingsessions", "--all", "--all-namespaces", timeout=60)


def test_an_uninstall_keeps_what_cannot_be_made_again(release: Release) -> None:
    cluster = release.cluster
    cluster.apply(SAMPLES / "tenant.yaml")
    cluster.wait_condition("tenant", "research", "Ready")
    answer = try_uninstall(cluster)
    assert answer.code == 0, answer.out + answer.err
    kept = [
        ("persistentvolumeclaim", "gristmill-ledger", NAMESPACE),
        ("secret", "gristmill-cluster-key", NAMESPACE),
        ("crd", "trainingsessions.gristmill.dev", None),
        ("tenant", "research", None),
        ("namespace", "gm-research", None),
    ]
    for kind, name, place in kept:
        assert cluster.find(kind, name, place) is not None, f"{kind} {name}"
    for kind in ("deployments", "services", "networkpolicies", "serviceaccounts"):
        names = {each["metadata"]["name"] for each in cluster.objects(kind, NAMESPACE)}
        assert not [name for name in names if name.startswith("gristmill")], kind
    key = cluster.get("secret", "gristmill-cluster-key", NAMESPACE)["data"]
    install(cluster)
    assert cluster.get("secret", "gristmill-cluster-key", NAMESPACE)["data"] == key
    cluster.wait_condition("tenant", "research", "Ready")
