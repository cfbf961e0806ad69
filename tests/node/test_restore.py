"""Key, books, resources and a live session's volume outlive their cluster, and the SDK trains on in the next one.

As docs/how-to/back-up-a-cluster.md says it. One machine: all else of ours is removed instead of the cluster.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing import node_lab
from gristmill_testing.chart import NAMESPACE, ROOT
from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.cluster_pods import GROUP, USER, pod
from gristmill_testing.node_clients import attach, sdk_variables
from gristmill_testing.node_lab import LAB_VALUES, PLACE, TENANT, TINY, Lab, open_lab
from gristmill_testing.node_models import share_model
from gristmill_testing.raw_wire import ROLE_ARN
from gristmill_testing.release import KINDS, install, pods, remove_everything
from gristmill_testing.sdk_loop import TOKENS, step

Json = dict[str, Any]
NAME = "goes-on"
BOOKS = "books-of-before"
PER_STEP = sum(map(len, TOKENS))
OF_THE_OLD_CLUSTER = ("uid", "resourceVersion", "generation", "managedFields")
KEEP = '{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}'
FORGET = '[{"op":"remove","path":"/spec/claimRef/uid"},{"op":"remove","path":"/spec/claimRef/resourceVersion"}]'
WRITE = """
import base64, os, sys
os.makedirs("/books/ledger", mode=0o770)
with open("/books/ledger/ledger.sqlite3", "wb") as file:
    file.write(base64.b64decode(sys.stdin.read()))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What the page tells to keep."""

    declared: list[Json]
    sessions: list[Json]
    key: Json
    books: str
    """SQLite's file as base64."""
    claim: Json
    """Of the session's volume."""


@pytest.mark.timeout(900)
def test_a_restored_session_trains_on_and_the_books_stay_one(
    node_cluster: Cluster, tmp_path: Path
) -> None:
    cluster = node_cluster
    remove_everything(cluster)
    lab = open_lab(cluster, tmp_path)
    account = cluster.get("tenant", TENANT)["status"]["accountId"]
    with sdk_variables(lab):
        client = attach(lab, NAME)
        first = step(client)
        step(client)
        eventually(
            "the ledger has all of it",
            lambda: lab.ledger_tokens(NAME)["train"] == 2 * PER_STEP, 60,
        )  # fmt: skip
    backup = backed_up(cluster)
    lose_everything(cluster, backup)
    restore(lab, backup)
    assert cluster.get("tenant", TENANT)["status"]["accountId"] == account
    with sdk_variables(lab):
        reconnect(client)
        later = step(client)
        client.stop()
    assert later < first, "it goes on with what it had learned"
    lab.wait_state(NAME, "Stopped")
    lab.expect_tokens(NAME, {"train": 3 * PER_STEP})
    assert len(rows_of_ledger(lab)) == 1
    remove_everything(cluster)
    cluster.delete("persistentvolume", backup.claim["spec"]["volumeName"])


def reconnect(client: sdk.TrainingClient) -> None:
    """The address and the key are new; the client is the one that counted the operations."""
    fresh = sdk.ServiceClient(role_arn=ROLE_ARN)
    client._runtime = fresh._runtime
    client._service_client._sagemaker_client = fresh._sagemaker_client


def rows_of_ledger(lab: Lab) -> list[Json]:
    """Usage by session: all that the ledger knows of."""
    key_file = lab.folder / "cluster.key"
    key_file.write_bytes(lab.key)
    said = lab.cli(
        "usage", "--group-by", "session", "--output", "json", "--ledger-url", lab.ledger,
        "--cluster-key-file", str(key_file),
    )  # fmt: skip
    rows: list[Json] = json.loads(said)["rows"]
    return rows


# --- before --------------------------------------------------------------------------------------


def backed_up(cluster: Cluster) -> Backup:
    return Backup(
        declared=listed(cluster, "ratecards,tenants,basemodels"),
        sessions=listed(cluster, "trainingsessions", "--all-namespaces"),
        key=bare(cluster.get("secret", "gristmill-cluster-key", NAMESPACE)),
        books=books_of(cluster),
        claim=bare(cluster.get("persistentvolumeclaim", f"{NAME}-state", PLACE)),
    )


def listed(cluster: Cluster, kinds: str, *options: str) -> list[Json]:
    found = json.loads(cluster.kubectl("get", kinds, *options, "-o", "json"))["items"]
    return [bare(each) for each in found]


