"""Where calls go while a session's pod starts, moves or is away, and that the official SDK notices none of it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import sagemaker.train.training_session as sdk
from botocore.exceptions import ClientError
from starlette.responses import Response

from gristmill_contracts import secrets
from gristmill_contracts.http import Problem
from gristmill_contracts.session import TrainingSession
from gristmill_testing.cluster import Cluster, crowding, eventually
from gristmill_testing.fake_meter import FakeMeter
from gristmill_testing.gateway_cluster import (
    CLUSTER_KEY,
    REGION,
    RUNTIME,
    GatewayCluster,
    create_body,
    gateway_cluster,
)
from gristmill_testing.loopback_server import serve
from gristmill_testing.sdk_loop import batch

HOLD_S = min(8.0, 2.0 * crowding())
"""How long the gateways hold a submit: long enough for what happens meanwhile."""


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayCluster]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway_cluster(control_cluster, folder, replicas=2, submit_hold_s=HOLD_S) as made:
        yield made


@pytest.fixture(autouse=True)
def _new_meter(world: GatewayCluster) -> None:
    """The fake numbers the operations of all sessions together."""
    world.meter.submits.clear()


def optimizer_step(number: int) -> dict[str, Any]:
    return {
        "sequenceNumber": number,
        "operationConfig": {"optimizerStep": {"adamParamsConfig": {"learningRate": 0.001}}},
    }


@contextmanager
def later(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """`action` in another thread after a while; it is over at the end of the block."""
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.fixture(name="training")
def training_fixture(
    world: GatewayCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, sdk.TrainingClient]]:
    """A tenant and the official client of a session of its, which serves as soon as it is made."""
    tenant = world.add_tenant()
    key = world.keys[tenant]
    for name, value in {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secrets.access_key_secret(CLUSTER_KEY, key),
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "SAGEMAKER_TRAINING_SESSION_ENDPOINT": world.urls[0],
        "SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT": world.urls[1],
    }.items():
        monkeypatch.setenv(name, value)
    body = create_body("run-1")

    def play() -> None:
        eventually(
            "the session is made",
            lambda: world.cluster.find("trainingsession", "run-1", f"gm-{tenant}") is not None,
        )
        world.serve(tenant, "run-1")

    with later(0.1, play):
        service = sdk.ServiceClient(region=REGION, role_arn=body["RoleArn"])
        client = service.create_lora_training_client(
            base_model=body["ModelConfig"]["BaseModelArn"],
            training_session_name="run-1",
            rank=8,
            alpha=16,
            s3_output_path=body["OutputConfig"]["S3Location"]["Path"],
        )
    with client:
        yield tenant, client


def test_the_sdk_survives_a_pod_that_is_away_and_comes_back_elsewhere(
    world: GatewayCluster, training: tuple[str, sdk.TrainingClient]
) -> None:
    """Away for several times the hold: the client's submits are held, told to try again, and go through."""
    tenant, client = training
    assert client.forward_backward(batch()).result(timeout=300) is not None
    world.withdraw(tenant, "run-1")
    with later(4 * HOLD_S, lambda: world.serve(tenant, "run-1", attempt=2)):
        began = time.monotonic()
        passed = client.forward_backward(batch())
        stepped = client.optim_step(sdk.AdamParams(learning_rate=0.001))
        assert stepped.result(timeout=300) is not None
        assert passed.result(timeout=300) is not None
        assert time.monotonic() - began > 3 * HOLD_S


def test_g40_a_submit_is_held_until_the_pod_is_there(world: GatewayCluster) -> None:
    """G40: the first call of a session that only starts is no error."""
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    accept(world, tenant, "run-1")
    client = world.client(tenant, RUNTIME)
    with later(HOLD_S / 3, lambda: world.serve(tenant, "run-1")):
        answer = client.execute_training_operation(trainingSessionName="run-1", **optimizer_step(1))
    result = client.get_training_operation_result(
        trainingSessionName="run-1", operationId=answer["operationId"]
    )
    assert result["status"] == "Completed"


