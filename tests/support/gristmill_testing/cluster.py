"""The test cluster as tests see it: kubectl, helm, objects, bounded waits, components to stop and kill.

The cluster itself is `tests/cluster`; this drives it by its commands. Nothing here waits without a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

import yaml

from gristmill_testing.cluster_api import Api, ApiError, Resource

Level = Literal["control", "node"]
Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests/cluster/cluster.py"
NODE = "n1"
COMMAND_S = 30.0
HELM_S = 120.0
UP_S = 300.0
CROWDED_MAX = 20.0
NOT_FOUND = 404
CLONE_NEWNET = 0x40000000


class KubectlError(AssertionError):
    """A command that failed where it should not have; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


def run(argv: Sequence[str], *, stdin: str | None = None, timeout: float = COMMAND_S,
        env: Mapping[str, str] | None = None) -> Answer:  # fmt: skip
    """The command's answer; KubectlError when it takes longer than `timeout` seconds of an idle machine."""
    try:
        done = subprocess.run(
            argv, input=stdin, text=True, capture_output=True, check=False,
            timeout=timeout * crowding(), env={**os.environ, **(env or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise KubectlError(f"{' '.join(argv)} took more than {error.timeout:g} s") from error
    return Answer(done.returncode, done.stdout, done.stderr)


def must(argv: Sequence[str], *, stdin: str | None = None, timeout: float = COMMAND_S,
         env: Mapping[str, str] | None = None) -> str:  # fmt: skip
    """What the command prints; KubectlError when it fails."""
    answer = run(argv, stdin=stdin, timeout=timeout, env=env)
    if answer.code != 0:
        raise KubectlError(f"{' '.join(argv)} ended with {answer.code}:\n{answer.err}{answer.out}")
    return answer.out


def crowding() -> float:
    """How many want each processor, in the last minute; 1 where none has to wait."""
    load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return min(CROWDED_MAX, max(1.0, load / processors))


def eventually(what: str, probe: Callable[[], Any], seconds: float = 30, every: float = 0.2) -> Any:
    """The first true value of `probe`; AssertionError, with the last value, when there is none in time.

    `seconds` are those of a machine that has nothing else to do; on a crowded one they are longer.
    """
    began = time.monotonic()
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() - began > seconds * crowding():
            raise AssertionError(f"not within {seconds:g} s: {what}; last seen: {value!r}")
        time.sleep(every)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster. Its state folder says everything about it."""

    folder: Path
    _resources: dict[str, Resource] = field(default_factory=dict, repr=False, compare=False)

    # --- where it is

    @property
    def plan(self) -> Json:
        content: Json = json.loads((self.folder / "plan.json").read_text())
        return content

    @property
    def level(self) -> Level:
        level: Level = self.plan["level"]
        return level

    @property
    def bin(self) -> Path:
        return Path(self.plan["bin"])

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; `kubeconfig_of` for others."""
        return self.folder / "kubeconfig/admin"

    @property
    def network(self) -> Path:
        """The network namespace as a file to enter."""
        pid = (self.folder / "init.pid").read_text().split()[0]
        return Path(f"/proc/{pid}/ns/net")

    @property
    def api(self) -> Api:
        return Api(
            keys=self.folder / "pki", network=self.network, enter=self.enter, known=self._resources
        )

    def enter(self) -> None:
        """Move this thread, and all that it starts from now on, into the cluster's network."""
        with self.network.open() as file:
            if os.readlink(self.network) == os.readlink("/proc/thread-self/ns/net"):
                return
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.network}")

    def exec(self, *argv: str, timeout: float = COMMAND_S) -> str:
        """What a command in the cluster's network prints."""
        return self.control("exec", "--", *argv, timeout=timeout)

    # --- components

    def control(self, *verb: str, timeout: float = 60) -> str:
        """One command of the cluster's control program."""
        return must(
            [sys.executable, str(PROGRAM), *verb], timeout=timeout,
            env={"GRISTMILL_CLUSTER_DIR": str(self.folder)},
        )  # fmt: skip

    def kill(self, component: str) -> None:
        """SIGKILL; the component is started again within a second."""
        self.control("kill", component)

    def stop(self, component: str) -> None:
        self.control("stop", component)

    def start(self, component: str, *arguments: str) -> None:
        self.control("start", component, "--", *arguments)

    def freeze(self, component: str) -> None:
        """SIGSTOP: it hangs, its connections stay open. `thaw` is due in the same test."""
        self.control("signal", component, "STOP")

    def thaw(self, component: str) -> None:
        self.control("signal", component, "CONT")

    def start_fake_nodes(self, count: int = 3, *arguments: str) -> None:
        """Nodes that run nothing and say that every pod runs; returns when all are Ready."""
        self.stop("fakenodes")
        self.start("fakenodes", f"--nodes={count}", *arguments)

        def ready() -> bool:
            nodes = self.objects("nodes", selector="gristmill.dev/fake-node=true")
            return sum(condition(node, "Ready") == "True" for node in nodes) >= count

        eventually(f"{count} fake nodes are Ready", ready)

    # --- kubectl and helm

    def kubectl(self, *args: str, stdin: str | None = None, timeout: float = COMMAND_S) -> str:
        """What kubectl prints; KubectlError when it fails or takes too long."""
        return must(self._kubectl(args), stdin=stdin, timeout=timeout)

    def try_kubectl(
        self, *args: str, stdin: str | None = None, timeout: float = COMMAND_S
    ) -> Answer:
        """The same where a refusal is what the test is about."""
        return run(self._kubectl(args), stdin=stdin, timeout=timeout)

    def _kubectl(self, args: Sequence[str]) -> list[str]:
        return [
            *self._inside(),
            str(self.bin / "kubectl"),
            f"--kubeconfig={self.kubeconfig}",
            *args,
        ]

    def helm(self, *args: str, timeout: float = HELM_S) -> str:
        """What helm prints; its own caches and releases' state stay in the state folder."""
        env = {"HOME": str(self.folder / "home"), "HELM_DRIVER": "secret"}
        argv = [*self._inside(), str(self.bin / "helm"), f"--kubeconfig={self.kubeconfig}", *args]
        return must(argv, timeout=timeout, env=env)

    def _inside(self) -> list[str]:
        return ["nsenter", f"--net={self.network}", "--"]

    # --- objects

    def apply(
        self, *objects: Json | str | Path, namespace: str | None = None, timeout: float = COMMAND_S
    ) -> None:
        """Apply objects, YAML text or YAML files, server-side; KubectlError with the API's message on refusal."""
        self.kubectl(*self._apply(namespace), stdin=as_yaml(objects), timeout=timeout)

    def try_apply(self, *objects: Json | str | Path, namespace: str | None = None) -> Answer:
        """The same where a refusal is what the test is about."""
        return self.try_kubectl(*self._apply(namespace), stdin=as_yaml(objects))

    @staticmethod
    def _apply(namespace: str | None) -> list[str]:
        place = [f"--namespace={namespace}"] if namespace else []
        return [
            "apply",
            "--server-side",
            "--force-conflicts",
            "--field-manager=test",
            *place,
            "-f",
            "-",
        ]

    def get(self, kind: str, name: str, namespace: str | None = None) -> Json:
        """The object; ApiError where there is none."""
        return self.api.get(kind, name, namespace)

    def find(self, kind: str, name: str, namespace: str | None = None) -> Json | None:
        """The object, or None."""
        try:
            return self.api.get(kind, name, namespace)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    def objects(self, kind: str, namespace: str | None = None, selector: str = "") -> list[Json]:
        """All objects of a kind, of all namespaces where none is named."""
        return self.api.items(kind, namespace, selector)

    def delete(self, kind: str, name: str, namespace: str | None = None, *, wait: bool = False,
               timeout: float = COMMAND_S) -> None:  # fmt: skip
        """Delete an object that may be gone; without `wait` only ask for it."""
        place = [f"--namespace={namespace}"] if namespace else []
        self.kubectl(
            "delete",
            kind,
            name,
            *place,
            "--ignore-not-found",
            f"--wait={str(wait).lower()}",
            timeout=timeout,
        )

    def events(self, namespace: str) -> list[Json]:
        return self.objects("events", namespace)

    # --- waiting

    def wait_condition(self, kind: str, name: str, wanted: str, namespace: str | None = None, *,
                       status: str = "True", seconds: float = 60) -> Json:  # fmt: skip
        """The object once its condition has the status; AssertionError with its status when it never has."""
        last: Json | None = None

        def probe() -> bool:
            nonlocal last
            with contextlib.suppress(OSError):  # the API server may be on its way back
                last = self.find(kind, name, namespace)
            return last is not None and condition(last, wanted) == status

        try:
            eventually(f"{kind} {name}: {wanted}={status}", probe, seconds)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{json.dumps((last or {}).get('status'), indent=1)}"
            ) from None
        return last or {}

    def wait_gone(
        self, kind: str, name: str, namespace: str | None = None, seconds: float = 60
    ) -> None:
        eventually(
            f"{kind} {name} is gone", lambda: self.find(kind, name, namespace) is None, seconds
        )

    def wait_api(self, seconds: float = 60) -> None:
        """Until the API server answers, and with it what it stands on."""
        eventually("the API answers", self._answers, seconds)

    def _answers(self) -> bool:
        try:
            self.api.read("/readyz")
        except (OSError, HTTPException, ApiError):
            return False
        return True

    # --- pods

    def image(self, part: str) -> str:
        """Our image of a part (operator, gateway, ledger, meter, worker), pinned by digest."""
        known = json.loads((self.folder / "images.json").read_text())
        pinned: str = known[f"gristmill.test/gristmill-{part}:dev"]
        return pinned

    def load_images(self) -> None:
        """Bring our images to the code as it is now."""
        self.control("load", timeout=UP_S)

    def pod_exec(
        self, namespace: str, pod: str, *argv: str, container: str = "", timeout: float = COMMAND_S
    ) -> str:
        chosen = [f"--container={container}"] if container else []
        return self.kubectl(
            "exec", f"--namespace={namespace}", pod, *chosen, "--", *argv, timeout=timeout
        )

    def pod_ip(self, namespace: str, pod: str) -> str:
        ip: str = self.get("pod", pod, namespace)["status"]["podIP"]
        return ip

    def kill_container(
        self, namespace: str, pod: str, container: str, signal: str = "SIGKILL"
    ) -> None:
        """Signal the first process of a container, past the kubelet: what a crash or the OOM killer does."""
        status = self.get("pod", pod, namespace)["status"]
        all_of_them = [
            *status.get("initContainerStatuses", []),
            *status.get("containerStatuses", []),
        ]
        ids = {item["name"]: item.get("containerID", "") for item in all_of_them}
        self.control("ctr", "tasks", "kill", "--signal", signal, ids[container].rpartition("/")[2])

    def follow_logs(self, namespace: str, pod: str) -> Callable[[], str]:
        """Follow the logs of all containers from their start; the result waits for the pod's end and is all of them."""
        argv = self._kubectl(["logs", f"-n{namespace}", pod, "--all-containers", "--follow"])
        process = subprocess.Popen(
            argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

        def collect() -> str:
            try:
                return process.communicate(timeout=COMMAND_S)[0]
            finally:
                process.kill()

        return collect

    # --- the audit log

    def audit_mark(self) -> int:
        """The log's length now: give it to `audit` to see only what comes after."""
        return self.audit_log.stat().st_size if self.audit_log.exists() else 0

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit/audit.log"

    def audit(
        self, since: int = 0, *, user: str | None = None, verbs: Sequence[str] = ()
    ) -> Iterator[Json]:
        """Calls that the API server has answered, oldest first; the control plane's own are not in the log.

        `user` is a whole name such as system:serviceaccount:NAMESPACE:NAME; WRITES is a choice of verbs.
        """
        with self.audit_log.open() as file:
            file.seek(since)
            for line in file:
                if not line.endswith("\n"):  # the server is still writing it
                    return
                event: Json = json.loads(line)
                if (user is None or event["user"]["username"] == user) and (
                    not verbs or event["verb"] in verbs
                ):
                    yield event


WRITES = ("create", "update", "patch", "delete", "deletecollection")


def condition(thing: Json, wanted: str) -> str | None:
    """The status of a condition; None where the object has none of that type."""
    conditions = thing.get("status", {}).get("conditions") or []
    return next((item["status"] for item in conditions if item["type"] == wanted), None)


def as_yaml(objects: Sequence[Json | str | Path]) -> str:
    texts = []
    for item in objects:
        if isinstance(item, Path):
            texts.append(item.read_text())
        else:
            texts.append(item if isinstance(item, str) else yaml.safe_dump(item))
    return "\n---\n".join(texts)
