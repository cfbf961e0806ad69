"""Model package groups and model packages, over a real ledger."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
)
from gristmill_contracts.http import Checkpoint
from gristmill_gateway.sagemaker import registry_calls
from gristmill_testing.control_plane import (
    ACCOUNT,
    REGION,
    FakeCaller,
    FakeContext,
    checkpoint,
    running_control_plane,
)
from gristmill_testing.wire_shapes import output_problems

CALLER = FakeCaller()
GROUP_ARN = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package-group/runs"
PACKAGE_ARN = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package/runs"
OTHER_ACCOUNT = "100000000002"


@pytest.fixture(name="plane")
async def plane_fixture(tmp_path: Path) -> AsyncIterator[FakeContext]:
    async with running_control_plane(tmp_path) as context:
        yield context


async def save(plane: FakeContext, number: int, **changes: Any) -> Checkpoint:
    """A checkpoint as a meter registers it."""
    message = checkpoint(number, **changes)
    return await plane.ledger_admin.ask(Checkpoint, "POST", "/v1/checkpoints", message)


async def call(
    plane: FakeContext, operation: str, body: dict[str, Any], caller: FakeCaller = CALLER
) -> Any:
    handler = getattr(registry_calls, operation)
    answer = await handler(plane, caller, body)
    name = "".join(part.title() for part in operation.split("_"))
    assert output_problems("sagemaker", name, answer) == []
    return answer


async def listed(plane: FakeContext, **body: Any) -> list[int]:
    """Versions of the group runs, in the order of the answer."""
    answer = await call(plane, "list_model_packages", {"ModelPackageGroupName": "runs"} | body)
    return [each["ModelPackageVersion"] for each in answer["ModelPackageSummaryList"]]


# --- groups --------------------------------------------------------------------------------------


async def test_a_group_is_made_once_and_described_by_name_and_arn(plane: FakeContext) -> None:
    body = {"ModelPackageGroupName": "runs", "ModelPackageGroupDescription": "all of thêm"}
    assert await call(plane, "create_model_package_group", body) == {
        "ModelPackageGroupArn": GROUP_ARN
    }
    with pytest.raises(ConflictError, match="already exists"):
        await call(plane, "create_model_package_group", body)
    for name in ("runs", GROUP_ARN):
        found = await call(plane, "describe_model_package_group", {"ModelPackageGroupName": name})
        assert found["ModelPackageGroupArn"] == GROUP_ARN
        assert found["ModelPackageGroupDescription"] == "all of thêm"
        assert found["ModelPackageGroupStatus"] == "Completed"


BAD_GROUPS: list[tuple[str, dict[str, Any], type[GristmillError], str]] = [
    ("create_model_package_group", {}, InvalidRequestError, "ModelPackageGroupName is required"),
    ("create_model_package_group", {"ModelPackageGroupName": "a b"}, InvalidRequestError, "a b"),
    ("create_model_package_group", {"ModelPackageGroupName": "a" * 64}, InvalidRequestError, "63"),
    ("create_model_package_group", {"ModelPackageGroupName": "a", "X": 1}, InvalidRequestError, "X is not a member"),
    ("create_model_package_group", {"ModelPackageGroupName": "a", "ModelPackageGroupDescription": "x" * 1025}, InvalidRequestError, "1024"),
    ("create_model_package_group", {"ModelPackageGroupName": "a", "ModelPackageGroupDescription": "\x00"}, InvalidRequestError, "ModelPackageGroupDescription"),
    ("create_model_package_group", {"ModelPackageGroupName": "a", "Tags": [{"Key": "k", "Value": "v"}]}, InvalidRequestError, "Tags"),
    ("create_model_package_group", {"ModelPackageGroupName": "a", "ManagedConfiguration": {"ManagedStorageType": "Restricted"}}, InvalidRequestError, "ManagedStorageType"),
    ("describe_model_package_group", {"ModelPackageGroupName": "none"}, NotFoundError, "does not exist"),
    ("describe_model_package_group", {"ModelPackageGroupName": GROUP_ARN.replace(ACCOUNT, OTHER_ACCOUNT)}, ForbiddenError, OTHER_ACCOUNT),
    ("describe_model_package_group", {"ModelPackageGroupName": PACKAGE_ARN}, InvalidRequestError, "neither a name"),
    ("list_model_packages", {"ModelPackageGroupName": "none"}, NotFoundError, "does not exist"),
    ("list_model_packages", {"SortBy": "Size"}, InvalidRequestError, "SortBy"),
    ("list_model_packages", {"MaxResults": 101}, InvalidRequestError, "MaxResults"),
    ("list_model_packages", {"NextToken": "forged"}, InvalidRequestError, "NextToken"),
    ("describe_model_package", {"ModelPackageName": "runs"}, InvalidRequestError, "counts from 1"),
    ("describe_model_package", {"ModelPackageName": "runs/0"}, InvalidRequestError, "counts from 1"),
    ("describe_model_package", {"ModelPackageName": GROUP_ARN}, InvalidRequestError, "model-package/"),
    ("describe_model_package", {"ModelPackageName": f"{PACKAGE_ARN}/1"}, NotFoundError, "does not exist"),
    ("describe_model_package", {"ModelPackageName": f"{PACKAGE_ARN}/999999999"}, NotFoundError, "does not exist"),
    ("describe_model_package", {"ModelPackageName": f"{PACKAGE_ARN}/1".replace(ACCOUNT, OTHER_ACCOUNT)}, ForbiddenError, OTHER_ACCOUNT),
    ("delete_model_package", {"ModelPackageName": f"{PACKAGE_ARN}/1"}, NotFoundError, "does not exist"),
    ("delete_model_package", {"ModelPackageName": 7}, InvalidRequestError, "ModelPackageName = 7"),
]  # fmt: skip


async def test_a_bad_request_is_refused_by_name_and_value(plane: FakeContext) -> None:
    for operation, body, error, text in BAD_GROUPS:
        with pytest.raises(error) as caught:
            await call(plane, operation, body)
        assert text in caught.value.message, (operation, body)


# --- packages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["weights", "state"])
async def test_a_checkpoint_is_described_as_the_sdk_reads_it(plane: FakeContext, kind: str) -> None:
    from sagemaker.train.training_session._utils import base_model_arn_from_model_package

    saved = await save(plane, 1, kind=kind)
    for name in (f"{PACKAGE_ARN}/1", "runs/1"):
        found = await call(plane, "describe_model_package", {"ModelPackageName": name})
        assert found["ModelPackageArn"] == f"{PACKAGE_ARN}/1"
        container = found["InferenceSpecification"]["Containers"][0]
        assert container["IsCheckpoint"] is (kind == "state")
        source = container["ModelDataSource"]["S3DataSource"]
        assert source == {
            "S3Uri": f"s3://data/run-1/output/{saved.id}/", "S3DataType": "S3Prefix",
            "CompressionType": "None",
        }  # fmt: skip
        assert base_model_arn_from_model_package(found, REGION) == (
            f"arn:aws:sagemaker:{REGION}:aws:hub-content/SageMakerPublicHub/Model/tiny/1.0.0"
        )
        assert found["CustomerMetadataProperties"]["rank"] == "8"


async def test_packages_are_listed_in_both_orders_page_by_page(plane: FakeContext) -> None:
    for number in range(1, 6):
        await save(plane, number)
    await save(plane, 6, group="others")
    assert await listed(plane) == [1, 2, 3, 4, 5]
    assert await listed(plane, SortOrder="Descending", SortBy="CreationTime") == [5, 4, 3, 2, 1]
    assert await listed(plane, ModelPackageGroupName=GROUP_ARN) == [1, 2, 3, 4, 5]
    body: dict[str, Any] = {
        "ModelPackageGroupName": "runs",
        "SortOrder": "Descending",
        "MaxResults": 2,
    }
    seen: list[int] = []
    for _ in range(3):
        answer = await call(plane, "list_model_packages", body)
        seen += [each["ModelPackageVersion"] for each in answer["ModelPackageSummaryList"]]
        body["NextToken"] = answer.get("NextToken")
    assert seen == [5, 4, 3, 2, 1]
    assert body["NextToken"] is None
    everything = await call(plane, "list_model_packages", {})
    assert len(everything["ModelPackageSummaryList"]) == 6


async def test_a_list_is_filtered(plane: FakeContext) -> None:
    first = await save(plane, 1)
    await save(plane, 2)
    made = first.created_us / 1e6
    assert await listed(plane, CreationTimeAfter=made) == [2]
    assert await listed(plane, CreationTimeBefore=made + 1) == [1]
    assert await listed(plane, NameContains="run") == [1, 2]
    assert await listed(plane, NameContains="zzz") == []
    assert await listed(plane, ModelApprovalStatus="Approved") == []
    assert await listed(plane, ModelPackageType="Versioned") == [1, 2]
    assert await listed(plane, ModelPackageType="Unversioned") == []


async def test_a_filtered_page_is_filled_from_several_of_the_ledgers(plane: FakeContext) -> None:
    for number in range(1, 12):
        await save(plane, number, group="runs" if number % 5 == 0 else "noise")
    body = {"NameContains": "run", "MaxResults": 1}
    first = await call(plane, "list_model_packages", body)
    assert [each["ModelPackageVersion"] for each in first["ModelPackageSummaryList"]] == [1]
    second = await call(plane, "list_model_packages", body | {"NextToken": first["NextToken"]})
    assert [each["ModelPackageVersion"] for each in second["ModelPackageSummaryList"]] == [2]


async def test_a_list_of_nothing_but_misses_answers_a_token_and_goes_on(
    plane: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_calls, "LEDGER_PAGES_PER_ANSWER", 2)
    for number in range(1, 7):
        await save(plane, number, group="runs" if number == 6 else "noise")
    body: dict[str, Any] = {"NameContains": "run", "MaxResults": 1}
    found: list[int] = []
    calls = 0
    while calls == 0 or body["NextToken"] is not None:
        answer = await call(plane, "list_model_packages", body)
        found += [each["ModelPackageVersion"] for each in answer["ModelPackageSummaryList"]]
        body["NextToken"] = answer.get("NextToken")
        calls += 1
    assert found == [1]
    assert calls == 3


async def test_a_deleted_package_is_gone_and_its_version_not_given_again(
    plane: FakeContext,
) -> None:
    for number in (1, 2, 3):
        await save(plane, number)
    await call(plane, "delete_model_package", {"ModelPackageName": f"{PACKAGE_ARN}/2"})
    assert await listed(plane) == [1, 3]
    for operation in ("describe_model_package", "delete_model_package"):
        with pytest.raises(NotFoundError, match="runs/2 does not exist"):
            await call(plane, operation, {"ModelPackageName": f"{PACKAGE_ARN}/2"})
    assert (await save(plane, 4)).version == 4


async def test_a_tenant_sees_its_own_packages_alone(plane: FakeContext) -> None:
    await save(plane, 1)
    rival = FakeCaller(tenant="rival", account_id=OTHER_ACCOUNT)
    assert await call(plane, "list_model_packages", {}, rival) == {"ModelPackageSummaryList": []}
    for operation in ("describe_model_package", "delete_model_package"):
        with pytest.raises(NotFoundError):
            await call(plane, operation, {"ModelPackageName": "runs/1"}, rival)
    assert await listed(plane) == [1]
