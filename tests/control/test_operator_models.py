"""Base models and rate cards on a real API server, with the rights of the shipped ServiceAccount."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gristmill_contracts.errors import ConflictError, UnavailableError
from gristmill_sessions.observed import Adopt
from gristmill_testing.cluster import WRITES, Cluster, eventually
from gristmill_testing.operator_bench import Bench, clear_away, operator_bench
from gristmill_testing.operator_world import ACCOUNT, SYSTEM, install_chart, model, session, tenant

TENANT = "models"
NAMESPACE = "gm-models"


@pytest.fixture(scope="module")
def chart(control_cluster: Cluster) -> Iterator[Cluster]:
    install_chart(control_cluster)
    control_cluster.apply(tenant(TENANT))
    yield control_cluster
    clear_away(control_cluster, TENANT, NAMESPACE)
    for kind in ("basemodels", "ratecards"):
        control_cluster.try_kubectl("delete", kind, "--all")
    control_cluster.try_kubectl(
        "delete", "secret,role,rolebinding", "hub-token", f"--namespace={SYSTEM}"
    )


@pytest.fixture
async def bench(chart: Cluster) -> AsyncIterator[Bench]:
    async with operator_bench(chart) as made:
        for _ in range(50):
            await made.tenant(TENANT)
            if condition(chart, "tenant", TENANT, "Ready").get("status") == "True":
                break
        yield made


def condition(cluster: Cluster, kind: str, name: str, type_: str) -> dict[str, Any]:
    found = cluster.get(kind, name).get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == type_), {})


def card(name: str, price: str = "2.5") -> dict[str, Any]:
    meters = ("prefill", "cached_prefill", "sample", "train")
    return {
        "apiVersion": "gristmill.dev/v1alpha1", "kind": "RateCard", "metadata": {"name": name},
        "spec": {
            "currency": "USD",
            "prices": [{"model": "*", "meter": meter, "price": price} for meter in meters],
            "effectiveFrom": "2026-01-01T00:00:00Z",
        },
    }  # fmt: skip


async def test_a_model_says_what_no_node_offers_and_is_ready_all_the_same(bench: Bench) -> None:
    """A cluster that grows on demand offers a device once pods ask for it."""
    profiles = [{"name": "default", "device": {"resourceName": "example.com/gpu", "count": 2}}]
    bench.cluster.apply(model("devices", profiles=profiles))
    await bench.model("devices")
    offered = condition(bench.cluster, "basemodel", "devices", "DevicesOffered")
    assert (offered["status"], offered["reason"]) == ("False", "ResourceNotOffered")
    assert "no node offers example.com/gpu (profile default)" in offered["message"]
    assert condition(bench.cluster, "basemodel", "devices", "Ready")["status"] == "True"


async def test_a_folder_of_the_node_is_refused_with_the_remedy(bench: Bench) -> None:
    bench.cluster.apply(model("folder", weights={"path": "/srv/weights"}))
    await bench.model("folder")
    ready = condition(bench.cluster, "basemodel", "folder", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NodePathRefused")
    assert "weights.pvc" in ready["message"]


async def test_weights_of_the_hub_are_fetched_where_a_session_wants_them(bench: Bench) -> None:
    cluster = bench.cluster
    hub = {"hubRef": {"repository": "lab/tiny", "tokenSecret": "hub-token"}}
    cluster.apply(model("hub", weights=hub))
    await bench.model("hub")
    assert condition(cluster, "basemodel", "hub", "WeightsAvailable")["reason"] == "OnDemand"
    assert cluster.find("job", "gm-fetch-hub", NAMESPACE) is None

    cluster.apply(session("wants", NAMESPACE, baseModelRef={"name": "hub"}))
    await bench.look()
    wanting = await bench.session(NAMESPACE, "wants")
    await bench.hands.do(wanting, Adopt())
    await bench.model("hub")
    said = condition(cluster, "basemodel", "hub", "WeightsAvailable")
    assert said["reason"] == "FetchFailed"
    assert "hub-token" in said["message"]

    cluster.apply(
        {
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token", "namespace": SYSTEM},
            "stringData": {"token": "hf_x"},
        }
    )  # fmt: skip
    give_access(cluster)
    await bench.model("hub")
    job = cluster.get("job", "gm-fetch-hub", NAMESPACE)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:4] == ["python", "-m", "gristmill_worker.prepare", "lab/tiny"]
    assert cluster.find("secret", "gm-fetch-hub", NAMESPACE) is not None
    await bench.look()
    seen = bench.observe(await bench.session(NAMESPACE, "wants")).cluster
    assert seen is not None
    assert not seen.model.ready
    assert "fetches the weights" in seen.model.message

    finish(cluster, "gm-fetch-hub")
    await bench.model("hub")
    await bench.look()
    after = bench.observe(await bench.session(NAMESPACE, "wants")).cluster
    assert after is not None
    assert after.model.ready
    assert cluster.find("secret", "gm-fetch-hub", NAMESPACE) is None
    await bench.model("hub")
    assert condition(cluster, "basemodel", "hub", "WeightsAvailable")["reason"] == "Fetched"
    mark = cluster.audit_mark()
    assert await bench.model("hub") is None
    assert list(cluster.audit(mark, user=ACCOUNT, verbs=WRITES)) == []


def give_access(cluster: Cluster) -> None:
    """As the chart's value for tokens of the hub does."""
    cluster.kubectl(
        "create", "role", "hub-token", f"--namespace={SYSTEM}", "--verb=get", "--resource=secrets",
        "--resource-name=hub-token",
    )  # fmt: skip
    cluster.kubectl(
        "create", "rolebinding", "hub-token", f"--namespace={SYSTEM}", "--role=hub-token",
        f"--serviceaccount={SYSTEM}:gristmill-operator",
    )  # fmt: skip


