"""The gateway over a real API server: sessions are custom resources, and what a tenant may do is RBAC."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gristmill_contracts import labels
from gristmill_testing.cluster import ROOT, Cluster, eventually
from gristmill_testing.gateway_cluster import (
    RUNTIME,
    SYSTEM,
    GatewayCluster,
    binding,
    create_body,
    gateway_cluster,
)


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayCluster]:
    with gateway_cluster(control_cluster, tmp_path_factory.mktemp("gateway"), replicas=2) as made:
        yield made


@pytest.fixture(autouse=True)
def _short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill_contracts.limits.CREATE_WAIT_S_MAX", 0.2)


def refused(call: Any, *args: Any, **arguments: Any) -> tuple[str, str]:
    """Code and message of what a call is refused with."""
    with pytest.raises(ClientError) as caught:
        call(*args, **arguments)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_a_create_makes_the_resource_in_the_tenants_namespace(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    world.create(tenant, "run-1")
    made = world.session(tenant, "run-1")
    assert made["metadata"]["labels"] == {labels.TENANT: tenant}
    assert made["spec"]["displayName"] == "run-1"
    assert made["spec"]["lora"]["rank"] == 8
    assert made["metadata"]["annotations"][labels.CREATED_BY] == "sagemaker"
    detail = world.client(tenant).describe_training_session(TrainingSessionName="run-1")
    assert detail["TrainingSessionDetail"]["TrainingSessionStatus"] == "Created"


def test_every_gateway_shows_a_session_at_once(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    for number in range(10):
        world.create(tenant, f"run-{number}", at=number % 2)
        other = world.client(tenant, at=1 - number % 2)
        other.describe_training_session(TrainingSessionName=f"run-{number}")
    listed = world.client(tenant).list_training_sessions(MaxResults=4)
    more = world.client(tenant, at=1).list_training_sessions(
        MaxResults=100, NextToken=listed["NextToken"]
    )
    assert len(listed["TrainingSessionSummaries"]) + len(more["TrainingSessionSummaries"]) == 10


def test_a_key_may_do_what_its_service_account_may(world: GatewayCluster) -> None:
    tenant = world.add_tenant(bind="gristmill-viewer")
    world.apply_session(tenant, "run-1")
    viewer = world.client(tenant)
    viewer.describe_training_session(TrainingSessionName="run-1")
    assert len(viewer.list_training_sessions()["TrainingSessionSummaries"]) == 1
    for verb, call, arguments in (
        ("create", viewer.create_training_session, create_body("run-2")),
        ("patch", viewer.stop_training_session, {"TrainingSessionName": "run-1"}),
        ("delete", viewer.delete_training_session, {"TrainingSessionName": "run-1"}),
    ):
        code, message = refused(call, **arguments)
        assert code == "AccessDeniedException"
        assert message.startswith(
            f"User: system:serviceaccount:gm-{tenant}:gm-client is not authorized to {verb} "
            f"trainingsessions.gristmill.dev in namespace 'gm-{tenant}'"
        )
        assert (
            "create rolebinding gm-client-sessions --clusterrole=gristmill-editor "
            f"--serviceaccount=gm-{tenant}:gm-client" in message
        )
    assert labels.STOP_REQUESTED not in world.session(tenant, "run-1")["metadata"].get(
        "annotations", {}
    )


def test_a_key_that_may_only_look_neither_trains_nor_deletes_what_was_made(
    world: GatewayCluster,
) -> None:
    tenant = world.add_tenant(bind="gristmill-viewer")
    world.apply_session(tenant, "run-1")
    world.serve(tenant, "run-1")
    step = {"optimizerStep": {"adamParamsConfig": {"learningRate": 0.001}}}
    code, message = refused(
        world.client(tenant, RUNTIME).execute_training_operation,
        trainingSessionName="run-1",
        sequenceNumber=1,
        operationConfig=step,
    )
    assert (code, "not authorized to update" in message) == ("AccessDeniedException", True)
    client = world.client(tenant)
    assert refused(client.delete_model_package, ModelPackageName="runs/1")[0] == (
        "AccessDeniedException"
    )
    assert client.describe_model_package_group(ModelPackageGroupName="runs")[
        "ModelPackageGroupName"
    ] == ("runs")


def test_a_key_without_any_right_learns_nothing(world: GatewayCluster) -> None:
    tenant = world.add_tenant(bind="")
    world.apply_session(tenant, "run-1")
    client = world.client(tenant)
    for name in ("run-1", "run-9"):
        code, message = refused(client.describe_training_session, TrainingSessionName=name)
        assert (code, "does not exist" in message) == ("AccessDeniedException", False)
    assert refused(client.list_training_sessions)[0] == "AccessDeniedException"


def test_a_right_that_is_given_counts_within_seconds(world: GatewayCluster) -> None:
    tenant = world.add_tenant(bind="")
    assert refused(world.create, tenant, "run-1")[0] == "AccessDeniedException"
    world.cluster.apply(binding("gristmill-editor", "gm-client", f"gm-{tenant}"))

    def created() -> bool:
        try:
            world.create(tenant, "run-1")
        except ClientError:
            return False
        return True

    eventually("the create is let through", created, seconds=15)


def test_one_tenant_sees_nothing_of_another(world: GatewayCluster) -> None:
    ours, theirs = world.add_tenant(), world.add_tenant()
    world.create(theirs, "run-1")
    code, _ = refused(world.client(ours).describe_training_session, TrainingSessionName="run-1")
    assert code == "ResourceNotFound"
    assert world.client(ours).list_training_sessions()["TrainingSessionSummaries"] == []


def test_a_label_of_another_tenant_moves_no_session(world: GatewayCluster) -> None:
    """G34: who may write labels in a namespace owns nothing by it."""
    ours, theirs = world.add_tenant(), world.add_tenant()
    world.apply_session(ours, "run-1")
    world.cluster.kubectl(
        "label", "trainingsession", "run-1", f"--namespace=gm-{ours}", f"{labels.TENANT}={theirs}"
    )
    client = world.client(theirs)
    assert client.list_training_sessions()["TrainingSessionSummaries"] == []
    assert refused(client.describe_training_session, TrainingSessionName="run-1")[0] == (
        "ResourceNotFound"
    )


def test_a_session_with_the_identity_of_another_reaches_nobodys_meter(
    world: GatewayCluster,
) -> None:
    """Whoever makes a session may choose its identity, and the secret of its meter follows from that."""
    ours, thief = world.add_tenant(), world.add_tenant()
    world.apply_session(ours, "run-1")
    uid = world.serve(ours, "run-1")
    world.apply_session(thief, "run-1", annotations={labels.SESSION_ID: uid})
    world.serve(thief, "run-1")
    world.meter.doors.clear()
    detail = world.client(thief).describe_training_session(TrainingSessionName="run-1")
    assert detail["TrainingSessionDetail"]["LastReceivedSequenceNumber"] == 0
    assert world.meter.doors == []
    world.client(ours).describe_training_session(TrainingSessionName="run-1")
    assert world.meter.doors == [f"GET {uid}"]


def test_a_second_tenant_that_claims_a_namespace_gets_no_key_to_it(world: GatewayCluster) -> None:
    owner = world.add_tenant()
    world.give_namespace(owner)
    thief = world.add_tenant(namespace=f"gm-{owner}")
    code, message = refused(world.client(thief).list_training_sessions)
    assert code == "UnrecognizedClientException"
    assert "is not known" in message


def test_a_revoked_key_is_refused_on_every_gateway(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    world.client(tenant).list_training_sessions()
    world.cluster.apply(
        {
            "apiVersion": "gristmill.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": tenant},
            "spec": {"keys": [{"name": "main", "revoked": True}]},
        }
    )

    def is_refused(at: int) -> bool:
        try:
            world.client(tenant, at=at).list_training_sessions()
        except ClientError as error:
            return "was revoked" in str(error)
        return False

    for at in (0, 1):
        eventually("the key is refused", lambda at=at: is_refused(at), seconds=5)


def test_an_applied_session_is_attached_to_while_it_received_nothing(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    before = world.apply_session(tenant, "run-1")
    world.create(tenant, "run-1")
    after = world.session(tenant, "run-1")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    world.write_status(tenant, "run-1", state="Running", lastReceivedSequence=3)

    def taken() -> bool:
        try:
            world.create(tenant, "run-1")
        except ClientError as error:
            return "up to sequence number 3" in str(error)
        return False

    eventually("the session is taken", taken, seconds=5)


def test_an_applied_session_with_other_values_is_not_attached_to(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1", lora={"rank": 16, "alpha": 16})
    code, message = refused(world.create, tenant, "run-1")
    assert code == "ResourceInUse"
    assert "LoraConfig.Rank is 16, not 8" in message


def test_a_create_that_is_sent_again_is_the_same_create(world: GatewayCluster) -> None:
    """As botocore does it: one id for all tries of one call, here at two gateways."""
    tenant = world.add_tenant()
    headers = {
        "X-Amz-Target": "SageMaker.CreateTrainingSession",
        "Content-Type": "application/x-amz-json-1.1",
        "amz-sdk-invocation-id": "call-1",
    }
    arns = []
    for at in (0, 1):
        status, answer = world.call(tenant, "POST", "/", create_body("run-1"), headers, at=at)
        assert status == 200, answer
        arns.append(json.loads(answer)["TrainingSessionArn"])
    assert arns[0] == arns[1]
    assert refused(world.create, tenant, "run-1")[0] == "ResourceInUse"


def test_a_full_quota_is_told_as_a_limit_and_nothing_is_made(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    world.bound_sessions(tenant, 1)
    world.create(tenant, "run-1")
    code, message = refused(world.create, tenant, "run-2")
    assert code == "ResourceLimitExceeded"
    assert "exceeded quota: gristmill" in message
    assert "count/trainingsessions.gristmill.dev=1" in message
    assert world.cluster.find("trainingsession", "run-2", f"gm-{tenant}") is None


def test_a_quota_that_the_cluster_cannot_count_is_told_as_a_moment_of_waiting(
    world: GatewayCluster,
) -> None:
    """As on a young cluster: what the quota bounds has no count yet."""
    tenant = world.add_tenant()
    world.bound_sessions(tenant, 60)
    world.cluster.freeze("kube-controller-manager")
    try:
        world.cluster.kubectl(
            "patch", "resourcequota", "gristmill", f"--namespace=gm-{tenant}", "--subresource=status",
            "--type=merge", '--patch={"status":{"used":null}}',
        )  # fmt: skip

        def answer() -> tuple[str, str]:
            try:
                world.create(tenant, "run-1")
            except ClientError as error:
                return error.response["Error"]["Code"], error.response["Error"]["Message"]
            world.cluster.delete("trainingsession", "run-1", f"gm-{tenant}", wait=True)
            return "", ""

        found = eventually("it is refused", lambda: answer() if answer()[0] else None, 20)
        assert found[0] == "ServiceUnavailable"
        assert "status unknown for quota" in found[1]
        assert "kubectl wait tenant/" in found[1]
        assert world.cluster.find("trainingsession", "run-1", f"gm-{tenant}") is None
    finally:
        world.cluster.thaw("kube-controller-manager")


def test_fifty_creates_at_once_under_a_quota_all_succeed(world: GatewayCluster) -> None:
    """G28: the quota's own conflict is no failure of the session."""
    tenant = world.add_tenant()
    world.bound_sessions(tenant, 60)
    client = world.client(tenant, max_pool_connections=50)
    with ThreadPoolExecutor(50) as pool:
        made = list(
            pool.map(lambda n: client.create_training_session(**create_body(f"run-{n}")), range(50))
        )
    assert len({each["TrainingSessionArn"] for each in made}) == 50


