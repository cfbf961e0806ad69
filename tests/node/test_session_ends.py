"""How sessions start late and end without their pods, on a real node under the policies of the shipped chart."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.chart import NAMESPACE
from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.node_clients import attach, standing_lab
from gristmill_testing.node_lab import PLACE, PROFILES, TINY, Lab
from gristmill_testing.node_models import base_model
from gristmill_testing.release import pods, service_ip
from gristmill_testing.sdk_loop import TOKENS, batch, step

pytestmark = pytest.mark.timeout(600)

PER_STEP = sum(map(len, TOKENS))
OPERATOR = f"system:serviceaccount:{NAMESPACE}:gristmill-operator"
DNS_IP = "10.96.0.10"
LEDGER_NAME = f"gristmill-ledger.{NAMESPACE}.svc.cluster.local"
QUERY = """
import json, socket, struct, sys
labels = b"".join(bytes([len(part)]) + part.encode() for part in sys.argv[2].split("."))
question = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\\0" + struct.pack("!2H", 1, 1)
def by_udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(5)
        s.sendto(question, (sys.argv[1], 53))
        return s.recv(512)
def by_tcp():
    with socket.create_connection((sys.argv[1], 53), 5) as s, s.makefile("rb") as file:
        s.sendall(struct.pack("!H", len(question)) + question)
        return file.read(struct.unpack("!H", file.read(2))[0])
print(json.dumps([socket.inet_ntoa(answer[-4:]) for answer in (by_udp(), by_tcp())]))
"""


@pytest.fixture(scope="module")
def lab(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with standing_lab(node_cluster, tmp_path_factory.mktemp("lab")) as lab:
        quarter = {"name": "quarter", "resources": {"cpu": "400m", "memory": "1Gi"}}
        profiles = [*PROFILES, quarter]
        lab.cluster.apply(base_model(lab.cluster, TINY, f"weights-{TINY}", profiles=profiles))
        yield lab


def manifest(name: str, **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "gristmill.dev/v1alpha1", "kind": "TrainingSession",
        "metadata": {"name": name, "namespace": PLACE},
        "spec": {"baseModelRef": {"name": TINY}, "lora": {"rank": 8, "alpha": 16}, "storage": {"size": "1Gi"}, **spec},
    }  # fmt: skip


def scale_ledger(lab: Lab, replicas: int) -> None:
    lab.cluster.kubectl("scale", "deployment/gristmill-ledger", f"-n{NAMESPACE}", f"--replicas={replicas}")  # fmt: skip
    eventually(
        f"the ledger has {replicas} pods",
        lambda: len(pods(lab.cluster, "ledger")) == replicas, 90,
    )  # fmt: skip
    if replicas:
        lab.cluster.wait_condition(
            "deployment", "gristmill-ledger", "Available", NAMESPACE, seconds=90
        )


def expect_train(lab: Lab, name: str, tokens: int) -> None:
    """The ledger's word, within seconds; the status may be a minute behind."""
    eventually(
        f"the ledger has {tokens} tokens of {name}",
        lambda: lab.ledger_tokens(name)["train"] == tokens, 60,
    )  # fmt: skip


def left_of(lab: Lab, name: str) -> set[str]:
    """Kind and name of every object of the session."""
    kinds = ("pods", "jobs", "secrets", "services", "configmaps", "networkpolicies", "persistentvolumeclaims")  # fmt: skip
    selector = f"gristmill.dev/session={name}"
    return {
        f"{kind}/{found['metadata']['name']}"
        for kind in kinds
        for found in lab.cluster.objects(kind, PLACE, selector)
    }


def test_g52_names_are_answered_by_udp_and_tcp_under_a_sessions_policies(lab: Lab) -> None:
    lab.cluster.apply(manifest("asks"))
    lab.wait_state("asks", "Running")
    [pod] = lab.pods("asks")
    wanted = service_ip(lab.cluster, "ledger")
    for container in ("meter", "worker"):
        said = lab.cluster.pod_exec(
            PLACE, pod["metadata"]["name"], "python", "-c", QUERY, DNS_IP, LEDGER_NAME,
            container=container,
        )  # fmt: skip
        assert json.loads(said) == [wanted, wanted], container


