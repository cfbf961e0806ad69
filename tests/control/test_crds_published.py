"""What the API server makes of our resource definitions: explain, columns, defaults, selectors."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.resources import Resource
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_testing.api_server import CRDS, ApiServer, Json
from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.definitions import SPECS, an_object, install_definitions

FIRST_RELEASE = Path(__file__).parent / "first_release.yaml"
RICH = list(yaml.safe_load_all(FIRST_RELEASE.read_text()))
MODELS: dict[str, type[Resource]] = {
    "TrainingSession": TrainingSession,
    "Tenant": Tenant,
    "BaseModel": BaseModelResource,
    "RateCard": RateCard,
}


@pytest.fixture(scope="module")
def api(control_cluster: Cluster) -> Iterator[ApiServer]:
    missing = install_definitions(control_cluster)
    # The server publishes a new kind a moment after it has accepted it.
    for short in ("gms", "gmt", "gmm", "gmr"):
        eventually(
            f"{short} is published",
            lambda short=short: control_cluster.try_kubectl("explain", short).code == 0,
        )
    yield ApiServer(control_cluster)
    for name in missing:
        control_cluster.delete("crd", name, wait=True)


def fields(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    for name, below in schema.get("properties", {}).items():
        yield f"{path}.{name}", below
        yield from fields(below, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], path)


def schema_of(kind: str) -> Json:
    plural = f"{kind.lower()}s"
    text = (CRDS / f"{plural}.yaml").read_text()
    schema: Json = yaml.safe_load(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


@pytest.mark.parametrize("kind", MODELS)
def test_the_server_publishes_a_text_for_every_field(api: ApiServer, kind: str) -> None:
    """kubectl explain reads this document."""
    published = api.call("GET", "/openapi/v3/apis/gristmill.dev/v1alpha1").body
    schema = published["components"]["schemas"][f"dev.gristmill.v1alpha1.{kind}"]
    of_ours = {path: below for path, below in fields(schema, kind) if ".metadata" not in path}
    assert len(of_ours) == len(list(fields(schema_of(kind), kind))) - 2  # metadata and its name
    assert [path for path, below in of_ours.items() if not below.get("description")] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("gms.spec.lora.alpha", "The adapter's output is scaled by alpha / rank."),
        ("trainingsessions.spec.budget", "What the session may spend"),
        ("gmt.spec.keys.serviceAccountName", "this ServiceAccount"),
        ("basemodels.spec.profiles.device.resourceName", "nvidia.com/mig-1g.10gb"),
        ("ratecards.spec.prices.meter", "ENUM: prefill cached_prefill sample train"),
    ],
)
def test_kubectl_explains(control_cluster: Cluster, api: ApiServer, path: str, text: str) -> None:
    shown = control_cluster.kubectl("explain", path)
    assert text in " ".join(shown.split())


def test_kubectl_shows_state_tokens_and_cost(
    control_cluster: Cluster, namespace: str, api: ApiServer
) -> None:
    thing = an_object("TrainingSession", namespace, {"metadata.name": "run"})
    assert api.create(thing).code == 201
    status = {
        "state": "Running",
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Serving"},
            {"type": "Parked", "status": "False", "reason": "Active"},
        ],
        "usage": {"prefill": 10, "cachedPrefill": 4, "sample": 20, "train": 3000},
        "cost": "0.012000 USD",
    }
    path = f"/apis/gristmill.dev/v1alpha1/namespaces/{namespace}/trainingsessions/run/status"
    kind = "application/merge-patch+json"
    assert api.call("PATCH", path, {"status": status}, kind=kind).code == 200
    head, row = control_cluster.kubectl("get", "gms", f"-n{namespace}").splitlines()
    assert head.split() == [
        "NAME", "STATE", "MODEL", "WORKERS", "PREFILL", "SAMPLE", "TRAIN", "COST", "PARKED", "AGE",
    ]  # fmt: skip
    assert row.split()[:-1] == [
        "run",
        "Running",
        "tiny",
        "1",
        "10",
        "20",
        "3000",
        "0.012000",
        "USD",
        "False",
    ]
    wide = control_cluster.kubectl("get", "gms", f"-n{namespace}", "-o", "wide").splitlines()[0]
    assert {"UP", "CACHED", "REASON"} <= set(wide.split())


def test_sessions_are_selected_by_state_and_model(
    control_cluster: Cluster, namespace: str, api: ApiServer
) -> None:
    for name, model in (("a", "tiny"), ("b", "large")):
        changes = {"metadata.name": name, "spec.baseModelRef.name": model}
        assert api.create(an_object("TrainingSession", namespace, changes)).code == 201
    chosen = control_cluster.kubectl(
        "get", "gms", f"-n{namespace}", "-o", "name",
        "--field-selector", "spec.baseModelRef.name=large,status.state!=Running",
    )  # fmt: skip
    assert chosen.split() == ["trainingsession.gristmill.dev/b"]


def test_a_change_of_the_spec_leaves_the_status_and_counts_generations(
    namespace: str, api: ApiServer
) -> None:
    thing = an_object("TrainingSession", namespace, {"status": {"state": "Running"}})
    made = api.create(thing).body
    assert "status" not in made
    changed = api.merge(thing, {"spec": {"desiredState": "Parked"}, "status": {"state": "Running"}})
    assert changed.body["metadata"]["generation"] == 2
    assert "status" not in changed.body


def test_the_category_shows_all_kinds(
    control_cluster: Cluster, namespace: str, api: ApiServer
) -> None:
    things = [an_object(kind, namespace) for kind in MODELS]
    for thing in things:
        assert api.create(thing).code == 201
    shown = control_cluster.kubectl("get", "gristmill", f"-n{namespace}", "-o", "name").split()
    assert {
        f"{thing['kind'].lower()}.gristmill.dev/{thing['metadata']['name']}" for thing in things
    } <= set(shown)


@pytest.mark.parametrize("kind", MODELS)
def test_the_servers_defaults_are_ours(namespace: str, api: ApiServer, kind: str) -> None:
    thing = an_object(kind, namespace)
    made = api.create(thing).body
    read = MODELS[kind].model_validate(made)
    ours = MODELS[kind].model_validate(thing)
    assert read.model_dump()["spec"] == ours.model_dump()["spec"]
    assert read.metadata.uid == made["metadata"]["uid"]
    assert read.metadata.namespace == made["metadata"].get("namespace", "")


@pytest.mark.parametrize("kind", MODELS)
def test_what_our_models_write_is_accepted_and_means_the_same(
    namespace: str, api: ApiServer, kind: str
) -> None:
    thing = an_object(kind, namespace)
    ours = MODELS[kind].model_validate(thing)
    written = json.loads(ours.model_dump_json(by_alias=True, exclude={"metadata", "status"}))
    made = api.create({**written, "metadata": thing["metadata"]})
    assert made.code == 201, made.refusals
    assert MODELS[kind].model_validate(made.body).model_dump()["spec"] == ours.model_dump()["spec"]


@pytest.mark.parametrize("thing", RICH, ids=lambda thing: thing["metadata"]["name"])
def test_what_the_first_release_stored_is_still_valid(
    namespace: str, api: ApiServer, thing: Json
) -> None:
    """A field never goes, never becomes required, and no bound becomes narrower."""
    status = thing.pop("status", None)
    if thing["kind"] == "TrainingSession":
        thing["metadata"]["namespace"] = namespace
    made = api.create(thing)
    assert made.refusals == []
    assert contains(made.body["spec"], thing["spec"])
    if status is not None:
        path = f"/apis/gristmill.dev/v1alpha1{place(namespace, thing)}/{thing['metadata']['name']}/status"
        written = api.call("PATCH", path, {"status": status}, kind="application/merge-patch+json")
        assert written.refusals == []
        assert contains(written.body["status"], status)
        MODELS[thing["kind"]].model_validate(written.body)


def place(namespace: str, thing: Json) -> str:
    plural = f"{thing['kind'].lower()}s"
    return f"/namespaces/{namespace}/{plural}" if "namespace" in thing["metadata"] else f"/{plural}"


def contains(whole: object, part: object) -> bool:
    """Every value of `part` is in `whole`: nothing was pruned or changed."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and contains(whole[name], each) for name, each in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and all(
            contains(a, b) for a, b in zip(whole, part, strict=True)
        )
    return whole == part


def test_the_objects_of_the_first_release_have_every_field_that_it_had() -> None:
    """So that the test above looks at all of them."""
    for kind in SPECS:
        told = [thing for thing in RICH if thing["kind"] == kind]
        known = {path for thing in told for path in paths(thing, kind)}
        missing = [
            path
            for path, below in fields(schema_of(kind), kind)
            if path not in known and ".metadata" not in path and below.get("type") != "object"
        ]
        assert missing == []


def paths(value: object, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield f"{path}.{name}"
            yield from paths(each, f"{path}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from paths(each, path)
