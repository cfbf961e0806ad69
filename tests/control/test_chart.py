"""The chart on a real API server: everything is taken, upgrades bring definitions, rights are as they say."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from gristmill_operator.permissions import needed
from gristmill_testing.chart import CHART, NAMESPACE
from gristmill_testing.cluster import Cluster, eventually

# No kubelet is there to run the check before an uninstall: its program is run here, by hand.
VALUES = ("--set=uninstall.check=false", "--set=global.imageRegistry=gristmill.test")
OPERATOR = f"system:serviceaccount:{NAMESPACE}:gristmill-operator"
GATEWAY = f"system:serviceaccount:{NAMESPACE}:gristmill-gateway"
KINDS = ("trainingsessions", "tenants", "basemodels", "ratecards")


def install(cluster: Cluster, chart: Path = CHART, *more: str) -> None:
    """Install or upgrade. Other tests apply the same definitions by hand: the release takes them over."""
    cluster.helm(
        "upgrade", "--install", "gristmill", str(chart), f"-n{NAMESPACE}", "--create-namespace",
        "--take-ownership", "--force-conflicts", *VALUES, *more,
    )  # fmt: skip


def uninstall(cluster: Cluster) -> None:
    cluster.helm("uninstall", "gristmill", f"-n{NAMESPACE}", "--ignore-not-found")


@pytest.fixture(scope="module")
def release(control_cluster: Cluster) -> Iterator[Cluster]:
    install(control_cluster)
    for kind in KINDS:
        control_cluster.wait_condition("crd", f"{kind}.gristmill.dev", "Established")
    yield control_cluster
    uninstall(control_cluster)
    control_cluster.delete("namespace", NAMESPACE)


def test_the_api_server_takes_every_object(release: Cluster) -> None:
    (found,) = json.loads(release.helm("list", f"-n{NAMESPACE}", "-o", "json"))
    assert found["status"] == "deployed"
    manifest = release.helm("get", "manifest", "gristmill", f"-n{NAMESPACE}")
    objects = [each for each in yaml.safe_load_all(manifest) if each]
    assert len(objects) > 40
    live = yaml.safe_load(release.kubectl("get", "-f", "-", "-o", "yaml", stdin=manifest))
    assert len(live["items"]) == len(objects)


def test_an_unchanged_upgrade_restarts_nothing(release: Cluster) -> None:
    def generations() -> dict[str, int]:
        return {
            each["metadata"]["name"]: each["metadata"]["generation"]
            for each in release.objects("deployments", NAMESPACE)
        }

    before = generations()
    assert len(before) == 3
    install(release)
    assert generations() == before


def test_our_pods_are_taken_by_a_restricted_namespace(release: Cluster) -> None:
    def count() -> int:
        return len(release.objects("pods", NAMESPACE, "app.kubernetes.io/name=gristmill"))

    eventually("pods are made", lambda: count() >= 5)
    answer = release.try_kubectl(
        "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted",
        "--dry-run=server", "--overwrite",
    )  # fmt: skip
    assert answer.code == 0
    assert "Warning" not in answer.err, answer.err


def allowed(cluster: Cluster, who: str, verb: str, what: str, namespace: str = "") -> bool:
    place = [f"--namespace={namespace}"] if namespace else ["--all-namespaces"]
    resource, _, subresource = what.partition("/")
    answer = cluster.try_kubectl(
        "auth", "can-i", verb, resource, f"--subresource={subresource}", f"--as={who}", *place
    )
    assert answer.out.strip() in ("yes", "no"), answer.err
    return answer.out.strip() == "yes"


def test_the_operator_may_do_what_it_asks_for_at_its_start(release: Cluster) -> None:
    program = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": OPERATOR,
                "resourceAttributes": {
                    "group": right.group,
                    "resource": right.resource.partition("/")[0],
                    "subresource": right.resource.partition("/")[2],
                    "verb": right.verb,
                    "namespace": right.namespace,
                    "name": right.name,
                },
            },
        }
        for right in needed(NAMESPACE)
    ]
    answers = release.kubectl("create", "-f", "-", "-o", "json", stdin=yaml.safe_dump_all(program))
    decoder, rest, refused = json.JSONDecoder(), answers.strip(), []
    while rest:
        review, end = decoder.raw_decode(rest)
        rest = rest[end:].strip()
        if not review["status"]["allowed"]:
            refused.append(review["spec"]["resourceAttributes"])
    assert refused == []


@pytest.mark.parametrize(
    ("who", "verb", "what"),
    [
        (OPERATOR, "list", "secrets"),
        (OPERATOR, "create", "pods"),
        (OPERATOR, "delete", "namespaces"),
        (OPERATOR, "create", "clusterrolebindings.rbac.authorization.k8s.io"),
        (OPERATOR, "create", "tenants.gristmill.dev"),
        (GATEWAY, "get", "secrets"),
        (GATEWAY, "list", "pods"),
        (GATEWAY, "patch", "tenants.gristmill.dev"),
        (GATEWAY, "patch", "trainingsessions.gristmill.dev/status"),
    ],
)
def test_neither_may_do_more(release: Cluster, who: str, verb: str, what: str) -> None:
    assert not allowed(release, who, verb, what)


def bind(cluster: Cluster, namespace: str, role: str) -> int:
    """Exit code of the operator's attempt to bind a ClusterRole in a namespace."""
    binding = f"--clusterrole={role}"
    account = f"--serviceaccount={NAMESPACE}:gristmill-operator"
    answer = cluster.try_kubectl(
        "create", "rolebinding", role, binding, account, f"-n{namespace}", f"--as={OPERATOR}"
    )
    return answer.code