def finish(cluster: Cluster, job: str) -> None:
    """Play the node that ran its pod."""
    selector = f"batch.kubernetes.io/job-name={job}"
    made = eventually("the Job has a pod", lambda: cluster.objects("pods", NAMESPACE, selector))
    cluster.kubectl(
        "patch", "pod", made[0]["metadata"]["name"], f"--namespace={NAMESPACE}", "--subresource=status",
        "--type=merge", '--patch={"status":{"phase":"Succeeded"}}',
    )  # fmt: skip
    cluster.wait_condition("job", job, "Complete", NAMESPACE)


async def test_a_session_sees_why_it_cannot_have_its_model(bench: Bench) -> None:
    cluster = bench.cluster
    cluster.apply(model("others", allowedTenants={"matchNames": ["somebody"]}, deprecated=True))
    await bench.model("others")
    cluster.apply(
        session("asks", NAMESPACE, baseModelRef={"name": "others", "profile": "huge"}),
        session("lost", NAMESPACE, baseModelRef={"name": "nowhere"}),
    )
    await bench.look()
    seen = bench.observe(await bench.session(NAMESPACE, "asks")).cluster
    assert seen is not None
    model_ = seen.model
    assert (model_.found, model_.allowed, model_.deprecated) == (True, False, True)
    assert (model_.profile_found, model_.profiles) == (False, ("default",))
    lost = bench.observe(await bench.session(NAMESPACE, "lost")).cluster
    assert lost is not None
    assert not lost.model.found
    assert lost.tenant.name == TENANT


async def test_a_session_outside_of_a_tenants_namespace_has_no_tenant(
    bench: Bench, namespace: str
) -> None:
    bench.cluster.apply(session("stray", namespace))
    await bench.look()
    seen = bench.observe(await bench.session(namespace, "stray")).cluster
    assert seen is not None
    assert not seen.tenant.found
    assert f"namespace '{namespace}' belongs to no tenant" in seen.tenant.message


async def test_prices_are_on_record_before_the_card_says_so(bench: Bench) -> None:
    cluster = bench.cluster
    cluster.apply(card("prices", "0.25"))
    bench.ledger.refusal = UnavailableError("the ledger did not answer")
    with pytest.raises(UnavailableError):
        await bench.card("prices")
    assert condition(cluster, "ratecard", "prices", "Recorded") == {}
    bench.ledger.refusal = None
    assert await bench.card("prices") is None
    assert condition(cluster, "ratecard", "prices", "Recorded")["status"] == "True"
    book = bench.ledger.books[-1]
    assert (book.name, book.currency) == ("prices", "USD")
    assert {each.micros_per_mtok for each in book.prices} == {250_000}
    mark = cluster.audit_mark()
    await bench.card("prices")
    assert list(cluster.audit(mark, user=ACCOUNT, verbs=WRITES)) == []


async def test_prices_that_the_ledger_refuses_are_told(bench: Bench) -> None:
    bench.cluster.apply(card("refused"))
    bench.ledger.refusal = ConflictError("price book 'refused' has other prices")
    assert await bench.card("refused") is not None
    said = condition(bench.cluster, "ratecard", "refused", "Recorded")
    assert (said["status"], said["reason"]) == ("False", "Refused")
    assert "has other prices" in said["message"]
