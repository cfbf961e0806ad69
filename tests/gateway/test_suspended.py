"""A tenant that is suspended while its session runs: nothing new is taken, and nothing is lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gristmill_contracts.tenant import Tenant
from gristmill_testing.gateway_world import World, gateway_world

STEP = {"optimizerStep": {"adamParamsConfig": {"learningRate": 1e-4}}}
SAMPLE = {
    "sample": {
        "prompt": {"chunks": [{"tokens": [7, 11], "type": "encoded_text"}]},
        "numSamples": 1, "samplingParams": {"maxTokens": 4},
    }
}  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with gateway_world(tmp_path, result_wait_s=0.3) as world:
        yield world


def suspend(world: World, *, suspended: bool) -> None:
    tenant = world.store.get(Tenant, "", "acme")
    spec = tenant.spec.model_copy(update={"suspended": suspended})
    world.store.update(tenant.model_copy(update={"spec": spec}))


def test_operations_wait_with_their_numbers_until_it_is_lifted(world: World) -> None:
    client: Any = world.client()

    def step(number: int) -> str:
        answer = client.execute_training_operation(
            trainingSessionName="run-1", sequenceNumber=number, operationConfig=STEP
        )
        return str(answer["operationId"])

    first = step(1)
    suspend(world, suspended=True)
    calls = (
        lambda: step(2),
        lambda: client.execute_sampling_operation(
            trainingSessionName="run-1", operationConfig=SAMPLE
        ),
    )
    for call in calls:
        with pytest.raises(ClientError, match="'acme' is suspended") as caught:
            call()
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    answer = client.get_training_operation_result(trainingSessionName="run-1", operationId=first)
    assert answer["status"] == "Completed"
    assert [each.number for each in world.meter.submits] == [1]
    suspend(world, suspended=False)
    answer = client.get_training_operation_result(trainingSessionName="run-1", operationId=step(2))
    assert answer["status"] == "Completed"
