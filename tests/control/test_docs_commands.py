"""The commands of the pages for whoever runs a cluster are run as they stand there, on a real API server.

No kubelet: fake nodes say that every pod runs, and the ends of Jobs are played. The tests are one story, in order.
"""

import base64
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.cluster import ROOT, Cluster, eventually, must
from gristmill_testing.operator_world import SYSTEM, OperatorWorld, operator_world
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
PLACE = "gm-research"
NAME = "first-run"
FETCH = "gm-fetch-smollm2-135m-instruct"
TUTORIAL, KEYS, DRAIN, UPGRADE, BACK_UP, UNINSTALL = (
    (ROOT / "docs" / page).read_text()
    for page in (
        "tutorial/first-cluster.md",
        "how-to/keys.md",
        "how-to/drain-a-node.md",
        "how-to/upgrade-a-cluster.md",
        "how-to/back-up-a-cluster.md",
        "how-to/uninstall-from-a-cluster.md",
    )
)


def command(page: str, start: str) -> str:
    """The one command of the page that starts so, in one line."""
    whole = page.replace("\\\n", " ")
    [found] = [line.strip() for line in whole.splitlines() if line.startswith(f"    {start}")]
    return found


def block(page: str, word: str) -> str:
    """The one fenced block of shell that has the word."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    [found] = [each for each in blocks if word in each]
    return str(found)


def run(world: OperatorWorld, script: str, place: Path = ROOT, timeout: float = 240) -> str:
    """What the shell prints; it is the cluster's administrator."""
    cluster = world.cluster
    environment = {
        "KUBECONFIG": str(cluster.kubeconfig),
        "PATH": f"{cluster.bin}:{os.environ['PATH']}",
        "HOME": str(cluster.folder / "home"),
    }
    argv = ["bash", "-euo", "pipefail", "-c", f"cd {place}\n{script}"]
    return must(argv, timeout=timeout, env=environment)


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    """The chart as the tutorial installs it, and an operator of ours with its rights."""
    make_volumes(control_cluster, 12, "docs", size="200Gi")
    with operator_world(control_cluster, tmp_path_factory.mktemp("docs")) as made:
        control_cluster.helm("uninstall", "gristmill", f"-n{SYSTEM}", "--no-hooks")
        run(made, command(TUTORIAL, "helm install gristmill"))
        made.start_operator(weights_size="8Gi", lease_s="60", lease_renew_s="45")
        yield made


def finish(cluster: Cluster, job: str, namespace: str) -> None:
    """Play the node that ran its pod."""
    selector = f"batch.kubernetes.io/job-name={job}"
    pods = eventually(
        f"the Job {job} has a pod", lambda: cluster.objects("pods", namespace, selector), 120
    )
    cluster.kubectl(
        "patch", "pod", pods[0]["metadata"]["name"], f"--namespace={namespace}",
        "--subresource=status", "--type=merge", '--patch={"status":{"phase":"Succeeded"}}',
    )  # fmt: skip


def serves(world: OperatorWorld, attempt: int) -> bool:
    status = world.session(NAME, PLACE).get("status") or {}
    ready = (status.get("workers") or {}).get("ready") == 1
    return status.get("state") == "Running" and status.get("attempt") == attempt and ready


def test_the_tutorial_leads_to_a_session_that_runs(world: OperatorWorld) -> None:
    run(world, command(TUTORIAL, "kubectl apply -f recipes/manifests/ratecard.yaml"))
    run(world, command(TUTORIAL, "kubectl wait tenant/research"))
    listed = run(world, command(TUTORIAL, "kubectl get gristmill"))
    for thing in ("ratecard", "tenant", "basemodel"):
        assert f"{thing}.gristmill.dev/" in listed
    run(world, command(TUTORIAL, f"kubectl apply -n {PLACE} -f recipes/manifests/session.yaml"))
    finish(world.cluster, FETCH, PLACE)
    run(world, command(TUTORIAL, f"kubectl wait -n {PLACE}"), timeout=960)
    shown = run(world, f"kubectl get gms -n {PLACE}")
    assert re.search(rf"^{NAME} +Running ", shown, re.MULTILINE), shown
    assert "Started" in run(world, f"kubectl describe gms {NAME} -n {PLACE}")


def test_the_tutorials_variables_are_those_of_the_key(world: OperatorWorld, tmp_path: Path) -> None:
    script = block(TUTORIAL, "SAGEMAKER_USER_CONFIG_OVERRIDE")
    said = run(world, f"{script}\nenv", tmp_path).splitlines()
    values = dict(line.split("=", 1) for line in said if "=" in line)
    secret = world.cluster.get("secret", "gristmill-key-laptop", PLACE)["data"]
    account = world.cluster.get("tenant", "research")["status"]["accountId"]
    assert values["AWS_ACCESS_KEY_ID"] == base64.b64decode(secret["accessKeyId"]).decode()
    assert values["AWS_SECRET_ACCESS_KEY"] == base64.b64decode(secret["secretAccessKey"]).decode()
    assert values["SAGEMAKER_ROLE_ARN"] == f"arn:aws:iam::{account}:role/gm-client"
    assert f"DefaultS3Bucket: gristmill-{account}" in (tmp_path / "sdk.yaml").read_text()


