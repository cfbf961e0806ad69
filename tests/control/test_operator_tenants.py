"""Tenants on a real API server, with the rights of the shipped ServiceAccount."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.errors import UnavailableError
from gristmill_contracts.secrets import access_key_id, access_key_secret
from gristmill_contracts.units import now_us
from gristmill_operator.children.namespace import HAND_OVER
from gristmill_sessions.observed import Adopt, Release
from gristmill_testing.cluster import WRITES, Cluster, eventually
from gristmill_testing.cluster_objects import CLUSTER_KEY
from gristmill_testing.operator_bench import Bench, operator_bench
from gristmill_testing.operator_world import ACCOUNT, install_chart, session, tenant

COUNTED_S = 120
"""The cluster looks for new kinds every 30 s, and the operator asks it to count as often."""


@pytest.fixture(scope="module")
def chart(control_cluster: Cluster) -> Cluster:
    install_chart(control_cluster)
    return control_cluster


@pytest.fixture
async def bench(chart: Cluster) -> AsyncIterator[Bench]:
    async with operator_bench(chart) as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest, chart: Cluster) -> Iterator[str]:
    """A tenant's name of this test's own; the tenant and its namespace go with it."""
    made = f"t{abs(hash(request.node.name)) % 10**8}"
    yield made
    chart.try_kubectl("delete", "tenant", made, "--ignore-not-found", "--wait=false")
    chart.try_kubectl("delete", "namespace", f"gm-{made}", "--ignore-not-found", "--wait=false")


def condition(cluster: Cluster, name: str, type_: str) -> dict[str, Any]:
    found = cluster.get("tenant", name).get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == type_), {})


async def settle(bench: Bench, name: str) -> None:
    """Until a tenant is Ready: the right to write in a new namespace takes a moment to be known.

    And on a young cluster it takes up to half a minute until sessions can be counted.
    """
    deadline = time.monotonic() + COUNTED_S
    while time.monotonic() < deadline:
        bench.now_us = now_us()
        again_s = await bench.tenant(name)
        if condition(bench.cluster, name, "Ready").get("status") == "True":
            return
        await asyncio.sleep(min(1.0, again_s or 0.1))
    raise AssertionError(bench.cluster.get("tenant", name).get("status"))


async def test_a_tenant_is_ready_once_its_quota_counts_and_then_it_counts(
    bench: Bench, name: str
) -> None:
    """First here: where the definitions are seconds old, the cluster must be asked to count anew."""
    cluster, namespace = bench.cluster, f"gm-{name}"
    cluster.apply(tenant(name, quota={"maxSessions": 1}))
    await settle(bench, name)
    cluster.apply(session("first", namespace))
    refused = cluster.try_apply(session("second", namespace))
    assert "exceeded quota: gristmill" in refused.err
    assert "count/trainingsessions.gristmill.dev=1" in refused.err
    quota = cluster.get("resourcequota", "gristmill", namespace)
    assert quota["spec"]["hard"] == {"count/trainingsessions.gristmill.dev": "1"}


async def test_a_tenant_whose_quota_nobody_counts_is_not_ready_and_says_why(
    bench: Bench, name: str
) -> None:
    cluster = bench.cluster
    cluster.freeze("kube-controller-manager")
    try:
        cluster.apply(tenant(name, quota={"pods": 9}))
        for _ in range(10):
            again_s = await bench.tenant(name)
            await asyncio.sleep(0.2)
        assert again_s is not None
        for type_ in ("QuotaReady", "Ready"):
            found = condition(cluster, name, type_)
            assert (found["status"], found["reason"]) == ("False", "NotCounted")
            assert "the cluster does not count pods yet" in found["message"]
            assert "kube-controller-manager" in found["message"]
    finally:
        cluster.thaw("kube-controller-manager")
    await settle(bench, name)


async def test_a_tenant_gets_a_namespace_that_lets_nothing_through(bench: Bench, name: str) -> None:
    cluster = bench.cluster
    cluster.apply(
        tenant(
            name,
            quota={
                "maxSessions": 5,
                "cpu": "0.5",
                "memory": "1024Mi",
                "devices": {"nvidia.com/gpu": "8"},
            },
            subjects=[
                {"kind": "User", "name": "ann", "role": "edit"},
                {"kind": "Group", "name": "auditors", "role": "view"},
            ],
            network={"egressCIDRs": ["0.0.0.0/0", "10.96.0.0/24"]},
            keys=[{"name": "ci"}, {"name": "old", "revoked": True}],
        )
    )
    await settle(bench, name)
    namespace = f"gm-{name}"
    meta = cluster.get("namespace", namespace)["metadata"]
    assert meta["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert meta["labels"]["pod-security.kubernetes.io/enforce-version"] == "v1.32"
    uid = cluster.get("tenant", name)["metadata"]["uid"]
    assert (meta["annotations"][labels.TENANT], meta["annotations"][labels.TENANT_UID]) == (
        name,
        uid,
    )
    policies = {each["metadata"]["name"] for each in cluster.objects("networkpolicies", namespace)}
    assert policies == {
        "default-deny",
        "dns",
        "meter-out",
        "fetch-out",
        "gateway-in",
        "egress-extra",
    }
    hard = cluster.get("resourcequota", "gristmill", namespace)["spec"]["hard"]
    assert hard["requests.nvidia.com/gpu"] == "8"
    assert hard["count/trainingsessions.gristmill.dev"] == "5"
    key = cluster.get("secret", "gristmill-key-ci", namespace)["data"]
    identifier = access_key_id(uid, "ci")
    assert base64.b64decode(key["accessKeyId"]).decode() == identifier
    secret = base64.b64decode(key["secretAccessKey"]).decode()
    assert secret == access_key_secret(CLUSTER_KEY, identifier)
    assert cluster.find("secret", "gristmill-key-old", namespace) is None
    status = cluster.get("tenant", name)["status"]
    assert (status["namespace"], status["accountId"]) == (namespace, "100000000001")
    assert {each["type"]: each["status"] for each in status["conditions"]} == {
        "NamespaceReady": "True", "NetworkReady": "True", "QuotaReady": "True",
        "BudgetAvailable": "True", "Ready": "True",
    }  # fmt: skip
    assert "10.96.0.0/24" in condition(cluster, name, "NetworkReady")["message"]


async def test_a_range_around_everything_leads_not_to_the_cluster_itself(
    bench: Bench, name: str
) -> None:
    """Whatever the chart was told: nodes, their pods and the API server are known from the cluster."""
    cluster, namespace, joined = bench.cluster, f"gm-{name}", f"node-{name}"
    cluster.apply(tenant(name, network={"egressCIDRs": ["0.0.0.0/0"]}))
    await settle(bench, name)
    service = cluster.get("service", "kubernetes", "default")["spec"]["clusterIP"]
    slice_ = cluster.get("endpointslice", "kubernetes", "default")
    [address] = slice_["endpoints"][0]["addresses"]

    def holes(policy: str) -> set[str]:
        [rule] = cluster.get("networkpolicy", policy, namespace)["spec"]["egress"]
        [peer] = rule["to"]
        assert peer["ipBlock"]["cidr"] == "0.0.0.0/0"
        return set(peer["ipBlock"]["except"])

    for policy in ("egress-extra", "fetch-out"):
        assert {f"{service}/32", f"{address}/32", "169.254.0.0/16"} <= holes(policy)
    cluster.apply(
        {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": joined},
            "spec": {"podCIDR": "10.77.3.0/24", "podCIDRs": ["10.77.3.0/24"]},
        }
    )  # fmt: skip
    try:
        there = {"addresses": [{"type": "InternalIP", "address": "192.0.2.77"}]}
        cluster.kubectl(
            "patch", "node", joined, "--subresource=status", "--type=merge",
            f"--patch={json.dumps({'status': there})}",
        )  # fmt: skip
        await bench.tenant(name)
        for policy in ("egress-extra", "fetch-out"):
            assert {"192.0.2.77/32", "10.77.3.0/24"} <= holes(policy)
    finally:
        cluster.delete("node", joined)
    await bench.tenant(name)
    assert "192.0.2.77/32" not in holes("egress-extra")


async def test_people_get_their_roles_and_pods_get_none(bench: Bench, name: str) -> None:
    cluster, namespace = bench.cluster, f"gm-{name}"
    cluster.apply(tenant(name, subjects=[{"kind": "User", "name": "ann", "role": "view"}]))
    await settle(bench, name)

    def may(verb: str, who: str) -> bool:
        answer = cluster.try_kubectl(
            "auth",
            "can-i",
            verb,
            "trainingsessions.gristmill.dev",
            f"--namespace={namespace}",
            f"--as={who}",
        )
        return answer.out.strip() == "yes"

    client = f"system:serviceaccount:{namespace}:gm-client"
    eventually("the client account may create", lambda: may("create", client))
    assert may("get", "ann")
    assert not may("create", "ann")
    assert not may("get", f"system:serviceaccount:{namespace}:gm-worker")


async def test_looking_again_writes_nothing(bench: Bench, name: str) -> None:
    """G22: no pass over a tenant that is as it should be leads to another."""
    cluster = bench.cluster
    cluster.apply(
        tenant(
            name,
            quota={"cpu": "1000m", "memory": "4096Mi", "storage": "0.5Ti"},
            network={"egressCIDRs": ["203.0.113.0/24"]},
            subjects=[{"kind": "ServiceAccount", "name": "bot", "namespace": "ci"}],
            keys=[{"name": "ci"}],
        )
    )
    await settle(bench, name)
    await bench.tenant(name)
    mark = cluster.audit_mark()
    for _ in range(3):
        assert await bench.tenant(name) is None
    assert [each["requestURI"] for each in cluster.audit(mark, user=ACCOUNT, verbs=WRITES)] == []


async def test_what_a_tenant_no_longer_asks_for_goes(bench: Bench, name: str) -> None:
    cluster, namespace = bench.cluster, f"gm-{name}"
    cluster.apply(
        tenant(
            name,
            quota={"maxSessions": 5, "pods": 9},
            network={"egressCIDRs": ["203.0.113.0/24"]},
            subjects=[{"kind": "User", "name": "ann", "role": "view"}],
            keys=[{"name": "ci"}],
        )
    )
    await settle(bench, name)
    cluster.kubectl("create", "configmap", "theirs", f"--namespace={namespace}")
    cluster.apply(
        tenant(
            name,
            quota={"pods": 9},
            network={"gatewayIngress": False},
            keys=[{"name": "ci", "revoked": True}],
        )
    )
    await bench.tenant(name)
    policies = {each["metadata"]["name"] for each in cluster.objects("networkpolicies", namespace)}
    assert policies == {"default-deny", "dns", "meter-out", "fetch-out"}
    assert cluster.get("resourcequota", "gristmill", namespace)["spec"]["hard"] == {"pods": "9"}
    assert cluster.find("rolebinding", "gristmill-viewers", namespace) is None
    assert cluster.find("secret", "gristmill-key-ci", namespace) is None
    assert cluster.find("configmap", "theirs", namespace) is not None


async def test_what_somebody_changed_is_put_right(bench: Bench, name: str) -> None:
    cluster, namespace = bench.cluster, f"gm-{name}"
    cluster.apply(tenant(name))
    await settle(bench, name)
    cluster.kubectl(
        "patch", "networkpolicy", "default-deny", f"--namespace={namespace}", "--type=json",
        '--patch=[{"op":"replace","path":"/spec/policyTypes","value":["Ingress"]}]',
    )  # fmt: skip
    cluster.kubectl("delete", "networkpolicy", "meter-out", f"--namespace={namespace}")
    await bench.tenant(name)
    spec = cluster.get("networkpolicy", "default-deny", namespace)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert cluster.find("networkpolicy", "meter-out", namespace) is not None


async def test_a_foreign_namespace_is_not_touched(bench: Bench, name: str) -> None:
    cluster, namespace = bench.cluster, f"gm-{name}"
    cluster.kubectl("create", "namespace", namespace)
    before = cluster.get("namespace", namespace)["metadata"]["resourceVersion"]
    cluster.apply(tenant(name))
    mark = cluster.audit_mark()
    again_s = await bench.tenant(name)
    assert again_s is not None
    assert again_s >= 30
    ready = condition(cluster, name, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NamespaceForeign")
    assert f"kubectl annotate namespace {namespace}" in ready["message"]
    assert "NamespaceForeign" in bench.recorder.reasons
    assert cluster.get("namespace", namespace)["metadata"]["resourceVersion"] == before
    writes = [each["requestURI"] for each in cluster.audit(mark, user=ACCOUNT, verbs=WRITES)]
    assert all("/tenants/" in uri for uri in writes)
    assert cluster.objects("networkpolicies", namespace) == []


async def test_an_administrator_hands_a_namespace_over(bench: Bench, name: str) -> None:
    cluster, namespace = bench.cluster, f"gm-{name}"
    cluster.kubectl("create", "namespace", namespace)
    cluster.apply(tenant(name))
    await bench.tenant(name)
    cluster.kubectl("annotate", "namespace", namespace, f"{HAND_OVER}={name}")
    await settle(bench, name)
    assert cluster.find("networkpolicy", "default-deny", namespace) is not None


async def test_the_second_tenant_of_one_namespace_gets_nothing(bench: Bench, name: str) -> None:
    cluster, other = bench.cluster, f"{name}-b"
    cluster.apply(tenant(name))
    await settle(bench, name)
    cluster.apply(tenant(other, namespace=f"gm-{name}"))
    try:
        await bench.tenant(other)
        ready = condition(cluster, other, "Ready")
        assert ready["reason"] == "NamespaceForeign"
        assert f"belongs to tenant '{name}'" in ready["message"]
        await bench.tenant(name)
        assert condition(cluster, name, "Ready")["status"] == "True"
    finally:
        cluster.kubectl("delete", "tenant", other)


async def test_a_tenant_that_is_made_again_finds_its_namespace_with_all_in_it(
    bench: Bench, name: str
) -> None:
    """G14: definitions deleted and made again, the same tenant with a new uid, and nothing is lost."""
    cluster, namespace = bench.cluster, f"gm-{name}"
    cluster.apply(tenant(name))
    await settle(bench, name)
    uid = cluster.get("namespace", namespace)["metadata"]["uid"]
    cluster.kubectl("create", "configmap", "theirs", f"--namespace={namespace}")
    cluster.kubectl("delete", "tenant", name)
    await bench.tenant(name)
    assert cluster.get("namespace", namespace)["metadata"].get("deletionTimestamp") is None
    cluster.apply(tenant(name))
    await settle(bench, name)
    after = cluster.get("namespace", namespace)["metadata"]
    assert after["uid"] == uid
    assert after["annotations"][labels.TENANT_UID] == cluster.get("tenant", name)["metadata"]["uid"]
    assert "NamespaceAdopted" in bench.recorder.reasons
    assert cluster.find("configmap", "theirs", namespace) is not None


async def test_a_namespace_deleted_by_hand_is_told_and_waited_for(bench: Bench, name: str) -> None:
    """G32: no hot loop on what cannot be done now."""
    cluster, namespace = bench.cluster, f"gm-{name}"
    cluster.apply(tenant(name))
    await settle(bench, name)
    cluster.apply(
        {
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "held", "namespace": namespace, "finalizers": ["test.example/held"]},
        }
    )  # fmt: skip
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    again_s = await bench.tenant(name)
    assert again_s is not None
    assert again_s >= 5
    assert condition(cluster, name, "Ready")["reason"] == "NamespaceTerminating"
    mark = cluster.audit_mark()
    await bench.tenant(name)
    assert list(cluster.audit(mark, user=ACCOUNT, verbs=WRITES)) == []
    cluster.kubectl(
        "patch", "configmap", "held", f"--namespace={namespace}", "--type=merge",
        '--patch={"metadata":{"finalizers":null}}',
    )  # fmt: skip
    cluster.wait_gone("namespace", namespace)
    await settle(bench, name)


async def test_a_tenant_waits_for_its_account_while_the_ledger_is_away(
    bench: Bench, name: str
) -> None:
    cluster = bench.cluster
    cluster.apply(tenant(name))
    bench.ledger.refusal = UnavailableError("the ledger did not answer")
    for _ in range(10):
        assert await bench.tenant(name) is not None
    ready = condition(cluster, name, "Ready")
    assert (ready["reason"], ready["message"]) == ("LedgerUnavailable", "the ledger did not answer")
    bench.ledger.refusal = None
    await settle(bench, name)
    assert cluster.get("tenant", name)["status"]["accountId"] == "100000000001"


@pytest.mark.parametrize("namespace", ["kube-system", "default", "gristmill-system"])
async def test_the_clusters_own_namespaces_are_never_a_tenants(
    bench: Bench, name: str, namespace: str
) -> None:
    """Whoever gets past the definition's own rule is stopped here."""
    cluster = bench.cluster
    answer = cluster.try_apply(tenant(name, namespace=namespace))
    if answer.code == 0:
        await bench.tenant(name)
        assert condition(cluster, name, "Ready")["reason"] == "NamespaceForeign"
    found = cluster.get("namespace", namespace)["metadata"]
    assert labels.TENANT not in found.get("annotations", {})


