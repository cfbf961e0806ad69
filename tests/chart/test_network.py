"""Doors: NetworkPolicies of the system namespace, Ingress and Gateway API."""

from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_testing.chart import NAMESPACE, find, render

PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def policy(name: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
    return dict(find(render(values), "NetworkPolicy", f"gristmill-{name}")["spec"])


def ports(rule: dict[str, Any]) -> set[tuple[str, int]]:
    return {(each["protocol"], each["port"]) for each in rule["ports"]}


def test_everything_of_ours_is_denied_by_default_but_dns() -> None:
    spec = policy("default", {"networkPolicy.dns.cidrs": ["169.254.20.10/32"]})
    assert spec["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "gristmill"}}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == []
    (dns,) = spec["egress"]
    assert ports(dns) == {("UDP", 53), ("TCP", 53), ("UDP", 1053), ("TCP", 1053)}
    assert dns["to"][0]["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
    assert dns["to"][1] == {"ipBlock": {"cidr": "169.254.20.10/32"}}


def test_the_ledger_takes_calls_of_ours_and_of_meters_alone() -> None:
    spec = policy("ledger")
    (rule,) = spec["ingress"]
    assert ports(rule) == {("TCP", 8460)}
    ours, meters = rule["from"]
    assert "namespaceSelector" not in ours
    (expression,) = ours["podSelector"]["matchExpressions"]
    assert expression["values"] == ["operator", "gateway", "check"]
    assert meters["namespaceSelector"]["matchExpressions"] == [
        {"key": labels.TENANT, "operator": "Exists"}
    ]
    assert meters["podSelector"]["matchLabels"] == {
        labels.MANAGED_BY: "gristmill",
        labels.RANK: "0",
    }


def test_the_api_server_is_reached_by_address() -> None:
    values = {
        "networkPolicy.apiServer.cidrs": ["10.0.0.1/32"],
        "networkPolicy.apiServer.ports": [6443],
    }
    spec = policy("api-server", values)
    (rule,) = spec["egress"]
    assert rule["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    assert ports(rule) == {("TCP", 6443)}
    (expression,) = spec["podSelector"]["matchExpressions"]
    assert "ledger" not in expression["values"]


def test_the_gateway_is_open_until_somebody_is_named() -> None:
    (rule,) = policy("gateway")["ingress"]
    assert "from" not in rule
    named = {
        "networkPolicy.gatewayFrom": [{"namespaceSelector": {"matchLabels": {"team": "edge"}}}]
    }
    (narrow,) = policy("gateway", named)["ingress"]
    assert {"namespaceSelector": {"matchLabels": {"team": "edge"}}} in narrow["from"]


def test_the_gateway_calls_ledger_and_meters() -> None:
    to_ledger, to_meters = policy("gateway")["egress"]
    assert ports(to_ledger) == {("TCP", 8460)}
    assert ports(to_meters) == {("TCP", labels.METER_PORT)}
    assert to_meters["to"][0]["namespaceSelector"]["matchExpressions"][0]["key"] == labels.TENANT


def test_metrics_are_read_by_those_that_are_named() -> None:
    assert "ingress" not in policy("operator")
    values = {"networkPolicy.metricsFrom": [PROMETHEUS]}
    (rule,) = policy("operator", values)["ingress"]
    assert rule["from"] == [PROMETHEUS]
    assert PROMETHEUS in policy("ledger", values)["ingress"][0]["from"]


def test_the_database_of_the_ledger_is_a_rule_of_the_users() -> None:
    rule = {
        "to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}],
        "ports": [{"protocol": "TCP", "port": 5432}],
    }
    spec = policy("ledger", {"networkPolicy.ledgerEgress": [rule]})
    assert spec["egress"] == [rule]
    assert "Egress" in spec["policyTypes"]


def test_policies_can_be_left_out() -> None:
    assert not [o for o in render({"networkPolicy.enabled": False}) if o["kind"] == "NetworkPolicy"]


def test_every_policy_is_in_our_own_namespace() -> None:
    found = [o for o in render() if o["kind"] == "NetworkPolicy"]
    assert len(found) == 6
    assert {each["metadata"]["namespace"] for each in found} == {NAMESPACE}


def test_an_ingress_passes_large_bodies_and_streams() -> None:
    values = {
        "gateway.ingress.enabled": True,
        "gateway.ingress.host": "mill.example.com",
        "gateway.ingress.className": "nginx",
        "gateway.ingress.annotations": {"cert-manager.io/cluster-issuer": "letsencrypt"},
    }
    ingress = find(render(values), "Ingress", "gristmill-gateway")
    notes = ingress["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/"
    assert notes[f"{prefix}proxy-body-size"] == "32m"
    assert notes[f"{prefix}proxy-request-buffering"] == "off"
    assert notes[f"{prefix}proxy-buffering"] == "off"
    assert f"{prefix}upstream-vhost" not in notes, "Host is signed: it must stay as it came"
    assert notes["cert-manager.io/cluster-issuer"] == "letsencrypt"
    assert ingress["spec"]["tls"] == [
        {"hosts": ["mill.example.com"], "secretName": "gristmill-gateway-tls"}
    ]
    assert ingress["spec"]["rules"][0]["host"] == "mill.example.com"


def test_an_ingress_of_another_controller_has_no_words_of_nginx() -> None:
    values = {
        "gateway.ingress.enabled": True,
        "gateway.ingress.host": "mill.example.com",
        "gateway.ingress.preset": "none",
        "gateway.ingress.tls.enabled": False,
    }
    ingress = find(render(values), "Ingress", "gristmill-gateway")
    assert not ingress["metadata"]["annotations"]
    assert "tls" not in ingress["spec"]


def test_a_route_keeps_the_host_and_has_time_for_a_long_answer() -> None:
    values = {
        "gateway.httpRoute.enabled": True,
        "gateway.httpRoute.hostnames": ["mill.example.com"],
        "gateway.httpRoute.parentRefs": [{"name": "public", "namespace": "infra"}],
    }
    objects = render(values)
    spec = find(objects, "HTTPRoute", "gristmill-gateway")["spec"]
    assert spec["parentRefs"] == [{"name": "public", "namespace": "infra"}]
    (rule,) = spec["rules"]
    assert "filters" not in rule
    assert rule["timeouts"] == {"request": "960s"}
    assert not [each for each in objects if each["kind"] == "Gateway"]


def test_a_gateway_of_our_own_ends_tls() -> None:
    values = {
        "gateway.httpRoute.enabled": True,
        "gateway.httpRoute.hostnames": ["a.example.com", "b.example.com"],
        "gateway.httpRoute.ownGateway.enabled": True,
        "gateway.httpRoute.ownGateway.className": "envoy",
    }
    objects = render(values)
    listeners = find(objects, "Gateway", "gristmill-gateway")["spec"]["listeners"]
    assert [each["protocol"] for each in listeners] == ["HTTPS", "HTTPS"]
    assert listeners[0]["tls"]["certificateRefs"] == [{"name": "gristmill-gateway-tls"}]
    parents = find(objects, "HTTPRoute", "gristmill-gateway")["spec"]["parentRefs"]
    assert {each["sectionName"] for each in parents} == {each["name"] for each in listeners}


@pytest.mark.parametrize("kind", ["Ingress", "HTTPRoute", "Gateway"])
def test_nothing_is_exposed_by_default(kind: str) -> None:
    assert not [each for each in render() if each["kind"] == kind]
