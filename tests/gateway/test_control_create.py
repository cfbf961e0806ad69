"""CreateTrainingSession: what it stores, what it refuses, whom it lets attach."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
)
from gristmill_contracts.http import CreateGroup
from gristmill_contracts.ids import TenantName
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import (
    BaseModelRef,
    LoraSpec,
    OutputSpec,
    TrainingSession,
    TrainingSessionSpec,
)
from gristmill_contracts.tenant import EgressProfile, Tenant, TenantNetwork, TenantSpec
from gristmill_gateway.object_names import object_name
from gristmill_gateway.sagemaker import control
from gristmill_testing.control_plane import (
    ACCOUNT,
    REGION,
    FakeCaller,
    FakeContext,
    accept,
    base_model,
    create_body,
    model_arn,
    running_control_plane,
    view,
)
from gristmill_testing.wire_shapes import output_problems

CALLER = FakeCaller()


@pytest.fixture(name="plane")
async def plane_fixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeContext]:
    """Nobody plans here, so a create waits for nothing unless a test says so."""
    monkeypatch.setattr("gristmill_contracts.limits.CREATE_WAIT_S_MAX", 0.0)
    async with running_control_plane(tmp_path) as context:
        yield context


async def create(plane: FakeContext, body: dict[str, Any], caller: FakeCaller = CALLER) -> str:
    answer = await control.create_training_session(plane, caller, body)
    assert output_problems("sagemaker", "CreateTrainingSession", answer) == []
    return str(answer["TrainingSessionArn"])


def stored(plane: FakeContext) -> list[TrainingSession]:
    return plane.store.list(TrainingSession, "acme")


async def test_a_create_stores_every_field_in_the_callers_namespace(plane: FakeContext) -> None:
    group = CreateGroup(tenant=TenantName("acme"), name="mine")
    await plane.ledger.create_group(group)
    body = create_body(
        "run-1",
        ModelPackageGroupArn=f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package-group/mine",
        Tags=[{"Key": "team", "Value": "rl"}],
        VpcConfig={"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1", "subnet-2"]},
        ModelConfig={"BaseModelArn": model_arn("tiny"), "AcceptEula": True},
    )
    arn = await create(plane, body)
    assert arn == f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-session/run-1"
    (session,) = stored(plane)
    assert session.metadata.name == "run-1"
    assert session.spec.display_name == "run-1"
    assert session.spec.base_model_ref.name == "tiny"
    assert session.spec.lora == LoraSpec(rank=8, alpha=16)
    assert session.spec.output == OutputSpec(path="s3://data/run-1/output", checkpoint_group="mine")
    assert session.spec.role_arn == body["RoleArn"]
    assert session.metadata.annotations[labels.CREATED_BY] == "sagemaker"
    assert len(session.metadata.annotations[labels.SESSION_ID]) == 36
    detail = await control.describe_training_session(
        plane, CALLER, {"TrainingSessionName": "run-1"}
    )
    detail = detail["TrainingSessionDetail"]
    for member in (
        "LoraConfig",
        "RoleArn",
        "ModelConfig",
        "OutputConfig",
        "ModelPackageGroupArn",
        "Tags",
        "VpcConfig",
    ):
        assert detail[member] == body[member]


async def test_without_a_group_the_shared_one_is_made(plane: FakeContext) -> None:
    await create(plane, create_body("run-1"))
    await create(plane, create_body("run-2"))
    group = await plane.ledger.get_group("acme", "sagemaker-default")
    assert group.name == "sagemaker-default"
    assert stored(plane)[0].spec.output.checkpoint_group == "sagemaker-default"


@pytest.mark.parametrize("name", ["run-1", "r0", "a", "a" * 40])
def test_a_name_that_is_a_dns_label_names_the_object(name: str) -> None:
    assert object_name(name) == name


@pytest.mark.parametrize("name", ["a" * 41, "Run-1", "run-", "0run", "a" * 62 + "Z"])
async def test_a_name_that_is_no_dns_label_becomes_a_hash(name: str) -> None:
    made = object_name(name)
    assert made.startswith("ts-")
    assert len(made) == 29
    assert object_name(made) == made


async def test_a_session_whose_object_has_another_name_keeps_its_own(plane: FakeContext) -> None:
    arn = await create(plane, create_body("Run-1"))
    assert arn.endswith("training-session/Run-1")
    (session,) = stored(plane)
    assert session.spec.display_name == "Run-1"
    assert session.metadata.name == object_name("Run-1")


async def test_a_base_model_is_found_by_name_or_by_its_hugging_face_id(plane: FakeContext) -> None:
    plane.store.create(base_model("smol", "Lab/Smol.LM2-135M"))
    rows = {
        model_arn("tiny"): "tiny",
        model_arn("tiny", ""): "tiny",
        model_arn("tiny", account=ACCOUNT): "tiny",
        model_arn("smol-lm2-135m"): "smol",
        model_arn("Lab-Smol-LM2-135M"): "smol",
        "arn:aws-cn:sagemaker:cn-north-1:aws:hub-content/SageMakerPublicHub/Model/tiny": "tiny",
    }
    for number, (arn, expected) in enumerate(rows.items()):
        await create(plane, create_body(f"run-{number}", ModelConfig={"BaseModelArn": arn}))
        assert stored(plane)[-1].spec.base_model_ref.name == expected


BAD: list[tuple[str, dict[str, Any], type[GristmillError], str]] = [
    ("no name", {"TrainingSessionName": None}, InvalidRequestError, "TrainingSessionName is required"),
    ("empty name", {"TrainingSessionName": ""}, InvalidRequestError, "TrainingSessionName = ''"),
    ("long name", {"TrainingSessionName": "a" * 64}, InvalidRequestError, "63"),
    ("odd name", {"TrainingSessionName": "a_b"}, InvalidRequestError, "a_b"),
    ("name with newline", {"TrainingSessionName": "a\n"}, InvalidRequestError, "pattern"),
    ("surrogate", {"TrainingSessionName": "\ud800"}, InvalidRequestError, "unicode"),
    ("name is a number", {"TrainingSessionName": 5}, InvalidRequestError, "valid string"),
    ("unknown key", {"Seed": 5}, InvalidRequestError, "Seed is not a member"),
    ("python key", {"role_arn": "x"}, InvalidRequestError, "not a member"),
    ("unknown inner key", {"LoraConfig": {"Rank": 8, "Alpha": 16, "Drop": 1}}, InvalidRequestError, "LoraConfig.Drop"),
    ("no rank", {"LoraConfig": {"Alpha": 16}}, InvalidRequestError, "LoraConfig.Rank is required"),
    ("rank 0", {"LoraConfig": {"Rank": 0, "Alpha": 1}}, InvalidRequestError, "LoraConfig.Rank = 0"),
    ("rank 257", {"LoraConfig": {"Rank": 257, "Alpha": 1}}, InvalidRequestError, "less than or equal to 256"),
    ("rank text", {"LoraConfig": {"Rank": "8", "Alpha": 1}}, InvalidRequestError, "valid integer"),
    ("rank float", {"LoraConfig": {"Rank": 8.0, "Alpha": 1}}, InvalidRequestError, "valid integer"),
    ("rank bool", {"LoraConfig": {"Rank": True, "Alpha": 1}}, InvalidRequestError, "valid integer"),
    ("rank huge", {"LoraConfig": {"Rank": 10**300, "Alpha": 1}}, InvalidRequestError, "LoraConfig.Rank"),
    ("alpha 0", {"LoraConfig": {"Rank": 1, "Alpha": 0}}, InvalidRequestError, "LoraConfig.Alpha = 0"),
    ("alpha large", {"LoraConfig": {"Rank": 1, "Alpha": 65537}}, InvalidRequestError, "65536"),
    ("no role", {"RoleArn": None}, InvalidRequestError, "RoleArn is required"),
    ("bad role", {"RoleArn": "arn:aws:iam::1:role/x" + "y" * 20}, InvalidRequestError, "RoleArn"),
    ("long role", {"RoleArn": f"arn:aws:iam::{ACCOUNT}:role/" + "r" * 2048}, InvalidRequestError, "2048"),
    ("no model", {"ModelConfig": {}}, InvalidRequestError, "ModelConfig.BaseModelArn is required"),
    ("model is a name", {"ModelConfig": {"BaseModelArn": "tiny"}}, InvalidRequestError, "not of the form"),
    ("model of short account", {"ModelConfig": {"BaseModelArn": model_arn("tiny", account="123")}}, InvalidRequestError, "not of the form"),
    ("eula text", {"ModelConfig": {"BaseModelArn": model_arn("tiny"), "AcceptEula": "yes"}}, InvalidRequestError, "AcceptEula"),
    ("unknown model", {"ModelConfig": {"BaseModelArn": model_arn("none")}}, NotFoundError, "there are: tiny"),
    ("unknown version", {"ModelConfig": {"BaseModelArn": model_arn("tiny", "/2.0.0")}}, NotFoundError, "1.0.0"),
    ("unknown hub", {"ModelConfig": {"BaseModelArn": model_arn("tiny").replace("PublicHub", "Hub")}}, NotFoundError, "SageMakerPublicHub"),
    ("no output", {"OutputConfig": None}, InvalidRequestError, "OutputConfig is required"),
    ("empty path", {"OutputConfig": {"S3Location": {"Path": ""}}}, InvalidRequestError, "S3Location.Path"),
    ("https path", {"OutputConfig": {"S3Location": {"Path": "https://data/x"}}}, InvalidRequestError, "s3://bucket/prefix"),
    ("path traversal", {"OutputConfig": {"S3Location": {"Path": "s3://data/../rival"}}}, InvalidRequestError, "'..'"),
    ("bad bucket", {"OutputConfig": {"S3Location": {"Path": "s3://Data/x"}}}, InvalidRequestError, "bucket name"),
    ("long path", {"OutputConfig": {"S3Location": {"Path": "s3://data/" + "x/" * 600}}}, InvalidRequestError, "1024"),
    ("bad key", {"OutputConfig": {"S3Location": {"Path": "s3://d/x", "KmsKeyArn": "k"}}}, InvalidRequestError, "KmsKeyArn"),
    ("a key we cannot honour", {"OutputConfig": {"S3Location": {"Path": "s3://data/x", "KmsKeyArn": f"arn:aws:kms:us-west-2:{ACCOUNT}:key/ab-1"}}}, InvalidRequestError, "no encryption keys"),
    ("no subnets", {"VpcConfig": {"SecurityGroupIds": ["sg-1"]}}, InvalidRequestError, "VpcConfig.Subnets is required"),
    ("six groups", {"VpcConfig": {"SecurityGroupIds": ["sg"] * 6, "Subnets": ["a"]}}, InvalidRequestError, "SecurityGroupIds"),
    ("51 tags", {"Tags": [{"Key": f"k{i}", "Value": ""} for i in range(51)]}, InvalidRequestError, "Tags"),
    ("tag twice", {"Tags": [{"Key": "k", "Value": "1"}, {"Key": "k", "Value": "2"}]}, InvalidRequestError, "Tags[1].Key"),
    ("reserved tag", {"Tags": [{"Key": "AWS:x", "Value": "1"}]}, InvalidRequestError, "reserved"),
    ("odd tag", {"Tags": [{"Key": "k;", "Value": "1"}]}, InvalidRequestError, "Tags[0].Key"),
    ("tag without value", {"Tags": [{"Key": "k"}]}, InvalidRequestError, "Tags[0].Value is required"),
    ("bad group", {"ModelPackageGroupArn": "a b"}, InvalidRequestError, "model package group"),
    ("unknown group", {"ModelPackageGroupArn": f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package-group/none"}, NotFoundError, "CreateModelPackageGroup"),
    ("another's group", {"ModelPackageGroupArn": f"arn:aws:sagemaker:{REGION}:100000000002:model-package-group/x"}, ForbiddenError, "100000000002"),
]  # fmt: skip


async def test_a_bad_create_is_refused_by_name_and_value_and_stores_nothing(
    plane: FakeContext,
) -> None:
    for title, changes, error, text in BAD:
        with pytest.raises(error) as caught:
            await create(plane, create_body(**changes))
        assert text in caught.value.message, title
        assert stored(plane) == [], title


async def test_a_name_that_is_taken_is_refused(plane: FakeContext) -> None:
    await create(plane, create_body("Run"))
    with pytest.raises(ConflictError, match="Run already exists"):
        await create(plane, create_body("Run"))
    assert len(stored(plane)) == 1


async def test_two_creates_at_once_make_one_session(plane: FakeContext) -> None:
    results = await asyncio.gather(
        *(create(plane, create_body("run-1")) for _ in range(4)), return_exceptions=True
    )
    assert [type(result) for result in results].count(ConflictError) == 3
    assert len(stored(plane)) == 1


async def test_a_create_that_the_client_sends_again_has_its_session(plane: FakeContext) -> None:
    first = FakeCaller(invocation_id="call-1")
    assert await create(plane, create_body("run-1"), first) == await create(
        plane, create_body("run-1"), first
    )
    with pytest.raises(ConflictError):
        await create(plane, create_body("run-1"), FakeCaller(invocation_id="call-2"))
    with pytest.raises(ConflictError):
        await create(plane, create_body("run-1", LoraConfig={"Rank": 9, "Alpha": 16}), first)
    assert len(stored(plane)) == 1


async def test_two_tenants_have_sessions_of_one_name(plane: FakeContext) -> None:
    await create(plane, create_body("run-1"))
    await create(plane, create_body("run-1"), FakeCaller(tenant="rival", account_id="100000000002"))
    assert len(stored(plane)) == 1
    assert len(plane.store.list(TrainingSession, "rival")) == 1


async def test_a_suspended_tenant_creates_nothing(plane: FakeContext) -> None:
    plane.store.create(
        Tenant(metadata=Metadata(name="acme", namespace=""), spec=TenantSpec(suspended=True))
    )
    with pytest.raises(ForbiddenError, match="suspended"):
        await create(plane, create_body("run-1"))
    assert stored(plane) == []


# --- attach --------------------------------------------------------------------------------------


def apply(plane: FakeContext, **changes: Any) -> TrainingSession:
    """What `kubectl apply` stores: no annotation of ours, names as in the manifest."""
    spec: dict[str, Any] = {
        "base_model_ref": BaseModelRef(name="tiny"),
        "lora": LoraSpec(rank=8, alpha=16),
        "output": OutputSpec(path="s3://data/run-1/output"),
    }
    name = changes.pop("name", "run-1")
    return plane.store.create(
        TrainingSession(
            metadata=Metadata(name=name, namespace="acme"),
            spec=TrainingSessionSpec(**(spec | changes)),
        )
    )


async def test_a_create_attaches_to_an_applied_session_that_matches(plane: FakeContext) -> None:
    applied = apply(plane)
    await create(plane, create_body("run-1"))
    assert stored(plane) == [applied]


async def test_an_applied_session_is_found_by_its_display_name(plane: FakeContext) -> None:
    apply(plane, name="from-yaml", display_name="Run-1")
    body = create_body("Run-1", OutputConfig={"S3Location": {"Path": "s3://data/run-1/output/"}})
    assert (await create(plane, body)).endswith("training-session/Run-1")
    assert len(stored(plane)) == 1
    detail = await control.describe_training_session(
        plane, CALLER, {"TrainingSessionName": "Run-1"}
    )
    assert detail["TrainingSessionDetail"]["TrainingSessionName"] == "Run-1"


async def test_the_default_output_of_an_applied_session_is_the_sdks_default(
    plane: FakeContext,
) -> None:
    apply(plane, output=OutputSpec())
    path = f"s3://gristmill-{ACCOUNT}/run-1/output"
    await create(plane, create_body("run-1", OutputConfig={"S3Location": {"Path": path}}))
    assert len(stored(plane)) == 1


DIFFERENT: list[tuple[dict[str, Any], str]] = [
        ({"lora": LoraSpec(rank=4, alpha=16)}, "LoraConfig.Rank is 4, not 8"),
        ({"lora": LoraSpec(rank=8, alpha=8)}, "LoraConfig.Alpha is 8, not 16"),
        ({"base_model_ref": BaseModelRef(name="other")}, "base model is 'other', not 'tiny'"),
        ({"output": OutputSpec(path="s3://data/else")}, "OutputConfig.S3Location.Path is 's3://data/else'"),
        ({"output": OutputSpec(path="s3://data/run-1/output", checkpoint_group="g")}, "model package group is 'g'"),
        ({"role_arn": f"arn:aws:iam::{ACCOUNT}:role/Other"}, "RoleArn is"),
        ({"desired_state": "Stopped"}, "is Stopping"),

]  # fmt: skip


async def test_a_create_that_differs_from_an_applied_session_names_the_difference(
    plane: FakeContext,
) -> None:
    for applied, text in DIFFERENT:
        apply(plane, **applied)
        with pytest.raises(ConflictError) as caught:
            await create(plane, create_body("run-1"))
        assert text in caught.value.message
        assert len(stored(plane)) == 1
        plane.store.delete(TrainingSession, "acme", "run-1")


async def test_an_applied_session_that_received_operations_is_not_attached_to(
    plane: FakeContext,
) -> None:
    session = apply(plane)
    plane.views[session.metadata.uid] = view(session, last_received_number=3)
    with pytest.raises(ConflictError, match="sequence number 3"):
        await create(plane, create_body("run-1"))


# --- hold ----------------------------------------------------------------------------------------


async def test_a_create_is_held_until_the_session_takes_operations(
    plane: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_contracts.limits.CREATE_WAIT_S_MAX", 20.0)
    call = asyncio.create_task(create(plane, create_body("run-1")))
    while not stored(plane):
        await asyncio.sleep(0)
    done, _ = await asyncio.wait([call], timeout=0.2)
    assert not done
    accept(plane.store, "run-1")
    await asyncio.wait_for(call, 5)
    detail = await control.describe_training_session(
        plane, CALLER, {"TrainingSessionName": "run-1"}
    )
    assert detail["TrainingSessionDetail"]["TrainingSessionStatus"] == "Running"


@pytest.mark.parametrize("end", ["Failed", "deleted"])
async def test_a_held_create_ends_when_the_session_does(
    plane: FakeContext, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("gristmill_contracts.limits.CREATE_WAIT_S_MAX", 20.0)
    call = asyncio.create_task(create(plane, create_body("run-1")))
    while not stored(plane):
        await asyncio.sleep(0)
    if end == "Failed":
        accept(plane.store, "run-1", state="Failed")
    else:
        plane.store.delete(TrainingSession, "acme", "run-1")
    await asyncio.wait_for(call, 5)


def tenant_with_profiles(plane: FakeContext, *names: str) -> None:
    profiles = [EgressProfile(name=name, cidrs=["10.0.0.0/8"]) for name in names]
    spec = TenantSpec(network=TenantNetwork(egress_profiles=profiles))
    plane.store.create(Tenant(metadata=Metadata(name="acme", namespace=""), spec=spec))


async def test_security_groups_are_the_tenants_egress_profiles_in_a_cluster(
    plane: FakeContext,
) -> None:
    plane.in_cluster = True
    tenant_with_profiles(plane, "hub", "wiki")
    vpc = {"SecurityGroupIds": ["wiki"], "Subnets": ["a"]}
    await create(plane, create_body("run-1", VpcConfig=vpc))
    (session,) = stored(plane)
    assert session.spec.egress_profiles == ["wiki"]
    with pytest.raises(InvalidRequestError, match="'sg-1' is no egress profile"):
        await create(plane, create_body("run-2", VpcConfig=vpc | {"SecurityGroupIds": ["sg-1"]}))
    assert len(stored(plane)) == 1


async def test_an_applied_session_is_attached_to_by_its_egress_profiles(plane: FakeContext) -> None:
    plane.in_cluster = True
    tenant_with_profiles(plane, "hub", "wiki")
    vpc = {"SecurityGroupIds": ["wiki"], "Subnets": ["a"]}
    await create(plane, create_body("run-1", VpcConfig=vpc))
    (made,) = stored(plane)
    meta = made.metadata.model_copy(update={"annotations": {}})
    plane.store.update(made.model_copy(update={"metadata": meta}))
    await create(plane, create_body("run-1", VpcConfig=vpc))
    with pytest.raises(ConflictError, match="VpcConfig"):
        await create(plane, create_body("run-1", VpcConfig=vpc | {"SecurityGroupIds": ["hub"]}))
