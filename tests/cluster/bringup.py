"""The start of the cluster, in order, by a process inside it. It notes each step with the time it took."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import namespaces
import oci
from components import ETCD, LEVELS
from plan import API_PORT, HERE, NODE, Plan, write
from waiting import answers, run, succeeds, wait_for

IMPORT_S = 120
CTR = ("ctr", "-n", "k8s.io", "images")


class Steps:
    """Print what is done, with the seconds since the start."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def done(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:6.2f} s  {text}", flush=True)


def want(plan: Plan, *names: str, arguments: tuple[str, ...] = ()) -> None:
    for name in names:
        write(plan.folder / "want" / name, json.dumps(arguments))


def kubectl(plan: Plan, *args: str) -> tuple[str, ...]:
    return (str(plan.bin / "kubectl"), f"--kubeconfig={plan.kubeconfig('admin')}", *args)


def bring_up(plan: Plan) -> None:
    steps = Steps()
    on_node = plan.level == "node"
    first_import = start_runtime(plan) if on_node else None
    if not on_node:
        namespaces.join_nothing()
    want(plan, "etcd", "kube-apiserver")
    wait_for("etcd", lambda: answers(f"{ETCD}/health"))
    wait_for("the API server", lambda: answers(f"https://127.0.0.1:{API_PORT}/readyz"))
    steps.done("API server ready")
    want(plan, *LEVELS[plan.level])
    if on_node:
        namespaces.queue_new_connections()
    apply_addons(plan)
    steps.done("addons applied")
    if on_node:
        finish_imports(plan, first_import)
        steps.done("images imported")
        wait_node(plan)
        steps.done("node Ready, DNS answers")
    wait_for(
        "the default service account",
        lambda: succeeds(*kubectl(plan, "get", "serviceaccount", "default")),
    )
    steps.done("up")


def start_runtime(plan: Plan) -> subprocess.Popen[bytes]:
    """containerd and the world; returns the import of the largest archive, which runs beside what follows."""
    want(plan, "world", "containerd")
    namespaces.join_world(plan)
    wait_for("containerd", lambda: succeeds("ctr", "version"))
    return subprocess.Popen([*CTR, "import", "--no-unpack", str(plan.images[0])])


def finish_imports(plan: Plan, first: subprocess.Popen[bytes] | None) -> None:
    """The others build on the layers of the first."""
    base, *others = plan.images
    if first is not None and first.wait(timeout=IMPORT_S):
        raise RuntimeError(f"import of {base} failed with {first.returncode}; see log/bring-up.log")
    name_by_digest(plan, base)
    load_images(plan, others)


def load_images(plan: Plan, archives: Iterable[Path]) -> None:
    """Import archives into the cluster whose namespaces this runs in; their names then mean the new images."""
    for archive in archives:
        run(*CTR, "import", "--no-unpack", str(archive))
        name_by_digest(plan, archive)


def name_by_digest(plan: Plan, archive: Path) -> None:
    """Name each image `name@sha256:...` too, as a registry would, and note it in images.json."""
    known = plan.folder / "images.json"
    pinned = json.loads(known.read_text()) if known.exists() else {}
    for reference, digest in oci.references(archive).items():
        pinned[reference] = oci.pinned(reference, digest)
        run(*CTR, "tag", "--force", reference, pinned[reference])
    write(known, pinned)


def apply_addons(plan: Plan) -> None:
    files = sorted((HERE / "addons" / plan.level).iterdir())
    manifests = "\n---\n".join(path.read_text() for path in files)
    run(*kubectl(plan, "apply", "-f", "-"), stdin=manifests.replace("@BIN@", str(plan.bin)))


def wait_node(plan: Plan) -> None:
    for condition in (
        "create",
        "condition=Ready",
    ):  # a wait for a condition fails while there is no object
        run(*kubectl(plan, "wait", f"--for={condition}", f"node/{NODE}", "--timeout=60s"))
    run(
        *kubectl(
            plan, "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=60s"
        )
    )