def test_the_operator_binds_one_role_and_then_what_that_role_covers(
    release: Cluster, control_cluster: Cluster, namespace: str
) -> None:
    assert bind(release, namespace, "cluster-admin") != 0
    assert bind(release, namespace, "gristmill-editor") != 0
    label = f"gristmill.dev/tenant={namespace}"
    release.kubectl("label", "namespace", namespace, label, f"--as={OPERATOR}")
    assert bind(release, namespace, "gristmill-operator-tenant") == 0
    eventually(
        "it may make pods there", lambda: allowed(release, OPERATOR, "create", "pods", namespace)
    )
    assert bind(release, namespace, "gristmill-viewer") == 0
    assert bind(release, namespace, "gristmill-editor") == 0
    assert bind(release, namespace, "edit") != 0
    assert not allowed(release, OPERATOR, "list", "secrets", namespace)


def test_people_with_the_clusters_own_roles_use_sessions(
    release: Cluster, control_cluster: Cluster, namespace: str
) -> None:
    for user, role in (("vera", "view"), ("edith", "edit")):
        release.kubectl(
            "create",
            "rolebinding",
            user,
            f"--clusterrole={role}",
            f"--user={user}",
            f"-n{namespace}",
        )
    sessions = "trainingsessions.gristmill.dev"
    eventually(
        "roles are aggregated", lambda: allowed(release, "edith", "create", sessions, namespace)
    )
    assert allowed(release, "vera", "watch", sessions, namespace)
    assert not allowed(release, "vera", "delete", sessions, namespace)
    assert not allowed(release, "edith", "create", sessions)


SESSION = """
apiVersion: gristmill.dev/v1alpha1
kind: TrainingSession
metadata: {name: NAME}
spec:
  baseModelRef: {name: tiny}
  lora: {}
"""


def with_a_new_field(folder: Path) -> Path:
    """The chart of the next release: its definition of TrainingSession has a field more."""
    chart = folder / "gristmill"
    shutil.copytree(CHART, chart)
    path = chart / "files/crds/trainingsessions.yaml"
    definition = yaml.safe_load(path.read_text())
    properties = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    properties["spec"]["properties"]["novelty"] = {
        "type": "string", "maxLength": 63, "description": "Only the next release knows it.",
    }  # fmt: skip
    path.write_text(yaml.safe_dump(definition))
    return chart