def test_a_deleted_session_leaves_its_kept_volume_and_nothing_else(lab: Lab) -> None:
    """The session of the test before this one: its meter lives, and posts what it has."""
    client = attach(lab, "asks")
    step(client)
    lab.cluster.delete("trainingsession", "asks", PLACE)
    lab.cluster.wait_gone("trainingsession", "asks", PLACE, seconds=120)
    eventually(
        "only the volume is left",
        lambda: left_of(lab, "asks") == {"persistentvolumeclaims/asks-state"}, 60,
    )  # fmt: skip
    assert lab.ledger_tokens("asks")["train"] == PER_STEP


def test_usage_that_only_the_volume_has_is_shipped_by_a_job_once(lab: Lab) -> None:
    cluster, name, job = lab.cluster, "orphaned", "orphaned-drain-a1"
    client = attach(lab, name)
    step(client)
    expect_train(lab, name, PER_STEP)
    mark = cluster.audit_mark()
    scale_ledger(lab, 0)
    try:
        step(client)  # durability Volume: the result leaves though no ledger is there
        stop = '{"spec":{"desiredState":"Stopped"}}'
        cluster.kubectl("patch", "trainingsession", name, f"-n{PLACE}", "--type=merge", "-p", stop)
        [pod] = [each["metadata"]["name"] for each in lab.pods(name)]
        cluster.kubectl("delete", "pod", pod, f"-n{PLACE}", "--force", "--grace-period=0")
        eventually("a Job was made", lambda: cluster.find("job", job, PLACE), 90)
        assert lab.session(name)["status"]["state"] == "Stopping"
    finally:
        scale_ledger(lab, 1)
    assert lab.wait_state(name, "Stopped", seconds=240)["status"]["attempt"] == 1
    lab.expect_tokens(name, {"train": 2 * PER_STEP})
    cluster.wait_gone("job", job, PLACE)
    assert made(cluster, mark, "jobs", job) >= 1
    eventually(
        "no pod of the Job is left",
        lambda: not [each for each in left_of(lab, name) if each.startswith(("pods/", "jobs/"))],
        60,
    )
    cluster.delete("trainingsession", name, PLACE)
    cluster.wait_gone("trainingsession", name, PLACE)
    eventually(
        "only the volume is left",
        lambda: left_of(lab, name) == {f"persistentvolumeclaims/{name}-state"}, 60,
    )  # fmt: skip
    assert lab.ledger_tokens(name)["train"] == 2 * PER_STEP


def made(cluster: Cluster, mark: int, kind: str, name: str) -> int:
    """How often the operator made this object."""
    return sum(
        call["objectRef"]["resource"] == kind and call["objectRef"].get("name") == name
        for call in cluster.audit(mark, user=OPERATOR, verbs=("create",))
        if call["responseStatus"]["code"] == 201
    )


def test_g48_four_ranks_meet_though_rank_0_starts_last(lab: Lab) -> None:
    """Rank 0 alone has the session's volume, and waits for whoever provides it."""
    cluster, name = lab.cluster, "late-leader"
    cluster.stop("provisioner")
    try:
        reference = {"name": TINY, "profile": "quarter"}
        cluster.apply(manifest(name, workers=4, baseModelRef=reference))
        eventually("ranks 1 to 3 run", lambda: running_ranks(lab, name) == {"1", "2", "3"}, 180)
    finally:
        cluster.start("provisioner")
    status = lab.wait_state(name, "Running", seconds=300)["status"]
    assert (status["attempt"], status.get("restarts", 0)) == (1, 0), status
    client = attach(lab, name)
    client.forward_backward(batch([*TOKENS, TOKENS[0]])).result()
    client.optim_step(sdk.AdamParams(learning_rate=1e-2)).result()
    expect_train(lab, name, PER_STEP + len(TOKENS[0]))


def running_ranks(lab: Lab, name: str) -> set[str]:
    return {
        pod["metadata"]["labels"]["gristmill.dev/rank"]
        for pod in lab.pods(name)
        if pod["status"]["phase"] == "Running"
    }
