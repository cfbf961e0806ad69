"""The control level of the test cluster does what tests rely on."""

import json

import pytest
from kubernetes import client, config

from gristmill_testing.cluster import WRITES, Cluster, KubectlError, condition, eventually

WIDGETS = """\
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.test.gristmill.dev}
spec:
  group: test.gristmill.dev
  names: {kind: Widget, plural: widgets, singular: widget}
  scope: Namespaced
  versions:
    - name: v1alpha1
      served: true
      storage: true
      subresources: {status: {}}
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              properties: {rank: {type: integer, default: 8}, model: {type: string}}
              x-kubernetes-validations:
                - {rule: "self.rank in [1, 2, 4, 8]", message: "rank must be 1, 2, 4 or 8"}
                - {rule: "!has(oldSelf.model) || self.model == oldSelf.model", message: "model is immutable"}
"""
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "p"},
    "spec": {"containers": [{"name": "c", "image": "none"}]},
}


def widget(namespace: str, **spec: object) -> dict[str, object]:
    meta = {"name": "w", "namespace": namespace}
    return {
        "apiVersion": "test.gristmill.dev/v1alpha1",
        "kind": "Widget",
        "metadata": meta,
        "spec": spec,
    }


def config_map(name: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "1"}}


@pytest.fixture(scope="module")
def widgets(control_cluster: Cluster) -> None:
    control_cluster.apply(WIDGETS)
    control_cluster.wait_condition("crd", "widgets.test.gristmill.dev", "Established")


@pytest.fixture
def fake_nodes(control_cluster: Cluster) -> None:
    control_cluster.start_fake_nodes(2)


def test_a_rule_of_a_custom_resource_refuses_with_its_message(
    control_cluster: Cluster, namespace: str, widgets: None
) -> None:
    answer = control_cluster.try_apply(widget(namespace, rank=3))
    assert answer.code != 0
    assert "rank must be 1, 2, 4 or 8" in answer.err
    control_cluster.apply(widget(namespace, model="a"))
    assert control_cluster.get("widget", "w", namespace)["spec"]["rank"] == 8
    assert "model is immutable" in control_cluster.try_apply(widget(namespace, model="b")).err


def test_the_test_process_reaches_the_api_with_a_plain_client(
    control_cluster: Cluster, namespace: str
) -> None:
    config.load_kube_config(str(control_cluster.kubeconfig))
    names = [item.metadata.name for item in client.CoreV1Api().list_namespace().items]
    assert namespace in names


def test_pods_on_fake_nodes_run_and_go(
    control_cluster: Cluster, namespace: str, fake_nodes: None
) -> None:
    control_cluster.apply(POD, namespace=namespace)
    pod = control_cluster.wait_condition("pod", "p", "Ready", namespace)
    assert pod["status"]["phase"] == "Running"
    assert pod["status"]["podIP"].startswith("10.99.")
    control_cluster.delete("pod", "p", namespace)
    control_cluster.wait_gone("pod", "p", namespace)


def test_a_silent_node_keeps_its_pods(
    control_cluster: Cluster, namespace: str, fake_nodes: None
) -> None:
    control_cluster.apply(POD, namespace=namespace)
    node = control_cluster.wait_condition("pod", "p", "Ready", namespace)["spec"]["nodeName"]
    control_cluster.kubectl("annotate", "node", node, "gristmill.dev/fake-node-silent=true")
    control_cluster.delete("pod", "p", namespace)
    with pytest.raises(AssertionError):
        control_cluster.wait_gone("pod", "p", namespace, seconds=2)
    control_cluster.kubectl("annotate", "node", node, "gristmill.dev/fake-node-silent-")
    control_cluster.wait_gone("pod", "p", namespace)


def test_the_audit_log_tells_who_wrote_what(control_cluster: Cluster, namespace: str) -> None:
    mark = control_cluster.audit_mark()
    account = f"system:serviceaccount:{namespace}:writer"
    control_cluster.kubectl("create", "serviceaccount", "writer", f"-n{namespace}")
    control_cluster.kubectl(
        "create",
        "rolebinding",
        "writer",
        "--clusterrole=edit",
        f"--serviceaccount={namespace}:writer",
        f"-n{namespace}",
    )
    token = control_cluster.kubectl("create", "token", "writer", f"-n{namespace}").strip()
    as_writer = (f"-n{namespace}", f"--token={token}", "--server=https://127.0.0.1:6443", "--kubeconfig=/dev/null",
                 f"--certificate-authority={control_cluster.folder}/pki/ca.crt")  # fmt: skip
    control_cluster.kubectl("create", "configmap", "mine", *as_writer)

    def writes() -> list[str]:
        events = control_cluster.audit(mark, user=account, verbs=WRITES)
        return [f"{event['verb']} {event['objectRef']['resource']}" for event in events]

    assert eventually("the write is in the log", writes) == ["create configmaps"]


@pytest.mark.parametrize(
    "component", ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"]
)
def test_a_killed_component_comes_back(
    control_cluster: Cluster, namespace: str, fake_nodes: None, component: str
) -> None:
    control_cluster.apply(config_map("before"), namespace=namespace)
    control_cluster.kill(component)
    control_cluster.wait_api()
    assert control_cluster.get("configmap", "before", namespace)["data"] == {"a": "1"}
    control_cluster.apply(POD, namespace=namespace)
    control_cluster.wait_condition("pod", "p", "Ready", namespace)


def test_a_frozen_api_server_hangs_and_goes_on(control_cluster: Cluster) -> None:
    control_cluster.freeze("kube-apiserver")
    try:
        with pytest.raises(KubectlError, match="took more than"):
            control_cluster.kubectl("get", "namespaces", timeout=1.5)
    finally:
        control_cluster.thaw("kube-apiserver")
    control_cluster.wait_api()


def test_helm_installs_a_chart(
    control_cluster: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chart = tmp_path_factory.mktemp("chart")
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: small\nversion: 0.1.0\n")
    (chart / "templates").mkdir()
    template = {**config_map("chosen"), "data": {"kube": "{{ .Capabilities.KubeVersion.Version }}"}}
    (chart / "templates/map.yaml").write_text(json.dumps(template))
    control_cluster.helm("install", "small", str(chart), f"--namespace={namespace}", "--wait")
    assert control_cluster.get("configmap", "chosen", namespace)["data"] == {"kube": "v1.37.2"}
    control_cluster.helm("uninstall", "small", f"--namespace={namespace}", "--wait")
    assert control_cluster.find("configmap", "chosen", namespace) is None


def test_fake_nodes_are_ready(control_cluster: Cluster, fake_nodes: None) -> None:
    nodes = control_cluster.objects("nodes")
    assert len(nodes) >= 2
    assert all(condition(node, "Ready") == "True" for node in nodes)
    assert nodes[0]["status"]["allocatable"]["nvidia.com/gpu"] == "8"
