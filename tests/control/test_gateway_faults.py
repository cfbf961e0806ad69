"""The gateway while the API server is away, hangs, or ends its watches: reads and running sessions go on."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
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
    patch.setattr(limits, "CREATE_WAIT_S_MAX", 0.2)
    with gateway_cluster(control_cluster, tmp_path_factory.mktemp("gateway")) as made:
        yield made
    patch.undo()


@pytest.fixture(name="tenant")
def tenant_fixture(world: GatewayCluster) -> str:
    """One whose session `run-1` is served."""
    world.meter.submits.clear()
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    world.serve(tenant, "run-1")
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
    assert step(world, tenant, 1) == "Completed"
    other = create_body("run-2")
    with pytest.raises(ClientError) as caught:
        world.client(tenant).create_training_session(**other)
    answer = caught.value.response
    assert answer["Error"]["Code"] == "ServiceUnavailable"
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert step(world, tenant, 2) == "Completed"


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
