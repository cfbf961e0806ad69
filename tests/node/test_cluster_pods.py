"""The node runs pods as the product needs them: restricted, with a sidecar, volumes, tokens, pinned images."""

import datetime
import json
import re

import pytest

from gristmill_testing.cluster import ROOT, Cluster, Json, eventually
from gristmill_testing.cluster_pods import (
    GROUP,
    PYTHON_IMAGE,
    ended,
    hardened,
    pod,
    restrict,
    share_packages,
)

SLEEP = ("-c", "import time; time.sleep(3600)")
PARTS = ("operator", "gateway", "ledger", "meter", "worker")
SAY = """
import datetime, signal, socket, sys, time
def say(text):
    print(datetime.datetime.now().isoformat(), text, flush=True)
"""
METER = (
    SAY
    + """
signal.signal(signal.SIGTERM, lambda *_: (say("meter told"), sys.exit(0)))
time.sleep(1)
server = socket.socket(socket.AF_UNIX)
server.bind("/run/gristmill/worker.sock")
say("meter listens")
server.listen()
while True:
    client, _ = server.accept()
    client.sendall(b"hello")
    client.close()
"""
)
WORKER = (
    SAY
    + """
say("worker starts")
def stop(*_):
    say("worker told")
    time.sleep(1)
    say("worker ends")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
client = socket.socket(socket.AF_UNIX)
client.connect("/run/gristmill/worker.sock")
say("worker heard " + client.recv(100).decode())
while True:
    time.sleep(0.1)
"""
)


def times(log: str) -> dict[str, datetime.datetime]:
    # What kubectl itself has to say, of a log that ends under its hands, bears no time.
    lines = [line.split(" ", 1) for line in log.splitlines() if line[:4].isdigit()]
    return {text: datetime.datetime.fromisoformat(stamp) for stamp, text in lines}