def test_a_second_key_is_made_and_handed_out(world: OperatorWorld) -> None:
    run(world, command(KEYS, "kubectl patch tenant research"))
    eventually(
        "its Secret is there", lambda: world.cluster.find("secret", "gristmill-key-ci", PLACE), 60
    )
    assert len(run(world, command(KEYS, "kubectl get secret gristmill-key-ci"))) > 20
    run(world, command(KEYS, "kubectl create role key-ci"))
    run(world, command(KEYS, "kubectl create rolebinding key-ci"))
    for key, said in (("ci", "yes"), ("laptop", "no")):
        answer = world.cluster.try_kubectl(
            "auth", "can-i", "get", f"secrets/gristmill-key-{key}", f"-n{PLACE}", "--as=rita",
            "--as-group=research",
        )  # fmt: skip
        assert answer.out.strip() == said, key


def test_a_drained_node_loses_its_sessions_to_another(world: OperatorWorld) -> None:
    attempt = world.session(NAME, PLACE)["status"]["attempt"]
    [pod] = world.pods(NAME, PLACE)
    node = pod["spec"]["nodeName"]
    lost = command(DRAIN, "kubectl taint node NODE").replace("NODE", node, 1)
    try:
        run(world, command(DRAIN, "kubectl drain NODE").replace("NODE", node))
        eventually("it runs elsewhere", lambda: serves(world, attempt + 1), 60)
        assert {each["spec"]["nodeName"] for each in world.pods(NAME, PLACE)} != {node}
        assert world.session(NAME, PLACE)["status"].get("restarts", 0) == 0
        run(world, lost)
        run(world, f"{lost}-")
    finally:
        world.cluster.kubectl("uncordon", node)


def test_an_upgrade_leaves_the_session_alone_until_it_is_asked_to_move(
    world: OperatorWorld,
) -> None:
    before = world.pod_uids(NAME, PLACE)
    attempt = world.session(NAME, PLACE)["status"]["attempt"]
    run(world, command(UPGRADE, "helm upgrade gristmill"), timeout=360)
    [gateway, *_] = world.cluster.objects(
        "deployments", SYSTEM, "app.kubernetes.io/component=gateway"
    )
    [container, *_] = gateway["spec"]["template"]["spec"]["containers"]
    # The registry is that of the installation: its values were used again.
    assert container["image"] == "registry.example.com/gristmill-gateway:0.2.0"
    assert world.pod_uids(NAME, PLACE) == before
    [move] = re.findall(r"^ +(kubectl annotate gms NAME .*)$", UPGRADE, re.MULTILINE)
    run(world, move.replace("NAMESPACE", PLACE).replace("NAME", NAME))
    eventually("it has moved", lambda: serves(world, attempt + 1), 60)


def test_a_backup_brings_resources_and_key_back(world: OperatorWorld, tmp_path: Path) -> None:
    if shutil.which("jq") is None:
        pytest.skip("the page's commands need jq")
    cluster = world.cluster
    key = cluster.get("secret", "gristmill-cluster-key", SYSTEM)["data"]
    identity = world.session(NAME, PLACE)["metadata"]["annotations"]["gristmill.dev/session-id"]
    run(world, block(BACK_UP, "bare="), tmp_path)
    run(world, f"kubectl delete gms {NAME} -n {PLACE}")
    run(world, f"kubectl delete secret gristmill-cluster-key -n {SYSTEM}")
    [of_the_key] = re.findall(r"^ +(kubectl apply -f gristmill-key.yaml)$", BACK_UP, re.MULTILINE)
    run(world, of_the_key, tmp_path)
    assert cluster.get("secret", "gristmill-cluster-key", SYSTEM)["data"] == key
    for name in ("cluster", "sessions"):
        [apply] = re.findall(rf"`(kubectl apply -f gristmill-{name}\.json)`", BACK_UP)
        run(world, apply, tmp_path)
    restored = world.session(NAME, PLACE)["metadata"]["annotations"]
    assert restored["gristmill.dev/session-id"] == identity


def test_an_uninstall_keeps_what_its_page_says_and_that_goes_by_its_commands(
    world: OperatorWorld,
) -> None:
    cluster = world.cluster
    run(world, command(UNINSTALL, "kubectl delete trainingsessions"))
    ending = threading.Thread(
        target=finish, args=(cluster, "gristmill-uninstall-check", SYSTEM), daemon=True
    )
    ending.start()
    run(world, command(UNINSTALL, "helm uninstall gristmill"))
    ending.join(30)
    world.stop_operators()
    left = (
        ("crd", "tenants.gristmill.dev", None),
        ("namespace", PLACE, None),
        ("persistentvolumeclaim", "gristmill-ledger", SYSTEM),
        ("secret", "gristmill-cluster-key", SYSTEM),
    )
    removals = re.findall(r"`(kubectl delete [^`]+)` \|$", UNINSTALL, re.MULTILINE)
    assert len(removals) == len(left)
    for removal, thing in zip(removals, left, strict=True):
        assert cluster.find(*thing) is not None, removal
        run(world, removal)
        cluster.wait_gone(*thing)
