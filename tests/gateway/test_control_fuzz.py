"""Whatever is sent to a control plane operation: an answer of its shape, or a refusal of the caller's.

GRISTMILL_FUZZ_CASES sets the cases for each operation.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
)
from gristmill_contracts.http import Checkpoint
from gristmill_gateway.sagemaker.control_operations import OPERATIONS
from gristmill_testing.control_plane import (
    ACCOUNT,
    REGION,
    FakeCaller,
    FakeContext,
    checkpoint,
    create_body,
    model_arn,
    running_control_plane,
)
from gristmill_testing.shape_strategies import inputs
from gristmill_testing.wire_shapes import operation, output_problems

CASES = int(os.environ.get("GRISTMILL_FUZZ_CASES", "200"))
CALLERS_FAULT = (InvalidRequestError, NotFoundError, ConflictError, ForbiddenError)
CASE_S_MAX = 10.0
PACKAGE = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package/runs/1"
GROUP = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package-group/runs"
SEEDS: dict[str, list[Any]] = {
    "TrainingSessionName": ["run-1", "Run-2", "a" * 63, "none"],
    "BaseModelArn": [model_arn("tiny"), model_arn("none"), model_arn("tiny", "/9.9.9")],
    "RoleArn": [create_body()["RoleArn"]],
    "Path": ["s3://data/x", "s3://data", "s3://data/../x", "https://data/x"],
    "LoraConfig": [{"Rank": 8, "Alpha": 16}],
    "ModelPackageGroupArn": [GROUP],
    "ModelPackageGroupName": ["runs", GROUP, "none"],
    "ModelPackageName": [PACKAGE, "runs/1", "runs/2", "runs/999999999"],
    "HubName": ["SageMakerPublicHub"],
    "HubContentName": ["tiny"],
    "HubContentVersion": ["1.0.0", "9999.9999.9999"],
    "HubContentType": ["Model"],
    "VpcConfig": [{"SecurityGroupIds": ["sg-1"], "Subnets": ["s-1"]}],
}  # fmt: skip


@pytest.fixture(name="runner", scope="module")
def runner_fixture() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(name="plane", scope="module")
def plane_fixture(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FakeContext]:
    """One plane for all cases, with a session, a group and a package to be hit."""
    folder: Path = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gristmill_contracts.limits.CREATE_WAIT_S_MAX", 0.0)
        context = running_control_plane(folder)
        plane = runner.run(context.__aenter__())
        message = checkpoint(1)
        runner.run(plane.ledger_admin.ask(Checkpoint, "POST", "/v1/checkpoints", message))
        create = OPERATIONS["CreateTrainingSession"]
        runner.run(create(plane, FakeCaller(), create_body("run-1")))  # type: ignore[arg-type]
        yield plane
        runner.run(context.__aexit__(None, None, None))


# Deleting comes last, for the others need what it would delete.
@pytest.mark.parametrize(
    "name", sorted(OPERATIONS, key=lambda name: (name[0] == "D" and name[2] == "l", name))
)
def test_no_input_of_an_operation_gets_more_than_an_answer_or_a_refusal(
    runner: asyncio.Runner, plane: FakeContext, name: str
) -> None:
    reached: list[str] = []

    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ],
    )
    @given(inputs(operation("sagemaker", name).input_shape, SEEDS))
    def check(body: dict[str, Any]) -> None:
        async def case() -> Any:
            async with asyncio.timeout(CASE_S_MAX):
                return await OPERATIONS[name](plane, FakeCaller(), body)  # type: ignore[arg-type]

        refusal = None
        answer = None
        try:
            answer = runner.run(case())
        except GristmillError as error:
            refusal = error
        if refusal is None:
            reached.append(name)
            assert output_problems("sagemaker", name, answer) == []
        else:
            assert isinstance(refusal, CALLERS_FAULT), refusal
            assert refusal.message.encode()

    check()
    # Nothing here ever ends by itself, so there is never a session to delete.
    assert reached or name == "DeleteTrainingSession", "no case got through"