def bare(found: Json) -> Json:
    """What the page's jq leaves of it."""
    metadata = {k: v for k, v in found["metadata"].items() if k not in OF_THE_OLD_CLUSTER}
    return {**{k: v for k, v in found.items() if k != "status"}, "metadata": metadata}


def books_of(cluster: Cluster) -> str:
    """By the page's program, while the ledger runs."""
    page = (ROOT / "docs/how-to/back-up-a-cluster.md").read_text()
    program = re.search(r"python -c '\n(import sqlite3.*?)'", page, re.DOTALL)
    copied = re.search(r"-- cat (\S+) > books.sqlite3", page)
    assert program is not None
    assert copied is not None
    (ledger,) = pods(cluster, "ledger")
    name = ledger["metadata"]["name"]
    cluster.pod_exec(NAMESPACE, name, "python", "-c", program.group(1))
    read = (
        f"import base64; print(base64.b64encode(open({copied.group(1)!r}, 'rb').read()).decode())"
    )
    return cluster.pod_exec(NAMESPACE, name, "python", "-c", read)


def lose_everything(cluster: Cluster, backup: Backup) -> None:
    """No goodbye: pods are killed, no operator sees the end. The session's disk alone is left."""
    cluster.kubectl("patch", "persistentvolume", backup.claim["spec"]["volumeName"], "-p", KEEP)
    cluster.helm("uninstall", "gristmill", f"-n{NAMESPACE}", "--no-hooks", "--wait")
    cluster.kubectl("delete", "pods", "--all", f"-n{PLACE}", "--force", "--grace-period=0")
    for kind in KINDS:
        for found in cluster.objects(kind):
            meta = found["metadata"]
            place = [f"-n{meta['namespace']}"] if "namespace" in meta else []
            cluster.kubectl(
                "patch", kind, meta["name"], *place, "--type=merge",
                "-p", '{"metadata":{"finalizers":null}}',
            )  # fmt: skip
        cluster.kubectl("delete", "crd", f"{kind}.gristmill.dev")
    for name in (PLACE, NAMESPACE):
        cluster.delete("namespace", name)
    for name in (PLACE, NAMESPACE):
        cluster.wait_gone("namespace", name, seconds=120)
    cluster.delete("persistentvolume", f"weights-{TINY}-{PLACE}", wait=True)


# --- after ---------------------------------------------------------------------------------------


def restore(lab: Lab, backup: Backup) -> None:
    """In the page's order."""
    cluster = lab.cluster
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.apply(backup.key)
    place_books(cluster, backup.books)
    install(cluster, {**LAB_VALUES, "ledger.persistence.existingClaim": BOOKS})
    cluster.apply(*backup.declared)
    tenant = cluster.wait_condition("tenant", TENANT, "Ready")
    share_model(cluster, PLACE, cluster.folder / "models" / TINY)
    place_volume(cluster, backup.claim)
    cluster.apply(*backup.sessions)
    lab.environment = node_lab._environment(lab, tenant)
    lab.wait_state(NAME, "Running", seconds=240)


def place_books(cluster: Cluster, books: str) -> None:
    cluster.apply({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": BOOKS, "namespace": NAMESPACE},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    })  # fmt: skip
    writer = pod(
        "writer", "-c", "import time; time.sleep(600)",
        container={"volumeMounts": [{"name": "books", "mountPath": "/books"}]},
        volumes=[{"name": "books", "persistentVolumeClaim": {"claimName": BOOKS}}],
        securityContext={
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": GROUP, "fsGroup": GROUP,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    )  # fmt: skip
    cluster.apply(writer, namespace=NAMESPACE)
    cluster.wait_condition("pod", "writer", "Ready", NAMESPACE)
    cluster.kubectl("exec", "-i", f"-n{NAMESPACE}", "writer", "--", "python3", "-c", WRITE, stdin=books)  # fmt: skip
    cluster.delete("pod", "writer", NAMESPACE, wait=True)


def place_volume(cluster: Cluster, claim: Json) -> None:
    """The same disk, for a claim of the same name and labels."""
    volume, about = claim["spec"]["volumeName"], claim["metadata"]
    eventually(
        "the disk is free",
        lambda: cluster.get("persistentvolume", volume)["status"]["phase"] == "Released",
    )
    cluster.kubectl("patch", "persistentvolume", volume, "--type=json", "-p", FORGET)
    metadata = {key: about[key] for key in ("name", "namespace", "labels")}
    cluster.apply({**claim, "metadata": metadata})
