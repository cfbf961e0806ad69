"""What the cluster shows of its own addresses, no tenant reaches by a range around them."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts.errors import ForbiddenError, GristmillError, UnavailableError
from gristmill_operator.cache import ObjectCache
from gristmill_operator.children.network import egress_to, refused_cidrs, tenant_policies
from gristmill_operator.children.options import NetworkOptions, beside
from gristmill_operator.kinds import NODES, SERVICES, TENANTS, Kind
from gristmill_operator.own_addresses import ASK_EVERY_S, OwnAddresses, merged, of_node
from gristmill_operator.routing import keys_for
from gristmill_operator.seams import Json, Key
from gristmill_testing.cluster_objects import a_tenant, options
from gristmill_testing.hand_clock import HandClock


def node(name: str = "n1", address: str = "172.30.0.2", pods: str = "10.88.0.0/24") -> Json:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"},
        "spec": {"podCIDR": pods, "podCIDRs": [pods]},
        "status": {
            "allocatable": {},
            "conditions": [],
            "addresses": [
                {"type": "InternalIP", "address": address},
                {"type": "Hostname", "address": name},
            ],
        },
    }


SERVICE = {"spec": {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00:96::1"]}}
SLICE = {"endpoints": [{"addresses": ["198.51.100.7"]}, {"addresses": ["198.51.100.8"]}]}
SHOWN = ("10.88.0.0/24", "10.96.0.1/32", "172.30.0.2/32", "198.51.100.7/32")


class Api:
    """Answers for the API server's Service and its slice, and counts."""

    def __init__(self) -> None:
        self.asked = 0
        self.failure: GristmillError | None = None
        self.service: Json = SERVICE

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        assert (namespace, name) == ("default", "kubernetes")
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return self.service if kind == SERVICES else SLICE


def seen(*nodes: Json) -> ObjectCache:
    cache = ObjectCache()
    for each in nodes:
        cache.put(NODES, each)
    return cache


def holds(ranges: tuple[str, ...], address: str) -> bool:
    return any(ipaddress.ip_address(address) in ipaddress.ip_network(each) for each in ranges)


async def test_nodes_their_pods_and_the_api_server_are_known() -> None:
    own = OwnAddresses(cluster=Api(), cache=seen(node()))  # type: ignore[arg-type]
    found = await own.cidrs()
    for address in ("172.30.0.2", "10.88.0.99", "10.96.0.1", "fd00:96::1", "198.51.100.8"):
        assert holds(found, address)
    assert not holds(found, "203.0.113.1")
    assert found == tuple(dict.fromkeys(found))


async def test_an_api_server_that_never_told_of_itself_opens_nothing() -> None:
    """The look at the tenant fails, and comes again; policies with it in reach are not written."""
    api = Api()
    own = OwnAddresses(cluster=api, cache=seen(node()))  # type: ignore[arg-type]
    api.failure = UnavailableError("away")
    with pytest.raises(UnavailableError):
        await own.cidrs()
    api.failure = ForbiddenError("no such right")
    assert holds(await own.cidrs(), "172.30.0.2")


async def test_the_api_server_is_asked_once_a_minute_and_what_it_said_outlives_its_silence() -> (
    None
):
    api, clock, cache = Api(), HandClock(), seen(node())
    own = OwnAddresses(cluster=api, cache=cache, clock=clock)  # type: ignore[arg-type]
    first = await own.cidrs()
    assert (await own.cidrs(), api.asked) == (first, 2)
    api.failure = UnavailableError("away")
    clock.pass_s(ASK_EVERY_S)
    assert await own.cidrs() == first
    api.failure, api.service = None, {"spec": {"clusterIP": "10.96.0.9"}}
    found = await own.cidrs()
    assert holds(found, "10.96.0.9")
    assert not holds(found, "10.96.0.1")


async def test_a_node_that_joins_is_known_at_once_and_one_that_left_no_more() -> None:
    cache = seen(node())
    own = OwnAddresses(cluster=Api(), cache=cache)  # type: ignore[arg-type]
    await own.cidrs()
    cache.put(NODES, node("n2", "172.30.0.3", "10.88.1.0/24"))
    assert holds(await own.cidrs(), "172.30.0.3")
    cache.remove(NODES, "", "n1", "uid-n1")
    assert not holds(await own.cidrs(), "172.30.0.2")


