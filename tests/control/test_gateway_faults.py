"""The gateway while the API server is away, hangs, or ends its watches: reads and running sessions go on."""

import asyncio
import gc
import json
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gristmill_contracts import limits
from gristmill_testing.cluster import Cluster, Json, eventually
from gristmill_testing.gateway_cluster import (
    RUNTIME,
    GatewayCluster,
    create_body,
    gateway_cluster,
)


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayCluster]:
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "WATCH_SILENCE_S", 1.5)
    patch.setattr(limits, "WATCH_BACKOFF_S_MAX", 0.5)
    patch.setattr(limits, "API_TIMEOUT_S", 2.0)
    patch.setattr(limits, "ACCESS_LASTING_S", 2.0)
    patch.setattr(limits, "CREATE_WAIT_S_MAX", 0.2)
    folder = tmp_path_factory.mktemp("gateway")
    with gateway_cluster(control_cluster, folder, replicas=2) as made:
        yield made
    patch.undo()


@pytest.fixture(name="tenant")
def tenant_fixture(world: GatewayCluster) -> str:
    """One whose session `run-1` is served, and has trained."""
    world.meter.submits.clear()
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    world.serve(tenant, "run-1")
    assert step(world, tenant, 1) == "Completed"
    return tenant


def readiness(world: GatewayCluster) -> tuple[int, Json]:
    try:
        with urllib.request.urlopen(f"{world.urls[0]}/readyz", timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read())


def step(world: GatewayCluster, tenant: str, number: int) -> str:
    """Submit and fetch an operation; its status."""
    client = world.client(tenant, RUNTIME)
    config: Any = {"optimizerStep": {"adamParamsConfig": {"learningRate": 0.001}}}
    submitted = client.execute_training_operation(
        trainingSessionName="run-1", sequenceNumber=number, operationConfig=config
    )
    answer = client.get_training_operation_result(
        trainingSessionName="run-1", operationId=submitted["operationId"]
    )
    return str(answer["status"])


def is_known(world: GatewayCluster, tenant: str, name: str) -> bool:
    """Whether a list shows it: lists come from the cache alone."""
    listed = world.client(tenant).list_training_sessions()["TrainingSessionSummaries"]
    return any(each["TrainingSessionArn"].endswith(f"/{name}") for each in listed)


def check_that_sessions_run_on(world: GatewayCluster, tenant: str) -> None:
    """The API server is away: that is told, and stops nothing but changes."""
    watches = [f"watch of {kind}" for kind in ("trainingsessions", "tenants", "basemodels")]
    eventually(
        "the watches are named as missing",
        lambda: readiness(world) == (200, {"ready": True, "missing": watches}),
        seconds=15,
    )
    assert step(world, tenant, 2) == "Completed"
    other = create_body("run-2")
    with pytest.raises(ClientError) as caught:
        world.client(tenant).create_training_session(**other)
    answer = caught.value.response
    assert answer["Error"]["Code"] == "ServiceUnavailable"
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert step(world, tenant, 3) == "Completed"


def test_an_api_server_that_is_gone_stops_no_running_session(
    world: GatewayCluster, tenant: str
) -> None:
    world.cluster.stop("kube-apiserver")
    try:
        check_that_sessions_run_on(world, tenant)
    finally:
        world.cluster.start("kube-apiserver")
        world.cluster.wait_api()
    world.apply_session(tenant, "run-3")
    eventually("changes are followed again", lambda: is_known(world, tenant, "run-3"), seconds=15)
    eventually("nothing is missing", lambda: readiness(world)[1]["missing"] == [], seconds=15)
    world.client(tenant).create_training_session(**create_body("run-2"))


def test_an_api_server_that_hangs_is_noticed_and_stops_no_running_session(
    world: GatewayCluster, tenant: str
) -> None:
    """Its connections stay open and bring nothing: kopf and others were found deaf for hours so."""
    world.cluster.freeze("kube-apiserver")
    try:
        check_that_sessions_run_on(world, tenant)
    finally:
        world.cluster.thaw("kube-apiserver")
        world.cluster.wait_api()
    world.apply_session(tenant, "run-3")
    eventually("changes are followed again", lambda: is_known(world, tenant, "run-3"), seconds=15)
    eventually("nothing is missing", lambda: readiness(world)[1]["missing"] == [], seconds=15)


def test_what_changed_while_the_watches_were_away_is_known_afterwards(
    world: GatewayCluster, tenant: str
) -> None:
    """Killed: made and deleted at once after the start, while the gateway is still in its pause."""
    world.apply_session(tenant, "gone")
    eventually("it is known", lambda: is_known(world, tenant, "gone"), seconds=10)
    world.cluster.kill("kube-apiserver")
    world.cluster.wait_api()
    world.cluster.delete("trainingsession", "gone", f"gm-{tenant}")
    world.apply_session(tenant, "fresh")
    eventually("the fresh one is known", lambda: is_known(world, tenant, "fresh"), seconds=15)
    eventually("the gone one is not", lambda: not is_known(world, tenant, "gone"), seconds=15)


def test_a_gateway_whose_watches_lag_refuses_nothing_for_it(
    world: GatewayCluster, tenant: str
) -> None:
    """What one gateway told a client, another must not deny. Here it hears of nothing at all any more."""
    lagging = world.gateways.pop()
    store: Any = lagging.context.store
    asyncio.run_coroutine_threadsafe(store.stop(), store._loop).result(10)
    for turn in (1, 2):
        world.meter.submits.clear()
        client, late = world.client(tenant), world.client(tenant, at=1)
        client.create_training_session(**create_body("run-2"))
        late.describe_training_session(TrainingSessionName="run-2")
        world.serve(tenant, "run-2")
        runtime = world.client(tenant, RUNTIME, at=1)
        config: Any = {"optimizerStep": {"adamParamsConfig": {"learningRate": 0.001}}}
        submitted = runtime.execute_training_operation(
            trainingSessionName="run-2", sequenceNumber=1, operationConfig=config
        )
        answer = runtime.get_training_operation_result(
            trainingSessionName="run-2", operationId=submitted["operationId"]
        )
        assert answer["status"] == "Completed", turn
        client.stop_training_session(TrainingSessionName="run-2")
        world.write_status(tenant, "run-2", state="Stopped", endpoint="")
        late.delete_training_session(TrainingSessionName="run-2")
        world.cluster.wait_gone("trainingsession", "run-2", f"gm-{tenant}")


def test_a_gateway_that_ends_while_the_api_server_hangs_leaves_no_connection_open(
    world: GatewayCluster, tmp_path: Path
) -> None:
    """Its watches are cut: the goodbye of TLS would wait for an answer that does not come."""
    try:
        with gateway_cluster(world.cluster, tmp_path):
            world.cluster.freeze("kube-apiserver")
    finally:
        world.cluster.thaw("kube-apiserver")
        world.cluster.wait_api()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(each.message) for each in told if each.category is ResourceWarning] == []