async def test_only_a_tenant_that_says_so_takes_its_namespace_along(
    chart: Cluster, name: str
) -> None:
    """Its sessions go first, so that they can hand in their usage; what holds usage keeps the namespace."""
    install_chart(chart, "--set=rbac.namespaceDeletion=true")
    namespace = f"gm-{name}"
    try:
        async with operator_bench(chart, namespace_deletion=True) as bench:
            chart.apply(tenant(name, deletionPolicy="Delete"))
            await settle(bench, name)
            assert chart.get("tenant", name)["metadata"]["finalizers"] == [labels.TENANT_FINALIZER]
            chart.apply(session("last", namespace), unflushed_volume(namespace))
            await bench.look()
            await bench.hands.do(await bench.session(namespace, "last"), Adopt())
            chart.kubectl("delete", "tenant", name, "--wait=false")
            await bench.tenant(name)
            leaving = await bench.session(namespace, "last")
            assert leaving.metadata.deletion_time_us is not None
            await bench.hands.do(leaving, Release())
            await bench.tenant(name)
            assert "VolumesUnflushed" in bench.recorder.reasons
            assert "deletionTimestamp" not in chart.get("namespace", namespace)["metadata"]
            chart.kubectl("delete", "pvc", "holding-state", f"--namespace={namespace}")
            await bench.tenant(name)
            chart.wait_gone("namespace", namespace)
            await bench.tenant(name)
            chart.wait_gone("tenant", name)
    finally:
        install_chart(chart)


def unflushed_volume(namespace: str) -> dict[str, Any]:
    known = {labels.MANAGED_BY: labels.MANAGER, labels.SESSION: "holding", labels.UNFLUSHED: "true"}
    return {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "holding-state", "namespace": namespace, "labels": known},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip


async def test_a_tenant_that_keeps_its_namespace_has_no_finalizer(bench: Bench, name: str) -> None:
    """Also one that would delete it, where the operator was not given that right."""
    bench.cluster.apply(tenant(name, deletionPolicy="Delete"))
    await settle(bench, name)
    assert "finalizers" not in bench.cluster.get("tenant", name)["metadata"]
    bench.cluster.kubectl("delete", "tenant", name)
    await bench.tenant(name)
    found = bench.cluster.get("namespace", f"gm-{name}")["metadata"]
    assert "deletionTimestamp" not in found
