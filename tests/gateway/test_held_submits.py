"""A call that reaches its session before the session's meter does waits for it, and what it carries is not lost."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gristmill_testing.gateway_world import UID, World, gateway_world

STEP = {"optimizerStep": {"adamParamsConfig": {"learningRate": 1e-4}}}
NO_DATUM = {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": []}}
AWAY_S = 0.5


@pytest.fixture(name="world")
def world_fixture(tmp_path: Path) -> Iterator[World]:
    with gateway_world(tmp_path, submit_hold_s=20.0) as world:
        yield world


@pytest.fixture(name="away")
def away_fixture(world: World) -> Iterator[None]:
    """The meter knows the session only after a while."""
    attempts, world.meter.attempts = world.meter.attempts, {}
    back = threading.Timer(AWAY_S, lambda: setattr(world.meter, "attempts", attempts))
    back.start()
    yield
    back.join()


def train(world: World, config: Any) -> str:
    answer = world.client().execute_training_operation(
        trainingSessionName="run-1", sequenceNumber=1, operationConfig=config
    )
    return str(answer["operationId"])


@pytest.mark.usefixtures("away")
def test_a_submit_waits_for_its_meter(world: World) -> None:
    assert train(world, STEP)
    assert [each.number for each in world.meter.submits] == [1]


@pytest.mark.usefixtures("away")
def test_a_refusal_waits_for_its_meter_so_that_it_is_told_and_leaves_no_gap(world: World) -> None:
    with pytest.raises(ClientError) as caught:
        train(world, NO_DATUM)
    assert caught.value.response["Error"]["Code"] == "ValidationException"
    assert [each.number for each in world.meter.refusals] == [1]
    assert world.meter.attempts[UID]
