"""kill -9 of everything while the SDK trains: the same losses to the last bit, the same bill, nothing left over."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.chart import NAMESPACE
from gristmill_testing.cluster import NODE, Cluster, condition, eventually
from gristmill_testing.cluster_api import ApiError
from gristmill_testing.node_clients import service_of, standing_lab
from gristmill_testing.node_lab import PLACE, TINY, Lab
from gristmill_testing.node_trainer import STEP_S, Trainer, train, training
from gristmill_testing.raw_wire import model_arn
from gristmill_testing.release import pods

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SEED = 11
STEPS = 30
NAME = "rough"
PARTS = ("operator", "gateway", "ledger")
CONTAINERS = ("meter", "worker")
COMPONENTS = ("kubelet", "containerd", "kube-apiserver", "etcd")
VICTIMS = (*PARTS, *CONTAINERS, *COMPONENTS)
WORKER_DEATHS = 2
RECOVERY_S = 60.0
"""From the API answering again to the next result; longer where the machine has more to do than this."""


@pytest.fixture(scope="module")
def lab(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with standing_lab(node_cluster, tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def plan(seed: int) -> list[tuple[str, float]]:
    """Every victim once and the worker twice, in a random order, each at a random moment of a step."""
    rng = random.Random(seed)
    victims = [*VICTIMS, *["worker"] * (WORKER_DEATHS - 1)]
    rng.shuffle(victims)
    return [(victim, rng.uniform(0.0, 1.0)) for victim in victims]


def strike(lab: Lab, victim: str) -> None:
    """SIGKILL to the victim's process; to those of all replicas where there are several."""
    if victim in COMPONENTS:
        lab.cluster.kill(victim)
    elif victim in CONTAINERS:
        pod = lab.pods(NAME)[0]["metadata"]["name"]
        lab.cluster.kill_container(PLACE, pod, victim)
    else:
        for pod in pods(lab.cluster, victim):
            lab.cluster.kill_container(NAMESPACE, pod["metadata"]["name"], victim)


def answered(ask: Callable[[], Any]) -> Any:
    """None where the API server is away, or does not know all of its resources yet."""
    with contextlib.suppress(OSError, ApiError):
        return ask()
    return None


def whole(lab: Lab) -> bool:
    """Everything that was killed before is there again: the next kill meets a running system."""
    ours = [pod for part in PARTS for pod in pods(lab.cluster, part)]
    found = [*ours, *lab.pods(NAME)]
    ready = [
        status["ready"] and "running" in status["state"]
        for pod in found
        for status in [*pod["status"].get("containerStatuses", [{"ready": False, "state": {}}]),
                       *pod["status"].get("initContainerStatuses", [])]
    ]  # fmt: skip
    node = condition(lab.cluster.get("node", NODE), "Ready") == "True"
    return node and len(lab.pods(NAME)) == 1 and all(ready)


def test_the_plan_is_a_pure_function_of_its_seed() -> None:
    assert plan(SEED) == plan(SEED)
    assert plan(SEED) != plan(SEED + 1)
    assert {victim for victim, _ in plan(SEED)} == set(VICTIMS)


def test_a_run_in_which_everything_is_killed_equals_an_undisturbed_one(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    service = service_of(lab)
    model = model_arn(lab.environment["AWS_REGION"], TINY)
    client = service.create_lora_training_client(
        model, training_session_name=NAME, rank=8, alpha=16
    )
    start = client.save_state().result().model_package_arn
    with training(client) as rough:
        table = [kill(lab, rough, victim, delay) for victim, delay in plan(SEED)]
        rough.wait_steps(max(1, STEPS - len(rough.losses)))
        rough.stop()
    with capsys.disabled():
        print("\nkilled           API back   next result\n" + "\n".join(table))
    expect_one_chain(lab)
    lab.expect_tokens(NAME, {"train": rough.tokens})
    client.stop()
    lab.wait_state(NAME, "Stopped")
    expect_nothing_left(lab, lab.session(NAME)["status"]["attempt"])
    assert lab.pods(NAME) == []
    with undisturbed(service, start) as twin:
        calm = train(twin, len(rough.losses))
        assert rough.losses == calm.losses
        assert rough.digests == calm.digests
        lab.expect_tokens(twin.training_session_name, {"train": calm.tokens})
    lab.expect_tokens(NAME, {"train": rough.tokens})


def undisturbed(service: sdk.ServiceClient, start: str | None) -> sdk.TrainingClient:
    assert start is not None
    return service.create_training_client_from_state_with_optimizer(start)


def kill(lab: Lab, trainer: Trainer, victim: str, delay: float) -> str:
    """One line of the table. AssertionError when the next result does not come in time."""
    eventually("all is there again", lambda: answered(lambda: whole(lab)), STEP_S)
    trainer.wait_steps(1)
    time.sleep(delay)  # the moment of the kill, not a synchronisation
    killed = time.monotonic()
    strike(lab, victim)
    eventually("the API answers", lambda: answered(lambda: lab.session(NAME)), STEP_S, every=0.05)
    back = time.monotonic()
    took = trainer.wait_after(back, RECOVERY_S) - back
    return f"{victim:15} {back - killed:8.1f} s {took:8.1f} s"


def expect_one_chain(lab: Lab) -> None:
    """Each death of the worker counts, and nothing else does; a node that is away too long may cost an attempt."""
    status = lab.session(NAME)["status"]
    assert status["restarts"] == WORKER_DEATHS, status
    assert status["state"] == "Running"
    [pod] = lab.pods(NAME)
    assert pod["metadata"]["name"] == f"{NAME}-a{status['attempt']}-0"
    expect_nothing_left(lab, status["attempt"])


def expect_nothing_left(lab: Lab, attempt: int) -> None:
    """Of attempts before this one: no pod, no Job, and no Secret but the last one's, whose log may still be shipped."""
    selector = f"gristmill.dev/session={NAME}"
    kept = {
        "pods": {f"{attempt}"},
        "jobs": {f"{attempt}"},
        "secrets": {f"{attempt}", f"{attempt - 1}"},
    }

    def old() -> list[str]:
        return [
            thing["metadata"]["name"]
            for kind, attempts in kept.items()
            for thing in lab.cluster.objects(kind, PLACE, selector)
            if thing["metadata"]["labels"].get("gristmill.dev/attempt") not in attempts
        ]

    eventually("children of old attempts are gone", lambda: not old(), 60)
    assert len(lab.cluster.objects("persistentvolumeclaims", PLACE, selector)) == 1