@pytest.mark.parametrize("text", ["", "node-1.example", "0.0.0.0/0", "::/0", "10.0.0.0/33"])
def test_what_is_no_address_of_anything_is_left_alone(text: str) -> None:
    """A node that claimed to be everywhere would cut every tenant off."""
    assert merged([text, "172.30.0.2"]) == ("172.30.0.2/32",)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=600))
def test_many_addresses_make_few_ranges_that_hold_them_all(numbers: list[int]) -> None:
    texts = [str(ipaddress.IPv4Address(number)) for number in numbers]
    found = merged(texts)
    networks = [ipaddress.ip_network(each) for each in found]
    assert all(any(ipaddress.ip_address(t) in n for n in networks) for t in texts)
    if len(set(texts)) <= limits.OWN_RANGES_MAX:
        assert sum(n.num_addresses for n in networks) == len(set(texts))


def test_five_thousand_nodes_of_one_network_fit_into_one_policy() -> None:
    nodes = [
        node(f"n{n}", f"10.{n // 60}.{n % 60}.{n % 250}", f"100.{64 + n // 250}.{n % 250}.0/24")
        for n in range(5000)
    ]
    found = merged(each for one in nodes for each in of_node(one))
    assert len(found) <= limits.OWN_RANGES_MAX


def test_a_wide_range_of_a_tenant_has_holes_where_the_cluster_is() -> None:
    network = NetworkOptions(shown_cidrs=SHOWN)
    [peer] = egress_to(["0.0.0.0/0"], network)
    assert set(SHOWN) <= set(peer["ipBlock"]["except"])
    assert "169.254.0.0/16" in peer["ipBlock"]["except"]
    assert egress_to(["172.30.0.2/32", "10.88.0.128/25"], network) == []
    tenant = a_tenant(network={"egressCIDRs": ["172.30.0.2/32", "203.0.113.0/24"]})
    assert refused_cidrs(tenant, network) == ["172.30.0.2/32"]


def fetch_blocks(*shown: str, **settings: Any) -> list[dict[str, Any]]:
    made = tenant_policies(a_tenant(), beside(options(**settings), shown))
    spec = next(each["spec"] for each in made if each["metadata"]["name"] == "fetch-out")
    return [peer["ipBlock"] for rule in spec["egress"] for peer in rule["to"]]


def test_a_fetch_job_reaches_no_api_server_either() -> None:
    [block] = fetch_blocks(*SHOWN)
    assert set(SHOWN) <= set(block["except"])


def test_a_mirror_of_the_hub_on_a_node_is_what_the_platforms_team_says_it_is() -> None:
    """Its range lies within what the cluster shows: nobody else could have meant it."""
    assert fetch_blocks(*SHOWN, hub_cidrs=("198.51.100.7/32", "172.30.0.2/32")) == [
        {"cidr": "198.51.100.7/32"},
        {"cidr": "172.30.0.2/32"},
    ]
    assert fetch_blocks(hub_cidrs=("169.254.169.254/32",)) == []


def test_a_node_with_other_addresses_has_the_tenants_with_egress_looked_at() -> None:
    cache = seen()
    for name, network in (
        ("open", {"egressCIDRs": ["0.0.0.0/0"]}),
        ("some", {"egressProfiles": [{"name": "p", "cidrs": ["0.0.0.0/0"]}]}),
        ("shut", {}),
    ):
        cache.put(
            TENANTS,
            {"metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "spec": {"network": network}},
        )  # fmt: skip
    before, after = node(), node(address="172.30.0.9")
    wanted = {Key("Tenant", "", "open"), Key("Tenant", "", "some")}
    assert set(keys_for(NODES, before, after, cache)) == wanted
    assert set(keys_for(NODES, None, after, cache)) == wanted
    cordoned = {**after, "spec": {**after["spec"], "unschedulable": True}}
    assert set(keys_for(NODES, after, cordoned, cache)) == set()