def test_a_submit_that_waited_long_enough_is_told_to_try_again_and_why(
    world: GatewayCluster,
) -> None:
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    accept(world, tenant, "run-1")
    with pytest.raises(ClientError) as caught:
        world.client(tenant, RUNTIME).execute_training_operation(
            trainingSessionName="run-1", **optimizer_step(1)
        )
    answer = caught.value.response
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert answer["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "1"
    assert answer["Error"]["Code"] == "InternalServerException"
    assert "Unschedulable: 0 of 3 nodes fit" in answer["Error"]["Message"]


def test_an_accepted_operation_is_in_progress_while_its_pod_is_away(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    world.serve(tenant, "run-1")
    submitted = world.client(tenant, RUNTIME).execute_training_operation(
        trainingSessionName="run-1", **optimizer_step(1)
    )
    which = {"trainingSessionName": "run-1", "operationId": submitted["operationId"]}
    world.withdraw(tenant, "run-1")
    for at in (0, 1):
        answer = world.client(tenant, RUNTIME, at=at).get_training_operation_result(**which)
        assert answer["status"] == "InProgress"
    world.serve(tenant, "run-1", attempt=2, url="http://127.0.0.1:9")
    answer = world.client(tenant, RUNTIME).get_training_operation_result(**which)
    assert answer["status"] == "InProgress"
    world.serve(tenant, "run-1", attempt=3)
    answer = world.client(tenant, RUNTIME, at=1).get_training_operation_result(**which)
    assert answer["status"] == "Completed"


def test_a_poll_that_hangs_at_a_dead_pod_moves_on_with_its_session(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    hanging = FakeMeter(hold_polls=True)
    with serve(hanging.app()) as url:
        uid = world.serve(tenant, "run-1", url=url)
        hanging.attempts[uid] = 1
        hanging.secrets[uid] = world.meter.secrets[uid]
        client = world.client(tenant, RUNTIME)
        submitted = client.execute_training_operation(
            trainingSessionName="run-1", **optimizer_step(1)
        )
        world.meter.views.update(hanging.views)
        which = {"trainingSessionName": "run-1", "operationId": submitted["operationId"]}
        began = time.monotonic()
        with later(0.3, lambda: world.serve(tenant, "run-1", attempt=2)):
            statuses = {client.get_training_operation_result(**which)["status"] for _ in range(8)}
        assert "Completed" in statuses
        assert time.monotonic() - began < 10 * crowding()


def test_a_submit_of_a_session_that_fails_meanwhile_is_refused_at_once(
    world: GatewayCluster,
) -> None:
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    accept(world, tenant, "run-1")
    with (
        later(HOLD_S / 4, lambda: world.write_status(tenant, "run-1", state="Failed")),
        pytest.raises(ClientError) as caught,
    ):
        world.client(tenant, RUNTIME).execute_training_operation(
            trainingSessionName="run-1", **optimizer_step(1)
        )
    assert caught.value.response["Error"]["Code"] == "ConflictException"
    assert "is Failed" in caught.value.response["Error"]["Message"]


def test_a_session_that_waits_for_its_pod_is_told_running_and_its_resource_is_not(
    world: GatewayCluster,
) -> None:
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    detail = world.client(tenant).describe_training_session
    assert detail(TrainingSessionName="run-1")["TrainingSessionDetail"][
        "TrainingSessionStatus"
    ] == ("Created")
    accept(world, tenant, "run-1")
    eventually(
        "the session is told Running",
        lambda: (
            detail(TrainingSessionName="run-1")["TrainingSessionDetail"]["TrainingSessionStatus"]
            == "Running"
        ),
        seconds=5,
    )
    assert world.session(tenant, "run-1")["status"]["state"] == "Created"


def accept(world: GatewayCluster, tenant: str, name: str) -> None:
    """What the operator writes once the ledger knows the session, and no node has room for it."""
    now = "2026-01-01T00:00:00Z"
    said = [
        ("Accepted", "True", "Valid", ""),
        ("LedgerRegistered", "True", "Registered", ""),
        ("PodsReady", "False", "Unschedulable", "0 of 3 nodes fit"),
    ]
    world.write_status(
        tenant,
        name,
        state="Created",
        conditions=[
            {"type": t, "status": s, "reason": r, "message": m, "lastTransitionTime": now}
            for t, s, r, m in said
        ],
    )
    for gateway in world.gateways:
        eventually(
            "the gateway knows",
            lambda g=gateway: any(
                each.metadata.namespace == f"gm-{tenant}" and len(each.status.conditions) == 3
                for each in g.context.store.list(TrainingSession)
            ),
            seconds=5,
        )


def far_away(meter: FakeMeter, starting: int) -> Any:
    """The meter behind 200 ms of network, which answers 503 so many times before it is ready."""
    app = meter.app()
    left = [starting]

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        await asyncio.sleep(0.2)
        if left[0]:
            left[0] -= 1
            problem = Problem(code="unavailable", message="the log is being read", retryable=True)
            await Response(msgspec.msgpack.encode(problem), 503)(scope, receive, send)
            return
        await app(scope, receive, send)

    return slow


def test_g36_a_pod_that_is_far_away_and_slow_to_get_ready_gives_no_error(
    world: GatewayCluster,
) -> None:
    """G36: forwarded before it is ready, or never after."""
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    with serve(far_away(world.meter, starting=2)) as url:
        world.serve(tenant, "run-1", url=url)
        client = world.client(tenant, RUNTIME)
        for number in (1, 2, 3):
            submitted = client.execute_training_operation(
                trainingSessionName="run-1", **optimizer_step(number)
            )
            answer = client.get_training_operation_result(
                trainingSessionName="run-1", operationId=submitted["operationId"]
            )
            assert answer["status"] == "Completed"


@pytest.mark.slow
def test_the_sdk_survives_a_pod_that_is_away_for_a_minute(
    world: GatewayCluster, training: tuple[str, sdk.TrainingClient]
) -> None:
    """A node lost and a pod started elsewhere takes about that long."""
    tenant, client = training
    assert client.forward_backward(batch()).result(timeout=300) is not None
    world.withdraw(tenant, "run-1")
    with later(60, lambda: world.serve(tenant, "run-1", attempt=2)):
        passed = client.forward_backward(batch())
        stepped = client.optim_step(sdk.AdamParams(learning_rate=0.001))
        assert stepped.result(timeout=300) is not None
        assert passed.result(timeout=300) is not None
