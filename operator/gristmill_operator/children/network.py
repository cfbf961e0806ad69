"""Network policies of a tenant's namespace: nothing goes, but what is listed here. Pure.

Policies add up and none can forbid, so that the API server, the nodes and the metadata address are out
of reach because nothing here names them, and because no tenant's own ranges may contain them.
"""

import ipaddress
from collections.abc import Sequence
from typing import Any, Final

from gristmill_contracts import labels
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.manifest import (
    COMPONENT,
    DRAIN,
    FETCH,
    NAME,
    PRODUCT,
    WORKER,
    Manifest,
    tenant_labels,
)
from gristmill_operator.children.namespace import namespace_name
from gristmill_operator.children.options import ChildOptions, NetworkOptions

LINK_LOCAL: Final = ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128")
"""Where clouds serve a node's credentials."""
NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Peer = dict[str, Any]  # Any: selectors and blocks of addresses


def tenant_policies(tenant: Tenant, options: ChildOptions) -> list[Manifest]:
    namespace, network = namespace_name(tenant), options.network
    made = [
        policy("default-deny", namespace, {}, ingress=[], egress=[]),
        policy("dns", namespace, {}, egress=[_dns(network)]),
        policy("meter-out", namespace, _has_meter(), egress=[_ledger(options)]),
        policy("fetch-out", namespace, {"matchLabels": {COMPONENT: FETCH}}, egress=_hub(network)),
    ]
    if tenant.spec.network.gateway_ingress:
        gateway = _ours(options.system_namespace, "gateway")
        made.append(_meter_in("gateway-in", namespace, gateway))
    if network.metrics_namespace:
        monitors = {"namespaceSelector": _namespace(network.metrics_namespace)}
        made.append(_meter_in("metrics-in", namespace, monitors))
    to = egress_to(tenant.spec.network.egress_cidrs, network)
    if to:
        made.append(policy("egress-extra", namespace, {}, egress=[{"to": to}]))
    marks = tenant_labels(tenant.metadata.name)
    return [{**each, "metadata": {**each["metadata"], "labels": marks}} for each in made]


def policy(
    name: str,
    namespace: str,
    selector: dict[str, Any],  # Any: labels and expressions
    *,
    ingress: list[Peer] | None = None,
    egress: list[Peer] | None = None,
) -> Manifest:
    """A direction that is given is closed but for its rules; one that is None is left alone."""
    spec: dict[str, Any] = {"podSelector": selector, "policyTypes": []}  # Any: its fields
    if ingress is not None:
        spec |= {"policyTypes": ["Ingress"], "ingress": ingress}
    if egress is not None:
        spec |= {"policyTypes": [*spec["policyTypes"], "Egress"], "egress": egress}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def egress_to(cidrs: Sequence[str], options: NetworkOptions) -> list[Peer]:
    """Blocks of addresses, without the cluster's own and without those that serve credentials.

    A range that lies wholly in what is left out gives nothing: see `refused_cidrs`.
    """
    return _blocks(cidrs, _left_out(options, options.shown_cidrs), ())


def _blocks(
    cidrs: Sequence[str], left_out: Sequence[Network], avoided: Sequence[Network]
) -> list[Peer]:
    """avoided: left out of blocks around them; one that lies within is meant so."""
    peers: list[Peer] = []
    for cidr in dict.fromkeys(cidrs):
        block = _parse(cidr)
        if block is None or any(_within(block, each) for each in left_out):
            continue
        inner = [*left_out, *(each for each in avoided if each != block)]
        holes = [str(each) for each in dict.fromkeys(inner) if _within(each, block)]
        peers.append({"ipBlock": {"cidr": str(block)} | ({"except": holes} if holes else {})})
    return peers


def refused_cidrs(tenant: Tenant, options: NetworkOptions) -> list[str]:
    """The tenant's ranges that give nothing: no ranges at all, or ones that no tenant may reach."""
    network = tenant.spec.network
    given = [*network.egress_cidrs, *(c for each in network.egress_profiles for c in each.cidrs)]
    return [cidr for cidr in dict.fromkeys(given) if not egress_to([cidr], options)]


def _left_out(options: NetworkOptions, shown: Sequence[str] = ()) -> list[Network]:
    given = (*LINK_LOCAL, *options.pod_cidrs, *options.service_cidrs, *options.node_cidrs, *shown)
    return [ipaddress.ip_network(each, strict=False) for each in dict.fromkeys(given)]


def _parse(cidr: str) -> Network | None:
    try:
        return ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        return None


def _within(inner: Network, outer: Network) -> bool:
    if isinstance(inner, ipaddress.IPv4Network):
        return isinstance(outer, ipaddress.IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, ipaddress.IPv6Network) and inner.subnet_of(outer)


def _dns(options: NetworkOptions) -> Peer:
    """Over UDP and TCP: an answer that is too long for one comes by the other."""
    pods = {
        "namespaceSelector": _namespace(options.dns_namespace),
        "podSelector": {"matchLabels": {"k8s-app": options.dns_pod_label}},
    }
    blocks = [{"ipBlock": {"cidr": each}} for each in options.dns_cidrs]
    ports = [
        {"protocol": protocol, "port": port}
        for port in options.dns_ports
        for protocol in ("UDP", "TCP")
    ]
    return {"to": [pods, *blocks], "ports": ports}


def _hub(options: NetworkOptions) -> list[Peer]:
    shown = [ipaddress.ip_network(each) for each in options.shown_cidrs]
    to = _blocks(options.hub_cidrs, _left_out(options), shown)
    ports = [{"protocol": "TCP", "port": port} for port in options.hub_ports]
    return [{"to": to, "ports": ports}] if to else []


def _ledger(options: ChildOptions) -> Peer:
    return {
        "to": [_ours(options.system_namespace, "ledger")],
        "ports": [{"protocol": "TCP", "port": options.network.ledger_port}],
    }


def _meter_in(name: str, namespace: str, peer: Peer) -> Manifest:
    ports = [{"protocol": "TCP", "port": labels.METER_PORT}]
    selector = {"matchLabels": {COMPONENT: WORKER, labels.RANK: "0"}}
    return policy(name, namespace, selector, ingress=[{"from": [peer], "ports": ports}])


def _has_meter() -> dict[str, Any]:  # Any: labels and expressions
    """Rank 0 of every session, and the Job that ships the log of one that is gone."""
    return {
        "matchLabels": {labels.RANK: "0"},
        "matchExpressions": [{"key": COMPONENT, "operator": "In", "values": [WORKER, DRAIN]}],
    }


def _ours(namespace: str, component: str) -> Peer:
    return {
        "namespaceSelector": _namespace(namespace),
        "podSelector": {"matchLabels": {NAME: PRODUCT, COMPONENT: component}},
    }


def _namespace(name: str) -> dict[str, dict[str, str]]:
    return {"matchLabels": {NAMESPACE_NAME: name}}
