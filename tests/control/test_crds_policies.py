"""The admission policies, on a real API server: who may write what, and what others are told."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from gristmill_testing.api_server import CRDS, ApiServer, Json, Reply, collection
from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.definitions import an_object, install_definitions

POLICIES = CRDS / "policies"
ACCOUNTS = "system:serviceaccount:gristmill-system"
OPERATOR = f"{ACCOUNTS}:gristmill-operator"
GATEWAY = f"{ACCOUNTS}:gristmill-gateway"
JOB_CONTROLLER = "system:serviceaccount:kube-system:job-controller"
WRITERS = "test-writers"
BY = f"is written by {OPERATOR} alone, not by ann"

TENANT, SESSION, SESSION_ID = (
    "gristmill.dev/tenant",
    "gristmill.dev/session",
    "gristmill.dev/session-id",
)
FLUSH = "gristmill.dev/metering-flush"

BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": WRITERS},
    "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "cluster-admin",
    },
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": WRITERS}],
}


class Writers:
    """Calls as one of several people who may do everything that RBAC can allow."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    def create(self, who: str, thing: Json) -> Reply:
        return self.api.create(thing, user=who, groups=(WRITERS,))

    def patch(self, who: str, thing: Json, **metadata: Any) -> Reply:
        return self.api.merge(thing, {"metadata": metadata}, user=who, groups=(WRITERS,))

    def namespaced(self, kind: str, api: str, spec: Json, **metadata: Any) -> Json:
        made = an_object("TrainingSession", self.namespace)
        return {
            "apiVersion": api,
            "kind": kind,
            "metadata": {**made["metadata"], **metadata},
            "spec": spec,
        }

    def session(self, **metadata: Any) -> Json:
        thing = an_object("TrainingSession", self.namespace)
        return {**thing, "metadata": {**thing["metadata"], **metadata}}

    def pod(self, **metadata: Any) -> Json:
        return self.namespaced("Pod", "v1", POD, **metadata)

    def job(self, labels: dict[str, str]) -> Json:
        template = {"metadata": {"labels": labels}, "spec": {**POD, "restartPolicy": "Never"}}
        return self.namespaced("Job", "batch/v1", {"template": template})


POD: Json = {"containers": [{"name": "c", "image": "none"}]}


def namespace_object(name: str, **metadata: Any) -> Json:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, **metadata}}


@pytest.fixture(scope="module")
def api(control_cluster: Cluster) -> Iterator[ApiServer]:
    """The API server with our policies at work."""
    missing = install_definitions(control_cluster)
    files = sorted(POLICIES.glob("*.yaml"))
    control_cluster.apply(BINDING, *files)
    server = ApiServer(control_cluster)
    plain = Writers(server, "default")
    for refused in (
        namespace_object("probe", labels={TENANT: "x"}),
        plain.pod(labels={SESSION: "x"}),
        plain.job({SESSION: "x"}),
        plain.session(labels={TENANT: "x"}),
    ):
        eventually("the policy is at work", partial(is_refused, server, refused))
    yield server
    for file in files:
        control_cluster.kubectl("delete", "-f", str(file))
    control_cluster.delete("clusterrolebinding", WRITERS)
    for name in missing:
        control_cluster.delete("crd", name, wait=True)


def is_refused(api: ApiServer, thing: Json) -> bool:
    return api.call("POST", f"{collection(thing)}?dryRun=All", thing).code in (403, 422)


@pytest.fixture
def writers(control_cluster: Cluster, namespace: str, api: ApiServer) -> Writers:
    """In a namespace of tenant acme."""
    made = Writers(api, namespace)
    assert made.patch(OPERATOR, namespace_object(namespace), labels={TENANT: "acme"}).code == 200
    return made


def only(reply: Reply) -> str:
    """The words of the one refusal."""
    assert reply.code in (403, 422), reply.body
    return str(reply.body["message"]).partition("denied request: ")[2]