def session_pod() -> Json:
    run = {"name": "run", "mountPath": "/run/gristmill"}
    probe = {"exec": {"command": ["test", "-S", "/run/gristmill/worker.sock"]}, "periodSeconds": 1}
    meter = hardened(
        "meter", "-c", METER, restartPolicy="Always", startupProbe=probe, volumeMounts=[run]
    )
    return pod(
        "session",
        "-c",
        WORKER,
        container={"volumeMounts": [run]},
        initContainers=[meter],
        terminationGracePeriodSeconds=20,
        volumes=[{"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}],
    )


def test_the_sidecar_starts_before_the_worker_and_is_told_to_end_after_it(
    node_cluster: Cluster, namespace: str
) -> None:
    restrict(node_cluster, namespace)
    node_cluster.apply(session_pod(), namespace=namespace)
    node_cluster.wait_condition("pod", "session", "Ready", namespace)
    logs = (f"-n{namespace}", "session", "--all-containers")
    worker_and_meter = node_cluster.kubectl("logs", *logs)
    assert "worker heard hello" in worker_and_meter
    mark = times(worker_and_meter)
    assert mark["meter listens"] < mark["worker starts"]
    follower = node_cluster.follow_logs(namespace, "session")
    node_cluster.delete("pod", "session", namespace)
    node_cluster.wait_gone("pod", "session", namespace)
    mark = times(follower())
    assert mark["worker told"] < mark["worker ends"] < mark["meter told"]


def test_pod_security_refuses_what_is_not_restricted_and_says_all_of_it(
    node_cluster: Cluster, namespace: str
) -> None:
    restrict(node_cluster, namespace)
    bad = pod(
        "bad", *SLEEP, hostNetwork=True, volumes=[{"name": "host", "hostPath": {"path": "/"}}]
    )
    answer = node_cluster.try_apply(bad, namespace=namespace)
    assert answer.code != 0
    assert 'violates PodSecurity "restricted:latest"' in answer.err
    assert "host namespaces" in answer.err
    assert "hostPath" in answer.err


def claim(name: str) -> Json:
    resources = {"requests": {"storage": "1Gi"}}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": spec,
    }


def on_the_claim(name: str, user: int, change_policy: str, code: str) -> Json:
    """A pod whose group owns the claim; it sees its own subPath as /mine, and as nobody's should, the whole as /all."""
    mounts = [{"name": "state", "mountPath": "/mine", "subPath": "meter" if user == 10001 else "worker"},
              {"name": "state", "mountPath": "/all"}]  # fmt: skip
    context = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": GROUP, "fsGroup": GROUP,
               "fsGroupChangePolicy": change_policy, "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip
    volume = {"name": "state", "persistentVolumeClaim": {"claimName": "state"}}
    return pod(
        name,
        "-c",
        code,
        container={"volumeMounts": mounts},
        volumes=[volume],
        securityContext=context,
    )


@pytest.mark.parametrize(
    ("change_policy", "seen"), [("OnRootMismatch", "denied"), ("Always", "bill")]
)
def test_what_a_user_makes_private_on_a_claim_stays_so_unless_the_group_is_applied_again(
    node_cluster: Cluster, namespace: str, change_policy: str, seen: str
) -> None:
    """With fsGroupChangePolicy Always, the default, each start of a pod opens every file to the group."""
    restrict(node_cluster, namespace)
    make = "import os; os.mkdir('/mine/log', 0o700); open('/mine/log/a', 'w').write('bill'); print(os.stat('/mine').st_gid)"
    look = """
open('/mine/note', 'w')
try:
    print(open('/all/meter/log/a').read())
except PermissionError:
    print("denied")
"""
    node_cluster.apply(
        claim("state"), on_the_claim("first", 10001, change_policy, make), namespace=namespace
    )
    assert ended(node_cluster, namespace, "first").strip() == str(GROUP)
    node_cluster.apply(on_the_claim("other", 10002, change_policy, look), namespace=namespace)
    assert ended(node_cluster, namespace, "other").strip() == seen
    again = "print(open('/mine/log/a').read())"
    node_cluster.apply(on_the_claim("again", 10001, change_policy, again), namespace=namespace)
    assert ended(node_cluster, namespace, "again").strip() == "bill"


def test_a_deleted_claim_takes_its_folder_with_it(node_cluster: Cluster, namespace: str) -> None:
    node_cluster.apply(claim("short"), namespace=namespace)
    node_cluster.kubectl(
        "wait", "--for=jsonpath={.status.phase}=Bound", "pvc/short", f"-n{namespace}"
    )
    volume = node_cluster.get("pvc", "short", namespace)["spec"]["volumeName"]
    assert (node_cluster.folder / "pv" / volume).is_dir()
    node_cluster.delete("pvc", "short", namespace)
    node_cluster.wait_gone("pv", volume)
    assert not (node_cluster.folder / "pv" / volume).exists()


def test_a_projected_token_holds_for_its_audience_alone(
    node_cluster: Cluster, namespace: str
) -> None:
    token = {
        "serviceAccountToken": {"audience": "meter", "expirationSeconds": 600, "path": "token"}
    }
    node_cluster.apply(
        pod(
            "p", "-c", "print(open('/var/run/gristmill/token').read())",
            container={"volumeMounts": [{"name": "token", "mountPath": "/var/run/gristmill"}]},
            volumes=[{"name": "token", "projected": {"sources": [token], "defaultMode": 0o444}}],
        ),
        namespace=namespace,
    )  # fmt: skip
    text = ended(node_cluster, namespace, "p").strip()

    def review(audience: str) -> Json:
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        body = json.dumps({**kind, "spec": {"token": text, "audiences": [audience]}})
        status: Json = json.loads(node_cluster.kubectl("create", "-f", "-", "-ojson", stdin=body))[
            "status"
        ]
        return status

    assert review("meter")["user"]["extra"]["authentication.kubernetes.io/pod-name"] == ["p"]
    assert not review("other").get("authenticated")


@pytest.mark.parametrize("part", PARTS)
def test_our_image_starts_by_its_digest_without_root_on_a_read_only_root(
    node_cluster: Cluster, namespace: str, part: str
) -> None:
    """`--help` comes from the part's own settings, so its module and packages are all there."""
    restrict(node_cluster, namespace)
    image = node_cluster.image(part)
    assert re.fullmatch(rf"gristmill\.test/gristmill-{part}@sha256:[a-f0-9]{{64}}", image)
    user = 10002 if part == "worker" else 10001
    container: Json = {"volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}]
    if part == "worker":
        share_packages(node_cluster, namespace)
        container["volumeMounts"].append({"name": "site", "mountPath": "/site", "readOnly": True})
        container["env"] = [{"name": "PYTHONPATH", "value": "/site"}]
        volumes.append(
            {
                "name": "site",
                "persistentVolumeClaim": {"claimName": "site-packages", "readOnly": True},
            }
        )
    node_cluster.apply(
        pod(part, "--help", image=image, user=user, container=container, volumes=volumes),
        namespace=namespace,
    )
    assert f"GRISTMILL_{part.upper()}_" in ended(node_cluster, namespace, part)


def test_our_images_hold_the_wheel_and_the_pinned_versions(
    node_cluster: Cluster, namespace: str
) -> None:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    entry = {"command": ["python", "-c", code]}
    node_cluster.apply(
        pod("p", image=node_cluster.image("gateway"), container=entry), namespace=namespace
    )
    found: dict[str, str] = json.loads(ended(node_cluster, namespace, "p"))
    assert found.pop("gristmill")
    lines = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {plain(name): version for name, version in found.items()}.items() <= {
        plain(name): version for name, version in pins.items()
    }.items()
    assert {"fastapi", "kubernetes", "sqlalchemy", "kopf"} <= {plain(name) for name in found}


def plain(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_torch_and_transformers_come_by_a_read_only_volume(
    node_cluster: Cluster, namespace: str
) -> None:
    restrict(node_cluster, namespace)
    share_packages(node_cluster, namespace)
    code = """
import torch, transformers
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                  vocab_size=512)
loss = transformers.LlamaForCausalLM(config)(torch.arange(32)[None], labels=torch.arange(32)[None]).loss
loss.backward()
print("loss", float(loss))
try:
    open("/site/planted.py", "w")
except OSError as error:
    print(error.strerror)
"""
    mounts = [
        {"name": "site", "mountPath": "/site", "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    node_cluster.apply(
        pod(
            "p", "-c", code, image=node_cluster.image("worker"), user=10002,
            container={"volumeMounts": mounts, "command": ["python"], "env": [{"name": "PYTHONPATH", "value": "/site"}]},
            volumes=[{"name": "tmp", "emptyDir": {}}, {"name": "site", "persistentVolumeClaim": {"claimName": "site-packages", "readOnly": True}}],
        ),
        namespace=namespace,
    )  # fmt: skip
    log = ended(node_cluster, namespace, "p", seconds=120)
    assert re.search(r"loss \d+\.\d+", log)
    assert "Read-only file system" in log


def test_an_image_that_is_not_here_is_not_found(node_cluster: Cluster, namespace: str) -> None:
    node_cluster.apply(pod("p", *SLEEP, image=f"{PYTHON_IMAGE}-none"), namespace=namespace)

    def reason() -> str:
        statuses = node_cluster.get("pod", "p", namespace)["status"].get("containerStatuses", [])
        return "".join(status["state"].get("waiting", {}).get("reason", "") for status in statuses)

    eventually("the pull fails", lambda: reason() in ("ErrImagePull", "ImagePullBackOff"))