def test_g54_an_upgrade_serves_the_new_field_of_a_definition(
    release: Cluster, control_cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    release.apply(SESSION.replace("NAME", "before"), namespace=namespace)
    novel = SESSION.replace("NAME", "after").replace("lora: {}", "lora: {}\n  novelty: new")
    assert "novelty" in release.try_apply(novel, namespace=namespace).err
    uid = release.get("trainingsession", "before", namespace)["metadata"]["uid"]
    install(release, with_a_new_field(tmp_path))
    try:
        eventually("it is served", lambda: release.try_apply(novel, namespace=namespace).code == 0)
        assert release.get("trainingsession", "after", namespace)["spec"]["novelty"] == "new"
        assert release.get("trainingsession", "before", namespace)["metadata"]["uid"] == uid
    finally:
        install(release)


def test_an_uninstall_keeps_definitions_sessions_books_and_key(
    release: Cluster, control_cluster: Cluster, namespace: str
) -> None:
    release.apply(SESSION.replace("NAME", "kept"), namespace=namespace)
    key = ["create", "secret", "generic", "gristmill-cluster-key", f"-n{NAMESPACE}"]
    release.try_kubectl(*key, "--from-literal=cluster.key=0123456789abcdef0123456789abcdef")
    claim = release.get("pvc", "gristmill-ledger", NAMESPACE)["metadata"]["uid"]
    uninstall(release)
    try:
        assert release.get("trainingsession", "kept", namespace)
        assert release.get("pvc", "gristmill-ledger", NAMESPACE)["metadata"]["uid"] == claim
        assert release.get("secret", "gristmill-cluster-key", NAMESPACE)
        for kind, name in (
            ("deployment", "gristmill-ledger"),
            ("clusterrole", "gristmill-operator"),
        ):
            assert release.find(kind, name, NAMESPACE if kind == "deployment" else None) is None
    finally:
        install(release)
    assert release.get("pvc", "gristmill-ledger", NAMESPACE)["metadata"]["uid"] == claim


VOLATILE = ("uid", "resourceVersion", "generation", "managedFields")


def test_a_session_that_is_restored_keeps_its_identity(
    release: Cluster, control_cluster: Cluster, namespace: str
) -> None:
    """As docs/how-to/back-up-a-cluster.md does it: without what the API server gave the old object."""
    identity = "5f6c2c4e-8f58-4b0e-9d0a-6b8a3c1d2e4f"
    mark = f"name: moves, annotations: {{gristmill.dev/session-id: {identity}}}"
    release.apply(SESSION.replace("name: NAME", mark), namespace=namespace)
    backup = release.get("trainingsession", "moves", namespace)
    before = backup["metadata"]["uid"]
    release.delete("trainingsession", "moves", namespace, wait=True)
    backup.pop("status", None)
    backup["metadata"] = {k: v for k, v in backup["metadata"].items() if k not in VOLATILE}
    release.kubectl("apply", "-f", "-", stdin=json.dumps(backup))
    restored = release.get("trainingsession", "moves", namespace)["metadata"]
    assert restored["annotations"]["gristmill.dev/session-id"] == identity
    assert restored["uid"] != before


@dataclass(slots=True, kw_only=True)
class Checks:
    """The chart's checks, started as their pods would, with the token of a ServiceAccount."""

    cluster: Cluster
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, program: str, account: str, **more: str) -> subprocess.Popen[str]:
        kubectl = self.cluster.kubectl
        (self.folder / "token").write_text(kubectl("create", "token", account, f"-n{NAMESPACE}"))
        config = self.cluster.get("configmap", "kube-root-ca.crt", NAMESPACE)
        (self.folder / "ca.crt").write_text(config["data"]["ca.crt"])
        environment = {
            **os.environ,
            "CHECK_ACCOUNT_DIR": str(self.folder),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": "6443",
            **more,
        }
        process = subprocess.Popen(
            [sys.executable, CHART / "files/hooks" / program],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process


@pytest.fixture
def checks(release: Cluster, tmp_path: Path) -> Iterator[Checks]:
    made = Checks(cluster=release, folder=tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def test_the_check_refuses_an_uninstall_while_there_are_sessions(
    release: Cluster, control_cluster: Cluster, namespace: str, checks: Checks
) -> None:
    release.apply(SESSION.replace("NAME", "busy"), namespace=namespace)
    check = checks.start("uninstall.py", "gristmill-operator")
    out, err = check.communicate(timeout=120)
    assert check.returncode == 1, err
    assert f"{namespace}/busy (Created)" in out
    assert "kubectl delete trainingsessions --all --all-namespaces" in out


def test_the_check_lets_an_empty_cluster_go(
    release: Cluster, control_cluster: Cluster, checks: Checks
) -> None:
    for each in release.objects("trainingsessions"):
        meta = each["metadata"]
        release.delete("trainingsession", meta["name"], meta["namespace"], wait=True)
    check = checks.start("uninstall.py", "gristmill-operator")
    out, err = check.communicate(timeout=120)
    assert (check.returncode, err) == (0, "")
    assert "the operator can go" in out


class Ready(BaseHTTPRequestHandler):
    """A gateway or ledger that is well."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def ready_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def start_test(checks: Checks, namespace: str, url: str) -> subprocess.Popen[str]:
    """`helm test`'s program, with a ServiceAccount that may edit sessions in `namespace`."""
    checks.cluster.kubectl(
        "create", "rolebinding", "helm-test", "--clusterrole=gristmill-editor",
        f"--serviceaccount={NAMESPACE}:gristmill-gateway", f"-n{namespace}",
    )  # fmt: skip
    return checks.start(
        "test.py", "gristmill-gateway",
        CHECK_GATEWAY=url, CHECK_LEDGER=url, CHECK_MODEL="tiny", CHECK_PROFILE="default",
        CHECK_TENANT_NAMESPACE=namespace, CHECK_TIMEOUT_S="30",
    )  # fmt: skip


def report(cluster: Cluster, namespace: str, status: dict[str, object]) -> None:
    """Say of the test's session what the operator would."""
    eventually(
        "the session is made", lambda: cluster.find("trainingsession", "helm-test", namespace)
    )
    patch = json.dumps({"status": status})
    cluster.kubectl(
        "patch", "trainingsession", "helm-test", f"-n{namespace}", "--subresource=status",
        "--type=merge", f"--patch={patch}",
    )  # fmt: skip


def test_helm_test_waits_for_a_session_to_run_and_takes_it_away(
    release: Cluster, control_cluster: Cluster, namespace: str, checks: Checks, ready_url: str
) -> None:
    check = start_test(checks, namespace, ready_url)
    report(release, namespace, {"state": "Running"})
    out, err = check.communicate(timeout=120)
    assert (check.returncode, err) == (0, "")
    assert f"session {namespace}/helm-test on tiny: Running after" in out
    assert release.find("trainingsession", "helm-test", namespace) is None


def test_helm_test_says_why_a_session_failed(
    release: Cluster, control_cluster: Cluster, namespace: str, checks: Checks, ready_url: str
) -> None:
    failed = {
        "type": "Failed",
        "status": "True",
        "reason": "ImageInvalid",
        "message": "no such image",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    check = start_test(checks, namespace, ready_url)
    report(release, namespace, {"state": "Failed", "conditions": [failed]})
    _, err = check.communicate(timeout=120)
    assert check.returncode == 1
    assert "the session is Failed: Failed=True ImageInvalid: no such image" in err
    release.wait_gone("trainingsession", "helm-test", namespace)
