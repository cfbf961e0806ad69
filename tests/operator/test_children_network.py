"""Network policies, quotas, bindings and names of a tenant, as values."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts import labels
from gristmill_contracts.resources import Metadata
from gristmill_operator.children.access import operator_binding, people_bindings
from gristmill_operator.children.keys import client_keys
from gristmill_operator.children.manifest import asked
from gristmill_operator.children.namespace import HAND_OVER, claim_namespace, namespace_name
from gristmill_operator.children.network import egress_to, refused_cidrs, tenant_policies
from gristmill_operator.children.options import NetworkOptions
from gristmill_operator.children.pods import worker_pod
from gristmill_operator.children.quota import limit_range, resource_quota
from gristmill_operator.children.session_policy import (
    missing_profiles,
    session_egress,
    session_mesh,
)
from gristmill_operator.children.weights import WeightsMount, weights_mount
from gristmill_operator.drift import differs, quantity
from gristmill_operator.settings import OperatorSettings
from gristmill_operator.tenant_children import purge
from gristmill_testing.cluster_objects import (
    CLUSTER_KEY,
    a_seating,
    a_session,
    a_tenant,
    options,
)


def policies(tenant: Any = None, **settings: Any) -> dict[str, dict[str, Any]]:
    made = tenant_policies(tenant or a_tenant(), options(**settings))
    return {each["metadata"]["name"]: each["spec"] for each in made}


def test_everything_is_closed_before_anything_is_opened() -> None:
    closed = policies()["default-deny"]
    assert closed == {
        "podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": [],
    }  # fmt: skip


def test_dns_is_reached_over_both_protocols_on_the_ports_of_its_pods() -> None:
    """G52."""
    rule = policies(dns_cidrs=("169.254.20.10/32",))["dns"]["egress"][0]
    ports = {(each["protocol"], each["port"]) for each in rule["ports"]}
    assert ports == {("UDP", 53), ("TCP", 53), ("UDP", 1053), ("TCP", 1053)}
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"]
    assert rule["to"][0]["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}


def selects(selector: dict[str, Any], known: dict[str, str]) -> bool:
    """As the API server reads a selector."""
    exact = all(known.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    within = all(
        known.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )
    return exact and within


@pytest.mark.parametrize(("rank", "reaches"), [(0, True), (1, False)])
def test_only_rank_0_reaches_the_ledger_and_is_reached_by_the_gateway(
    rank: int, reaches: bool
) -> None:
    seating = a_seating(a_session(workers=2))
    mount = weights_mount(seating.model, seating.options)
    assert isinstance(mount, WeightsMount)
    known = worker_pod(seating, rank, mount)["metadata"]["labels"]
    made = policies()
    assert selects(made["meter-out"]["podSelector"], known) is reaches
    assert selects(made["gateway-in"]["podSelector"], known) is reaches
    assert not selects(made["fetch-out"]["podSelector"], known)
    peer = made["meter-out"]["egress"][0]["to"][0]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "ledger"
    assert peer["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "gristmill-system"}
    }


def test_a_tenant_may_shut_the_gateway_out_and_metrics_may_be_let_in() -> None:
    assert "gateway-in" not in policies(a_tenant(network={"gatewayIngress": False}))
    assert "metrics-in" not in policies()
    assert "metrics-in" in policies(metrics_namespace="monitoring")


def test_no_policy_names_the_api_server_or_the_metadata_address() -> None:
    tenant = a_tenant(network={"egressCIDRs": ["0.0.0.0/0", "::/0", "169.254.169.254/32"]})
    settings = {"node_cidrs": ("172.30.0.0/24",), "hub_cidrs": ("0.0.0.0/0",)}
    for spec in policies(tenant, **settings).values():
        for rule in spec.get("egress", []):
            for peer in rule.get("to", []):
                block = peer.get("ipBlock")
                if block is None:
                    continue
                for address in ("169.254.169.254", "10.96.0.1", "172.30.0.2", "10.88.3.4"):
                    assert not reaches(block, address), (block, address)


def reaches(block: dict[str, Any], address: str) -> bool:
    at = ipaddress.ip_address(address)
    inside = at in ipaddress.ip_network(block["cidr"])
    return inside and not any(at in ipaddress.ip_network(hole) for hole in block.get("except", []))


@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 32)).map(
            lambda pair: str(ipaddress.ip_network(pair, strict=False))
        ),
        max_size=8,
    ),
    st.sampled_from(["169.254.169.254", "10.96.0.1", "10.88.255.255", "10.88.0.0"]),
)
def test_no_range_of_a_tenant_reaches_the_clusters_own(cidrs: list[str], address: str) -> None:
    given_options = NetworkOptions(pod_cidrs=("10.88.0.0/16",), service_cidrs=("10.96.0.0/16",))
    peers = egress_to(cidrs, given_options)
    assert not any(reaches(peer["ipBlock"], address) for peer in peers)
    for peer in peers:
        whole = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        for hole in peer["ipBlock"].get("except", []):
            # The API server refuses an exception that does not lie in its block.
            assert ipaddress.ip_network(hole).subnet_of(whole)  # type: ignore[arg-type]


def test_ranges_that_give_nothing_are_named() -> None:
    tenant = a_tenant(
        network={
            "egressCIDRs": ["203.0.113.0/24", "10.96.0.0/24", "999.0.0.0/8"],
            "egressProfiles": [{"name": "p", "cidrs": ["169.254.169.254/32"]}],
        }
    )
    named = refused_cidrs(tenant, options().network)
    assert named == ["10.96.0.0/24", "999.0.0.0/8", "169.254.169.254/32"]


def test_a_session_reaches_what_its_profiles_say_and_its_own_ranks() -> None:
    tenant = a_tenant(network={"egressProfiles": [{"name": "hub", "cidrs": ["203.0.113.0/24"]}]})
    asking, network = a_session(egress_profiles=["hub"]), options().network
    made = session_egress(asking, tenant, network)
    assert made is not None
    assert made["spec"]["egress"] == [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]
    assert session_egress(a_session(), tenant, network) is None
    assert missing_profiles(a_session(egress_profiles=["hub", "x"]), tenant) == ["x"]
    mesh = session_mesh(asking)["spec"]
    same = {"matchLabels": {labels.SESSION: "run"}}
    assert mesh["podSelector"] == same
    assert mesh["ingress"] == [{"from": [{"podSelector": same}]}]
    assert mesh["egress"] == [{"to": [{"podSelector": same}]}]


def test_a_quota_bounds_devices_by_their_requests_and_only_what_is_said() -> None:
    tenant = a_tenant(quota={"maxSessions": 3, "memory": "8Gi", "devices": {"amd.com/gpu": "4"}})
    made = resource_quota(tenant)
    assert made is not None
    assert made["spec"]["hard"] == {
        "count/trainingsessions.gristmill.dev": "3",
        "requests.memory": "8Gi",
        "limits.memory": "8Gi",
        "requests.amd.com/gpu": "4",
    }
    assert resource_quota(a_tenant()) is None
    assert limit_range(a_tenant())["spec"]["limits"][0]["type"] == "Container"


def test_the_operator_binds_one_role_for_itself() -> None:
    binding = operator_binding(a_tenant(), options())
    assert binding["roleRef"]["name"] == "gristmill-operator-tenant"
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "gristmill-operator", "namespace": "gristmill-system"}
    ]


def test_client_keys_may_edit_and_pods_are_bound_to_nothing() -> None:
    bindings = people_bindings(a_tenant(), options())
    bound = {
        (each["roleRef"]["name"], one["name"]) for each in bindings for one in each["subjects"]
    }
    assert bound == {("gristmill-editor", "gm-client")}


def test_revoked_keys_get_no_secret() -> None:
    tenant = a_tenant(keys=[{"name": "a"}, {"name": "b", "revoked": True}])
    assert [each["metadata"]["name"] for each in client_keys(tenant, CLUSTER_KEY)] == [
        "gristmill-key-a"
    ]


def namespace(name: str, **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, **meta}}


MARKS = {labels.TENANT: "acme", labels.TENANT_UID: "tenant-uid-1"}


@pytest.mark.parametrize(
    ("spec", "found", "verdict"),
    [
        pytest.param({}, None, "New", id="nobody's"),
        pytest.param({}, namespace("gm-acme", annotations=MARKS), "Ours", id="ours"),
        pytest.param(
            {}, namespace("gm-acme", annotations={**MARKS, labels.TENANT_UID: "older"}), "Adopt", id="of an earlier one"
        ),
        pytest.param({}, namespace("gm-acme"), "Foreign", id="somebody's"),
        pytest.param(
            {}, namespace("gm-acme", annotations={**MARKS, labels.TENANT: "other"}), "Foreign", id="another tenant's"
        ),
        pytest.param({}, namespace("gm-acme", annotations={HAND_OVER: "acme"}), "Adopt", id="handed over"),
        pytest.param({}, namespace("gm-acme", annotations={HAND_OVER: "other"}), "Foreign", id="handed to another"),
        pytest.param(
            {}, namespace("gm-acme", annotations={**MARKS, labels.TENANT: "other", HAND_OVER: "acme"}), "Foreign",
            id="another tenant's, handed over",
        ),
        pytest.param(
            {}, namespace("gm-acme", annotations=MARKS, deletionTimestamp="2026-01-01T00:00:00Z"), "Terminating",
            id="on its way out",
        ),
        pytest.param({"namespace": "kube-system"}, None, "Foreign", id="kube-system"),
        pytest.param({"namespace": "default"}, None, "Foreign", id="default"),
        pytest.param({"namespace": "gristmill-system"}, None, "Foreign", id="the operator's own"),
    ],
)  # fmt: skip
def test_whose_a_namespace_is(
    spec: dict[str, Any], found: dict[str, Any] | None, verdict: str
) -> None:
    assert claim_namespace(a_tenant(**spec), found, options()).verdict == verdict


def test_a_namespace_is_named_after_its_tenant_unless_it_is_said() -> None:
    assert namespace_name(a_tenant("x")) == "gm-x"
    assert namespace_name(a_tenant("x", namespace="y")) == "y"


# --- drift ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"), [("1", "1000m"), ("0.5", "500m"), ("1024Mi", "1Gi"), ("1k", "1000")]
)
def test_quantities_are_equal_however_they_are_written(one: str, other: str) -> None:
    assert quantity(one) == quantity(other) is not None
    wanted = asked({"metadata": {"name": "q"}, "spec": {"hard": {"requests.cpu": one}}})
    found = {**wanted, "spec": {"hard": {"requests.cpu": other}}, "status": {}}
    assert not differs(found, wanted)


def test_what_is_no_quantity_is_compared_as_it_is() -> None:
    wanted = asked({"metadata": {"name": "q", "labels": {"a": "1"}}})
    found = {"metadata": {**wanted["metadata"], "labels": {"a": "1000m"}}}
    assert differs(found, wanted)


def test_defaults_of_the_server_and_empty_lists_are_no_difference() -> None:
    wanted = asked({"metadata": {"name": "p"}, "spec": {"ingress": [], "ports": [{"port": 1}]}})
    found = {**wanted, "spec": {"ports": [{"port": 1, "protocol": "TCP"}], "extra": True}}
    assert not differs(found, wanted)


def test_a_field_that_is_no_longer_asked_for_is_a_difference() -> None:
    before = asked({"metadata": {"name": "p"}, "spec": {"hard": {"a": "1", "b": "2"}}})
    after = asked({"metadata": {"name": "p"}, "spec": {"hard": {"a": "1"}}})
    assert differs(before, after)


# --- kept volumes --------------------------------------------------------------------------------


def claim(name: str, until: str | None, **known: str) -> dict[str, Any]:
    marks = {} if until is None else {"gristmill.dev/kept-until": until}
    return {"metadata": {"name": name, "uid": name, "labels": known, "annotations": marks}}


def test_only_volumes_whose_time_is_over_and_that_nobody_needs_are_purged() -> None:
    past, future = "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"
    now_us = Metadata.model_validate(
        {"name": "x", "creationTimestamp": "2026-01-02T00:00:00Z"}
    ).creation_time_us
    found = purge(
        [
            claim("old", past, **{labels.SESSION: "gone"}),
            claim("used", past, **{labels.SESSION: "live"}),
            claim("holding", past, **{labels.SESSION: "gone", labels.UNFLUSHED: "true"}),
            claim("later", future, **{labels.SESSION: "gone"}),
            claim("forever", None, **{labels.SESSION: "gone"}),
        ],
        ["live"],
        now_us,
    )
    assert [each["metadata"]["name"] for each in found.now] == ["old"]
    assert found.next_us == now_us + 86_400_000_000


# --- settings ------------------------------------------------------------------------------------


def test_lists_in_the_environment_are_split_at_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_OPERATOR_LEDGER_URL", "http://ledger")
    monkeypatch.setenv("GRISTMILL_OPERATOR_POD_CIDRS", "10.0.0.0/8, fd00::/8")
    monkeypatch.setenv("GRISTMILL_OPERATOR_DNS_PORTS", "53,5353")
    monkeypatch.setenv("GRISTMILL_OPERATOR_POD_ENVIRONMENT", '{"HTTPS_PROXY": "http://p:1"}')
    settings = OperatorSettings()
    assert settings.pod_cidrs == ("10.0.0.0/8", "fd00::/8")
    assert settings.dns_ports == (53, 5353)
    assert settings.pod_environment == {"HTTPS_PROXY": "http://p:1"}
    monkeypatch.setenv("GRISTMILL_OPERATOR_POD_CIDRS", "10.0.0.0/99")
    with pytest.raises(ValueError, match="pod_cidrs"):
        OperatorSettings()
