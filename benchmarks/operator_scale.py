"""One operator and many sessions on a real API server: how fast, how much memory, how many requests.

    PYTHONPATH=tests/support python benchmarks/operator_scale.py [--sessions 1000] [--idle-s 60]

Control level of the test cluster (API server, etcd, controllers and scheduler; root): fake nodes mark pods
Running, a real ledger registers sessions, volumes are bound when their pod is scheduled (as the classes of clouds do
it), the chart is installed as it ships, and the operator runs as a process with its rights. Sessions of one worker
are spread over ten tenants and applied at once. Phases: all Running; idle; killed and started again; one at a time
(the operator's own part). Deleting is not among them: it waits for Jobs that drain logs, which no fake node ends.
It is compared with the floors and goals of issue CLUSTER; `--qps` is the operator's own throttle.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill_testing.cluster import WRITES, Cluster, eventually
from gristmill_testing.operator_watch import Api
from gristmill_testing.operator_world import (
    ACCOUNT,
    IMAGE,
    OperatorWorld,
    Process,
    operator_world,
    session,
)
from gristmill_testing.processor import processor_seconds
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
SESSIONS = "/apis/gristmill.dev/v1alpha1"
TENANTS = 10
WARM_UP = 20
PHASES = ["burst", "idle", "restart", "singles"]
SETTLE_S = 600
QUIET_S = 15


@dataclass(slots=True)
class Moments:
    """When this process first saw each session and each pod in each state, in seconds."""

    api: Api
    seen: dict[str, dict[str, float]] = field(default_factory=dict)

    def start(self) -> None:
        for path, look in (
            (f"{SESSIONS}/trainingsessions", self._session),
            ("/api/v1/pods?labelSelector=gristmill.dev/session", self._pod),
        ):
            threading.Thread(target=self.api.follow, args=(path, look), daemon=True).start()

    def _note(self, name: str, what: str) -> None:
        self.seen.setdefault(name, {}).setdefault(what, time.monotonic())

    def _session(self, found: Json) -> None:
        name = found["metadata"]["name"]
        self._note(name, "made")
        if (found.get("status") or {}).get("state") == "Running":
            self._note(name, "running")

    def _pod(self, found: Json) -> None:
        name = found["metadata"]["labels"]["gristmill.dev/session"]
        self._note(name, "pod")
        conditions = (found.get("status") or {}).get("conditions") or []
        if any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
            self._note(name, "ready")

    def count(self, prefix: str, what: str) -> int:
        return sum(
            what in times for name, times in list(self.seen.items()) if name.startswith(prefix)
        )


def spec(name: str, tenant: int) -> tuple[str, str, bytes]:
    place = f"gm-team-{tenant}"
    return (
        "POST",
        f"{SESSIONS}/namespaces/{place}/trainingsessions",
        json.dumps(session(name, place)).encode(),
    )


def named(event: Json) -> str:
    """A request by its verb and what it was about, as `patch trainingsessions/status`."""
    about = event.get("objectRef") or {}
    parts = (about.get("resource", ""), about.get("subresource", ""))
    return f"{event['verb']} {'/'.join(part for part in parts if part)}"


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class Bench:
    world: OperatorWorld
    api: Api
    moments: Moments
    sessions: int
    idle_s: float
    singles: int
    settings: dict[str, str]
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    @property
    def operator(self) -> Process:
        return self.world.operators[-1]

    def say(self, measure: str, value: str, floor: str = "", goal: str = "") -> None:
        self.rows.append((measure, value, floor, goal))
        sys.stderr.write(f"  {measure}: {value}\n")

    def run(self, phases: list[str]) -> None:
        self.prepare()
        steps = {
            "burst": self.burst, "idle": self.idle, "restart": self.restart,
            "singles": self.one_by_one,
        }  # fmt: skip
        for phase in phases:
            steps[phase]()

    def prepare(self) -> None:
        self.world.start_operator(**self.settings)
        for index in range(TENANTS):
            self.world.tenant(f"team-{index}")
        self.world.model(weights={"image": {"reference": IMAGE}})
        self.moments.start()
        self.api.send([spec(f"warm-{n}", n % TENANTS) for n in range(WARM_UP)])
        self.wait("warm-", WARM_UP, 120)

    def wait(self, prefix: str, count: int, seconds: float) -> None:
        eventually(
            f"{count} sessions {prefix}* are Running",
            lambda: self.moments.count(prefix, "running") >= count, seconds,
        )  # fmt: skip

    def burst(self) -> None:
        mark, cpu = self.world.cluster.audit_mark(), processor_seconds()
        begin = time.monotonic()
        self.api.send([spec(f"burst-{n}", n % TENANTS) for n in range(self.sessions)])
        applied = time.monotonic() - begin
        self.wait("burst-", self.sessions, 1200)
        took = time.monotonic() - begin
        cpu = processor_seconds() - cpu
        calls = Counter(named(event) for event in self.world.cluster.audit(mark, user=ACCOUNT))
        waits = [
            times["running"] - times["made"]
            for name, times in self.moments.seen.items() if name.startswith("burst-")
        ]  # fmt: skip
        self.say(
            f"{self.sessions} sessions applied at once: all Running",
            f"{took:.1f} s",
            "90 s",
            "30 s",
        )
        self.say("  of which the applying", f"{applied:.1f} s")
        self.say(
            "  seen to Running, p50 / p99",
            f"{statistics.median(waits):.1f} / {quantile(waits, 0.99):.1f} s",
        )
        writes = sum(count for name, count in calls.items() if name.split()[0] in WRITES)
        told = ", ".join(
            f"{name} {count / self.sessions:.1f}" for name, count in calls.most_common(9)
        )
        self.say(
            "  requests of the operator per session",
            f"{writes / self.sessions:.1f} writes ({told})",
        )
        spent = ", ".join(
            f"{name} {seconds / self.sessions * 1e3:.1f}" for name, seconds in cpu.most_common(7)
        )
        self.say("  processor time per session, ms", spent)
        self.say(
            f"operator's memory at {self.sessions + WARM_UP} sessions",
            f"{self.operator.rss_bytes / 1e6:.0f} MB",
            "300 MB",
            "200 MB",
        )

    def idle(self) -> None:
        # What the burst left to do: Events are posted at a bounded rate, usage and cost are told once.
        eventually("the operator has nothing left to write", self.is_quiet, SETTLE_S, every=1)
        mark, cpu, begin = self.world.cluster.audit_mark(), self.operator.cpu_s, time.monotonic()
        time.sleep(self.idle_s)
        share = (self.operator.cpu_s - cpu) / (time.monotonic() - begin)
        writes = self.writes_since(mark)
        self.say(f"idle for {self.idle_s:.0f} s: writes but the Lease", str(len(writes)), "0", "0")
        self.say("  share of a core", f"{100 * share:.2f} %", "", "< 1 %")

    def is_quiet(self) -> bool:
        mark = self.world.cluster.audit_mark()
        time.sleep(QUIET_S)
        return not self.writes_since(mark)

    def writes_since(self, mark: int) -> list[Json]:
        """The operator's, but those of its Lease."""
        return [
            event for event in self.world.cluster.audit(mark, user=ACCOUNT, verbs=WRITES)
            if event["objectRef"]["resource"] != "leases"
        ]  # fmt: skip

    def restart(self) -> None:
        uids = self.world.pod_uids(namespace="gm-team-0")
        self.operator.kill()
        begin = time.monotonic()
        self.world.start_operator(**self.settings)
        took = time.monotonic() - begin
        # The new one leads once the old one's Lease has run out; a session made now is its first work.
        self.api.send([spec("after-0", 0)])
        self.wait("after-", 1, 120)
        self.say("killed and started again: ready / first session Running",
                 f"{took:.1f} / {time.monotonic() - begin:.1f} s")  # fmt: skip
        again = self.world.pod_uids(namespace="gm-team-0")
        self.say("  pods that were touched", str(len(uids - again)), "0", "0")

    def one_by_one(self) -> None:
        """From the session's event to its pods', and from the pods' readiness to the session's."""
        made: list[float] = []
        told: list[float] = []
        for n in range(self.singles):
            name = f"single-{n}"
            self.api.send([spec(name, n % TENANTS)])
            self.wait(name, 1, 60)
            times = self.moments.seen[name]
            made.append((times["pod"] - times["made"]) * 1e3)
            told.append((times["running"] - times["ready"]) * 1e3)
        parts = [before + after for before, after in zip(made, told, strict=True)]
        self.say(
            f"one session, operator's own part of {self.singles}, p50",
            f"{statistics.median(parts):.0f} ms",
        )
        self.say("  p99", f"{quantile(parts, 0.99):.0f} ms", "500 ms", "250 ms")
        for what, values in (("seen to pod made", made), ("pod ready to told", told)):
            self.say(
                f"  {what}, p50 / p99",
                f"{statistics.median(values):.0f} / {quantile(values, 0.99):.0f} ms",
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument(
        "--singles", type=int, default=50, help="sessions that are started one by one"
    )
    parser.add_argument("--idle-s", type=float, default=60)
    parser.add_argument("--qps", type=int, default=200, help="the operator's requests a second")
    parser.add_argument(
        "--phases", nargs="+", choices=PHASES, default=PHASES, help="which to run, in this order"
    )
    parser.add_argument("--output", choices=["table", "json"], default="table")
    given = parser.parse_args()
    settings = {"qps": str(given.qps), "burst": str(2 * given.qps), "log_level": "WARNING"}
    with tempfile.TemporaryDirectory(prefix="gmb-", dir="/var/tmp") as parent:
        cluster = Cluster(Path(parent) / "c")
        try:
            cluster.control("up", "--level", "control", timeout=300)
            cluster.enter()
            make_volumes(
                cluster,
                given.sessions + given.singles + WARM_UP + 10,
                "bench",
                mode="WaitForFirstConsumer",
            )
            with operator_world(
                cluster, Path(parent), nodes=100, meters=False, direct=True
            ) as world:
                api = Api(cluster.folder / "pki")
                bench = Bench(
                    world, api, Moments(api), given.sessions, given.idle_s, given.singles, settings
                )
                try:
                    bench.run(given.phases)
                finally:
                    report(bench, given.output)
        finally:
            cluster.control("down")


def report(bench: Bench, output: str) -> None:
    load = os.getloadavg()
    if output == "json":
        rows = [
            dict(zip(("measure", "value", "floor", "goal"), row, strict=True)) for row in bench.rows
        ]
        sys.stdout.write(json.dumps({"rows": rows, "load": load, "cores": os.cpu_count()}) + "\n")
        return
    sys.stdout.write(f"\n{'measure':<62} {'value':<44} {'floor':<8} goal\n")
    for measure, value, floor, goal in bench.rows:
        sys.stdout.write(f"{measure:<62} {value:<44} {floor:<8} {goal}\n")
    sys.stdout.write(
        f"{os.cpu_count()} cores, load {load[0]:.1f} at the end; --qps {bench.settings['qps']}\n"
    )


if __name__ == "__main__":
    main()