def test_what_the_api_server_refuses_is_told_in_its_words(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    body = create_body("run-1") | {
        "OutputConfig": {"S3Location": {"Path": "s3://data/" + "a" * 250 + "/" + "b" * 250}}
    }
    world.client(tenant).create_training_session(**body)
    world.cluster.kubectl("delete", "namespace", f"gm-{tenant}", "--wait=true", timeout=60)
    code, message = refused(world.create, tenant, "run-2")
    assert code == "ServiceUnavailable"
    assert f"gm-{tenant}" in message


def test_a_stop_is_an_annotation_and_a_delete_is_a_delete(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    world.create(tenant, "run-1")
    client = world.client(tenant)
    spec = world.session(tenant, "run-1")["spec"]
    client.stop_training_session(TrainingSessionName="run-1")
    stopped = world.session(tenant, "run-1")
    assert labels.STOP_REQUESTED in stopped["metadata"]["annotations"]
    assert stopped["spec"] == spec
    detail = client.describe_training_session(TrainingSessionName="run-1")
    assert detail["TrainingSessionDetail"]["TrainingSessionStatus"] == "Stopping"
    code, message = refused(client.stop_training_session, TrainingSessionName="run-1")
    assert (code, "transition from Stopping" in message) == ("ValidationException", True)
    world.write_status(tenant, "run-1", state="Stopped")

    def deleted() -> bool:
        try:
            client.delete_training_session(TrainingSessionName="run-1")
        except ClientError:
            return False
        return True

    eventually("the stopped session is deleted", deleted, seconds=5)
    world.cluster.wait_gone("trainingsession", "run-1", f"gm-{tenant}")
    assert refused(client.describe_training_session, TrainingSessionName="run-1")[0] == (
        "ResourceNotFound"
    )


def test_a_suspended_tenant_creates_nothing(world: GatewayCluster) -> None:
    tenant = world.add_tenant(suspended=True)
    code, message = refused(world.create, tenant, "run-1")
    assert (code, "is suspended" in message) == ("AccessDeniedException", True)


def test_the_gateway_reads_no_secret_and_writes_no_status(world: GatewayCluster) -> None:
    """Over a whole session's life, by the API server's own audit log."""
    tenant = world.add_tenant()
    mark = world.cluster.audit_mark()
    client = world.client(tenant)
    client.create_training_session(**create_body("run-2"))
    client.describe_training_session(TrainingSessionName="run-2")
    client.stop_training_session(TrainingSessionName="run-2")
    world.write_status(tenant, "run-2", state="Stopped")
    eventually("it is deleted", lambda: deleted(client, "run-2"), seconds=5)
    user = f"system:serviceaccount:{SYSTEM}:gristmill-gateway"
    calls = {
        (event["verb"], event["objectRef"]["resource"], event["objectRef"].get("subresource", ""))
        for event in world.cluster.audit(mark, user=user)
    }
    assert {("create", "trainingsessions", ""), ("patch", "trainingsessions", "")} <= calls
    assert {resource for _, resource, _ in calls} <= {
        "trainingsessions", "tenants", "basemodels", "subjectaccessreviews",
    }  # fmt: skip
    assert all(not subresource for _, _, subresource in calls)


def deleted(client: Any, name: str) -> bool:
    try:
        client.delete_training_session(TrainingSessionName=name)
    except ClientError:
        return False
    return True


def test_creates_and_stops_pass_the_admission_policies(world: GatewayCluster) -> None:
    tenant = world.add_tenant()
    world.apply_session(tenant, "run-1")
    world.cluster.apply(ROOT / "crds/policies/sessions.yaml")
    try:
        eventually(
            "the policy is enforced",
            lambda: world.cluster.try_kubectl(
                "annotate", "trainingsession", "run-1", f"--namespace=gm-{tenant}", "--overwrite",
                f"{labels.CREATED_BY}=somebody", "--dry-run=server",
            ).code != 0,
        )  # fmt: skip
        client = world.client(tenant)
        client.create_training_session(**create_body("run-2"))
        client.stop_training_session(TrainingSessionName="run-2")
        client.stop_training_session(TrainingSessionName="run-1")
        for name in ("run-1", "run-2"):
            annotations = world.session(tenant, name)["metadata"]["annotations"]
            assert labels.STOP_REQUESTED in annotations
    finally:
        world.cluster.kubectl("delete", "-f", str(ROOT / "crds/policies/sessions.yaml"))