@pytest.mark.parametrize("place", ["labels", "annotations"])
@pytest.mark.parametrize("key", [TENANT, "gristmill.dev/tenant-uid"])
def test_g34_only_the_operator_says_whose_a_namespace_is(
    writers: Writers, place: str, key: str
) -> None:
    system = namespace_object("kube-system")
    refused = writers.patch("ann", system, **{place: {key: "acme"}})
    assert only(refused) == (
        f"{key} of namespace kube-system {BY}: create a Tenant with spec.namespace kube-system"
    )
    new = namespace_object(f"{writers.namespace}-b", **{place: {key: "acme"}})
    assert only(writers.create("ann", new)).startswith(f"{key} of namespace {writers.namespace}-b")


@pytest.mark.parametrize("change", ["other", None])
def test_whose_a_namespace_is_stays_when_others_write(writers: Writers, change: str | None) -> None:
    mine = namespace_object(writers.namespace)
    refused = writers.patch("ann", mine, labels={TENANT: change})
    assert only(refused).startswith(f"{TENANT} of namespace {writers.namespace} {BY}")
    assert writers.patch("ann", mine, labels={"team": "a"}).code == 200
    assert writers.patch(OPERATOR, mine, labels={TENANT: "other"}).code == 200


def test_only_the_operator_makes_pods_with_our_labels(writers: Writers) -> None:
    refused = writers.create("ann", writers.pod(labels={SESSION: "run"}))
    assert only(refused) == (
        f"label {SESSION} of pods {BY}: apply a TrainingSession, or use another label"
    )
    assert writers.create(OPERATOR, writers.pod(labels={SESSION: "run"})).code == 201
    assert writers.create("ann", writers.pod(labels={"app": "run"})).code == 201


def test_a_pod_neither_gets_nor_loses_our_labels_later(writers: Writers) -> None:
    plain = writers.pod()
    assert writers.create("ann", plain).code == 201
    assert only(writers.patch("ann", plain, labels={SESSION: "run"})).startswith(f"label {SESSION}")
    ours = writers.pod(labels={SESSION: "run"})
    assert writers.create(OPERATOR, ours).code == 201
    assert only(writers.patch("ann", ours, labels={SESSION: None})).startswith(f"label {SESSION}")
    assert writers.patch("ann", ours, labels={"team": "a"}).code == 200


def test_only_the_operator_makes_jobs_whose_pods_have_our_labels(writers: Writers) -> None:
    refused = writers.create("ann", writers.job({SESSION: "run"}))
    assert only(refused) == (
        f"label {SESSION} of a Job's pods {BY}: apply a TrainingSession, or use another label"
    )
    assert writers.create("ann", writers.job({"app": "x"})).code == 201


def test_the_pods_of_the_operators_jobs_are_made(
    control_cluster: Cluster, writers: Writers
) -> None:
    assert writers.create(OPERATOR, writers.job({SESSION: "run"})).code == 201
    eventually(
        "the Job controller made the pod",
        lambda: control_cluster.objects("pods", writers.namespace, f"{SESSION}=run"),
    )


def test_the_job_controller_is_no_way_around(writers: Writers) -> None:
    """A Deployment's pods come from the same kind of account; only a Job's are let through."""
    refused = writers.create(JOB_CONTROLLER, writers.pod(labels={SESSION: "run"}))
    assert only(refused).startswith(f"label {SESSION} of pods is written by {OPERATOR} alone")


def test_a_session_id_is_set_at_creation_and_never_changes(writers: Writers) -> None:
    restored = writers.session(annotations={SESSION_ID: "old-id"})
    assert writers.create("ann", restored).code == 201
    for who in ("ann", OPERATOR):
        for change, shown in (("new-id", "new-id"), (None, "")):
            refused = writers.patch(who, restored, annotations={SESSION_ID: change})
            assert only(refused) == (
                f"annotation {SESSION_ID} is 'old-id' for good, as usage is kept under it, and cannot become "
                f"'{shown}': keep it"
            )
    assert writers.patch("ann", restored, annotations={"note": "x"}).code == 200


