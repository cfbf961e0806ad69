"""From `kubectl apply` to the first metered operation: where the time goes, on a real node.

    PYTHONPATH=tests/support python benchmarks/session_start.py [--runs 50] [--cluster FOLDER]

Node level of the test cluster (root): the chart as it ships, a tiny model, images that are there already. Each
run applies a session, waits until a `forward` of one datum is answered, and stops it. Moments are those at
which this process sees them on a watch. The operator's own part is what passes between the session and its
pod, and between the pod's readiness and the session's state. Floor: p99 500 ms; goal 250 ms.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gristmill_testing.cluster import Cluster
from gristmill_testing.node_lab import PLACE, TINY, Lab, open_lab
from gristmill_testing.operator_watch import Api
from gristmill_testing.raw_wire import RawSession, datum, forward, raw_clients
from gristmill_testing.release import remove_everything

Json = dict[str, Any]
PATH: Final = f"/apis/gristmill.dev/v1alpha1/namespaces/{PLACE}/trainingsessions"
STEPS: Final = (
    ("made", "pod", "operator: session seen to pod made"),
    ("pod", "scheduled", "scheduler, and the volume"),
    ("scheduled", "meter", "kubelet: meter started"),
    ("meter", "ready", "worker: imports torch, loads the model"),
    ("ready", "running", "operator: pod ready to session Running"),
    ("running", "answered", "first operation, metered"),
)
FLOOR_MS, GOAL_MS = 500.0, 250.0
UP_S = 600
"""Images are made anew where the code has changed."""


@dataclass(slots=True)
class Run:
    """Moments of one session, in seconds."""

    at: dict[str, float] = field(default_factory=dict)
    running: threading.Event = field(default_factory=threading.Event)

    def note(self, what: str) -> None:
        self.at.setdefault(what, time.monotonic())


@dataclass(slots=True)
class Watcher:
    api: Api
    runs: dict[str, Run] = field(default_factory=dict)

    def start(self) -> None:
        pods = f"/api/v1/namespaces/{PLACE}/pods?labelSelector=gristmill.dev/session"
        for path, look in ((PATH, self.session), (pods, self.pod)):
            threading.Thread(target=self.api.follow, args=(path, look), daemon=True).start()

    def session(self, found: Json) -> None:
        run = self.runs.get(found["metadata"]["name"])
        if run is not None:
            run.note("made")
            if (found.get("status") or {}).get("state") == "Running":
                run.note("running")
                run.running.set()

    def pod(self, found: Json) -> None:
        run = self.runs.get(found["metadata"]["labels"]["gristmill.dev/session"])
        if run is None:
            return
        status = found.get("status") or {}
        run.note("pod")
        if found["spec"].get("nodeName"):
            run.note("scheduled")
        if any(each.get("started") for each in status.get("initContainerStatuses") or []):
            run.note("meter")
        ready = [each for each in status.get("conditions") or [] if each["type"] == "Ready"]
        if ready and ready[0]["status"] == "True":
            run.note("ready")


def one_run(lab: Lab, api: Api, watcher: Watcher, name: str) -> Run:
    run = watcher.runs[name] = Run()
    body = {
        "apiVersion": "gristmill.dev/v1alpha1", "kind": "TrainingSession",
        "metadata": {"name": name, "namespace": PLACE},
        "spec": {
            "baseModelRef": {"name": TINY}, "lora": {"rank": 8},
            "storage": {"size": "1Gi", "retain": "Delete"},
        },
    }  # fmt: skip
    api.send([("POST", PATH, json.dumps(body).encode())])
    if not run.running.wait(300):
        raise RuntimeError(f"session {name} did not run: {lab.logs(name)}")
    session = RawSession(clients=raw_clients(lab.environment), name=name)
    answer = session.run(forward(datum([7, 11])))
    if answer["status"] != "Completed":
        raise RuntimeError(f"the first operation ended {answer['status']}")
    run.note("answered")
    api.send([("DELETE", f"{PATH}/{name}", b"")])
    lab.cluster.wait_gone("trainingsession", name, PLACE, seconds=300)
    return run


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(runs: list[Run], output: str) -> None:
    parts = {
        name: [(run.at[last] - run.at[first]) * 1e3 for run in runs] for first, last, name in STEPS
    }
    parts["apply to first answer"] = [(run.at["answered"] - run.at["made"]) * 1e3 for run in runs]
    own = [a + b for a, b in zip(parts[STEPS[0][2]], parts[STEPS[4][2]], strict=True)]
    parts["operator's own part"] = own
    rows = {
        name: {"p50_ms": statistics.median(values), "p99_ms": quantile(values, 0.99)}
        for name, values in parts.items()
    }
    if output == "json":
        sys.stdout.write(json.dumps({"runs": len(runs), "rows": rows}) + "\n")
        return
    sys.stdout.write(
        f"\n{f'{len(runs)} sessions, one at a time':<46} {'p50 ms':>9} {'p99 ms':>9}\n"
    )
    for name, row in rows.items():
        sys.stdout.write(f"{name:<46} {row['p50_ms']:>9.0f} {row['p99_ms']:>9.0f}\n")
    sys.stdout.write(
        f"operator's own part: floor p99 {FLOOR_MS:.0f} ms, goal {GOAL_MS:.0f} ms; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--output", choices=["table", "json"], default="table")
    parser.add_argument(
        "--cluster", type=Path, help="folder of a node level that is up, and stays so"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gmb-", dir="/var/tmp") as parent:
        cluster = Cluster(given.cluster or Path(parent) / "c")
        try:
            if not given.cluster:
                cluster.control("up", "--level", "node", timeout=UP_S)
            cluster.enter()
            report(measure(cluster, Path(parent), given.runs), given.output)
        finally:
            if given.cluster:
                remove_everything(cluster)
            else:
                cluster.control("down")


def measure(cluster: Cluster, folder: Path, count: int) -> list[Run]:
    remove_everything(cluster)
    lab, api = open_lab(cluster, folder), Api(cluster.folder / "pki")
    watcher = Watcher(api)
    watcher.start()
    one_run(lab, api, watcher, "warm-up")
    runs = []
    for number in range(count):
        runs.append(one_run(lab, api, watcher, f"run-{number}"))
        sys.stderr.write(f"\r{number + 1} of {count}")
    return runs


if __name__ == "__main__":
    main()