def test_only_the_operator_mints_a_session_id_later(writers: Writers) -> None:
    plain = writers.session()
    assert writers.create("ann", plain).code == 201
    assert only(writers.patch("ann", plain, annotations={SESSION_ID: "mine"})) == (
        f"annotation {SESSION_ID} is set when the session is created, as a restore does, or by {OPERATOR}, not later "
        "by ann: leave it out"
    )
    assert writers.patch(OPERATOR, plain, annotations={SESSION_ID: "minted"}).code == 200


def test_nobody_makes_another_tenant_pay(writers: Writers, control_cluster: Cluster) -> None:
    for who in ("ann", GATEWAY):
        refused = writers.create(who, writers.session(labels={TENANT: "rich"}))
        assert only(refused) == (
            f"label {TENANT} is 'rich', but namespace {writers.namespace} is of tenant 'acme': leave the label out, "
            "the operator sets it"
        )
    own = writers.session(labels={TENANT: "acme"})
    assert writers.create("ann", own).code == 201
    for change in ("rich", None):
        assert only(writers.patch("ann", own, labels={TENANT: change})).startswith(
            f"label {TENANT}"
        )
    foreign = Writers(writers.api, "default").session(labels={TENANT: "acme"})
    assert only(writers.create("ann", foreign)).startswith(
        f"label {TENANT} is 'acme', but namespace default is no tenant's"
    )


@pytest.mark.parametrize("key", ["gristmill.dev/created-by", "gristmill.dev/sagemaker-request"])
def test_how_a_session_was_created_stays(writers: Writers, key: str) -> None:
    made = writers.session(annotations={key: "sagemaker"})
    assert writers.create("ann", made).code == 201
    assert only(writers.patch("ann", made, annotations={key: "other"})) == (
        f"annotation {key} says how the session was created and is not changed by ann: keep it"
    )
    assert writers.patch(GATEWAY, made, annotations={key: "other"}).code == 200


@pytest.mark.parametrize("key", ["gristmill.dev/stop-requested", "gristmill.dev/restart"])
def test_anybody_with_the_right_asks_for_a_stop_or_restart(writers: Writers, key: str) -> None:
    made = writers.session()
    assert writers.create("ann", made).code == 201
    assert writers.patch("ann", made, annotations={key: "now"}).code == 200


def test_a_session_goes_only_when_the_operator_has_its_usage(writers: Writers) -> None:
    held = writers.session(finalizers=[FLUSH])
    assert writers.create(OPERATOR, held).code == 201
    assert only(writers.patch("ann", held, finalizers=[])) == (
        f"finalizer {FLUSH} keeps the session until the ledger has its usage; it is removed by {OPERATOR}, or by a "
        "member of system:masters where that is gone, not by ann: wait for the operator"
    )
    assert writers.patch("ann", held, finalizers=[FLUSH, "example.com/mine"]).code == 200
    assert writers.patch(OPERATOR, held, finalizers=[]).code == 200
    again = writers.session(finalizers=[FLUSH])
    assert writers.create(OPERATOR, again).code == 201
    assert writers.api.merge(again, {"metadata": {"finalizers": []}}).code == 200


def test_the_operator_binds_roles_in_namespaces_of_tenants_alone(writers: Writers) -> None:
    """Taken over, it is no way to the Secrets of everybody else."""

    def binding(namespace: str) -> Json:
        return {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "reach", "namespace": namespace},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view",
            },
            "subjects": [],
        }  # fmt: skip

    def refusal() -> Reply | None:
        reply = writers.create(OPERATOR, binding("kube-system"))
        if reply.code in (403, 422):
            return reply
        writers.api.call("DELETE", f"{collection(binding('kube-system'))}/reach")
        return None

    refused: Reply = eventually("the policy is at work", refusal)
    assert only(refused) == (
        "the Gristmill operator binds roles in namespaces of its tenants alone, and kube-system has no "
        "label gristmill.dev/tenant: create a Tenant with spec.namespace kube-system"
    )
    assert writers.create("ann", binding("kube-system")).code == 201
    writers.api.call("DELETE", f"{collection(binding('kube-system'))}/reach")
    assert writers.create(OPERATOR, binding(writers.namespace)).code == 201
