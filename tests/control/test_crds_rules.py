"""Every rule of our resource definitions, on a real API server: accepted, or refused with these words."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import yaml

from gristmill_testing.api_server import CRDS, ApiServer, Json, path_of
from gristmill_testing.cluster import Cluster
from gristmill_testing.definitions import (
    DIGEST,
    LEFT_OUT,
    an_object,
    changed,
    install_definitions,
    prices,
)

SESSION, TENANT, MODEL, CARD = "TrainingSession", "Tenant", "BaseModel", "RateCard"
OTHER = "registry.test/gristmill-worker@sha256:" + "b" * 64
LONG = "n" * 41


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Create with `first`; where `then` is given, that is accepted and the update with `then` is judged."""

    kind: str
    first: Mapping[str, object] = field(default_factory=dict)
    then: Mapping[str, object] | None = None
    refused: str = ""
    """`field: message`; empty = accepted."""


def stays(path: str, before: object, after: object, remedy: str, kind: str = SESSION) -> Case:
    """The value at spec.<path> cannot change."""
    return Case(
        kind=kind,
        first={f"spec.{path}": before},
        then={f"spec.{path}": after},
        refused=f"spec: spec.{path} cannot be changed from '{before}' to '{after}'; {remedy}",
    )


ANOTHER = "make another session"

NAMES = [
    Case(kind=SESSION, first={"metadata.name": "a" * 40}),
    Case(
        kind=SESSION,
        first={"metadata.name": LONG},
        refused=f"metadata.name: metadata.name '{LONG}' has 41 characters; choose a name of at most 40, which leaves room "
        "for the names of its pods",
    ),
    *(
        Case(
            kind=kind,
            first={"metadata.name": LONG},
            refused=f"metadata.name: metadata.name '{LONG}' has 41 characters; choose a name of at most 40, which leaves "
            "room for the names that are made of it",
        )
        for kind in (TENANT, MODEL, CARD)
    ),
    *(
        Case(
            kind=SESSION,
            first={"metadata.name": name},
            refused=f"metadata.name: metadata.name '{name}' is not valid; use lower-case letters, digits and hyphens, begin "
            "with a letter and end with a letter or digit",
        )
        for name in ("1st", "a.b")
    ),
    *(
        Case(
            kind=kind,
            first={"metadata.name": "a.b"},
            refused="metadata.name: metadata.name 'a.b' is not valid; use lower-case letters, digits and hyphens, and begin "
            "and end with a letter or digit",
        )
        for kind in (TENANT, MODEL, CARD)
    ),
    Case(kind=TENANT, first={"metadata.name": "7-eleven"}),
]

SESSIONS = [
    Case(kind=SESSION),
    Case(kind=SESSION, first={"spec.lora": LEFT_OUT, "spec.full": {}}),
    Case(
        kind=SESSION,
        first={"spec.full": {}},
        refused="spec: spec.lora and spec.full are both set; leave one of them out",
    ),
    Case(
        kind=SESSION,
        first={"spec.lora": LEFT_OUT},
        refused="spec: spec.lora and spec.full are both missing; set one of them, as lora: {}",
    ),
    stays("displayName", "Run-A", "Run-B", ANOTHER),
    Case(
        kind=SESSION,
        then={"spec.displayName": "Run-A"},
        refused=f"spec: spec.displayName cannot be changed from '' to 'Run-A'; {ANOTHER}",
    ),
    Case(kind=SESSION, then={"spec.displayName": ""}),
    Case(
        kind=SESSION,
        first={"spec.displayName": "two words"},
        refused="spec.displayName: spec.displayName in body should match '^([a-zA-Z0-9](-*[a-zA-Z0-9]){0,62})?$'",
    ),
    stays("clientToken", "t-1", "t-2", ANOTHER),
    stays("baseModelRef.name", "tiny", "large", ANOTHER),
    stays("baseModelRef.profile", "default", "eight-gpus", ANOTHER),
    Case(
        kind=SESSION,
        then={"spec.lora": {"rank": 8, "targets": ["q_proj"]}},
        refused="spec: spec.lora and spec.full cannot be changed from rank 32, alpha 64, targets [] to rank 8, alpha "
        f'64, targets ["q_proj"]; {ANOTHER}',
    ),
    Case(
        kind=SESSION, first={"spec.lora": {"rank": 8}}, then={"spec.lora": {"rank": 8, "alpha": 64}}
    ),
    stays("workers", 1, 2, ANOTHER),
    Case(kind=SESSION, then={"spec.desiredState": "Parked"}),
    Case(
        kind=SESSION, first={"spec.desiredState": "Parked"}, then={"spec.desiredState": "Stopped"}
    ),
    Case(
        kind=SESSION,
        first={"spec.desiredState": "Stopped"},
        then={"spec.desiredState": "Running"},
        refused=f"spec: spec.desiredState is Stopped, which is for good, and cannot become Running; {ANOTHER}",
    ),
    *(
        Case(
            kind=SESSION,
            first={f"spec.limits.{name}": 600},
            then={f"spec.limits.{name}": 300},
            refused=f"spec: spec.limits.{name} may only grow; it is 600 and cannot become 300: keep it or set more",
        )
        for name in ("pendingSeconds", "wakeSeconds", "lifetimeSeconds")
    ),
    Case(
        kind=SESSION,
        first={"spec.limits.lifetimeSeconds": 600},
        then={"spec.limits.lifetimeSeconds": LEFT_OUT},
        refused="spec: spec.limits.lifetimeSeconds may only grow; it is 600 and cannot become unset: keep it or set "
        "more",
    ),
    Case(kind=SESSION, then={"spec.limits.lifetimeSeconds": 600}),
    Case(kind=SESSION, first={"spec.idle.parkAfterSeconds": 0}),
    Case(kind=SESSION, first={"spec.idle.parkAfterSeconds": 60}),
    Case(
        kind=SESSION,
        first={"spec.idle.parkAfterSeconds": 59},
        refused="spec: spec.idle.parkAfterSeconds is 59; set 0 for never, or at least 60",
    ),
    Case(
        kind=SESSION,
        first={"spec.failurePolicy.backoffMaxSeconds": 5},
        refused="spec: spec.failurePolicy.backoffMaxSeconds is 5, below backoffSeconds, which is 10; raise the one or "
        "lower the other",
    ),
    Case(kind=SESSION, then={"spec.storage.size": "20Gi"}),
    Case(kind=SESSION, first={"spec.storage.size": "1Gi"}, then={"spec.storage.size": "1024Mi"}),
    Case(
        kind=SESSION,
        then={"spec.storage.size": "9000Mi"},
        refused="spec: spec.storage.size may only grow; it is 10Gi and cannot become 9000Mi: keep it or set more",
    ),
    stays("storage.storageClassName", "fast", "slow", ANOTHER),
    stays("storage.durability", "Volume", "Ledger", ANOTHER),
    stays("rateCardRef.name", "old", "new", ANOTHER),
    Case(
        kind=SESSION,
        first={"spec.rateCardRef": {"name": "old"}},
        then={"spec.rateCardRef": LEFT_OUT},
        refused=f"spec: spec.rateCardRef.name cannot be changed from 'old' to ''; {ANOTHER}",
    ),
    Case(
        kind=SESSION,
        first={"spec.budget": {"maxTokens": 1}},
        then={"spec.budget": {"maxCost": "0.5"}},
    ),
    Case(
        kind=SESSION,
        first={"spec.budget": {"maxTokens": 5, "maxCost": "12.50"}},
        refused="spec: spec.budget has both maxTokens 5 and maxCost 12.50; leave one of them out",
    ),
    Case(
        kind=SESSION,
        first={"spec.budget": {"maxTokens": 0}},
        refused="spec: spec.budget.maxTokens is 0; set at least 1, or leave it out for no bound",
    ),
    Case(
        kind=SESSION,
        first={"spec.budget": {"maxTokens": -1}},
        refused="spec: spec.budget.maxTokens is -1; set at least 1, or leave it out for no bound",
    ),
    Case(
        kind=SESSION,
        then={"spec.budget": {"maxCost": "0.00"}},
        refused="spec: spec.budget.maxCost is 0.00; set more than 0, or leave it out for no bound",
    ),
    stays("queueName", "a", "b", ANOTHER),
    stays("priorityClassName", "a", "b", ANOTHER),
    Case(
        kind=SESSION,
        first={"spec.priorityClassName": "system-node-critical"},
        refused="spec: spec.priorityClassName is 'system-node-critical', one of the cluster's own classes; choose another, "
        "or leave it out for the tenant's",
    ),
    stays("project", "a", "b", ANOTHER),
    stays("output.path", "s3://bucket/a", "s3://bucket/b", ANOTHER),
    stays("output.checkpointGroup", "sagemaker-default", "b", ANOTHER),
    stays("encryption.keyRef", "a", "b", ANOTHER),
    stays("serviceAccountName", "a", "b", ANOTHER),
    stays("roleArn", "a", "b", ANOTHER),
    Case(
        kind=SESSION,
        first={"spec.workers": 65},
        refused="spec.workers: spec.workers in body should be less than or equal to 64",
    ),
    Case(kind=SESSION, then={"spec.egressProfiles": ["hub"], "spec.ttlSecondsAfterFinished": 60}),
]

TENANTS = [
    Case(kind=TENANT, first={"spec.namespace": "research"}),
    stays("namespace", "a", "b", "make another tenant", TENANT),
    Case(
        kind=TENANT,
        then={"spec.namespace": "b"},
        refused="spec: spec.namespace cannot be changed from '' to 'b'; make another tenant",
    ),
    *(
        Case(
            kind=TENANT,
            first={"spec.namespace": name},
            refused=f"spec: spec.namespace '{name}' is a namespace of the system; leave it out for gm-<name>, or name "
            "one of the tenant's own",
        )
        for name in ("default", "kube-system", "gristmill-system")
    ),
    Case(
        kind=TENANT,
        first={"spec.budget": {"hard": "0"}},
        refused="spec: spec.budget.hard is 0; set more than 0, leave budget out for no bound, or set suspended: true",
    ),
    Case(
        kind=TENANT,
        first={"spec.subjects": [{"kind": "ServiceAccount", "name": "ci"}]},
        refused="spec.subjects[0]: ServiceAccount 'ci' has no namespace; name the one that it is in",
    ),
    Case(
        kind=TENANT,
        first={"spec.subjects": [{"kind": "User", "name": "ann", "namespace": "x"}]},
        refused="spec.subjects[0]: User 'ann' has a namespace; leave it out",
    ),
    Case(
        kind=TENANT,
        first={"spec.subjects": [{"kind": "ServiceAccount", "name": "ci", "namespace": "x"}]},
    ),
    Case(
        kind=TENANT,
        first={"spec.keys": [{"name": "k", "revoked": True}]},
        then={"spec.keys": [{"name": "k"}]},
        refused="spec.keys[0]: key 'k' is revoked, which is for good; add a key with another name",
    ),
    Case(
        kind=TENANT,
        first={"spec.keys": [{"name": "k"}, {"name": "k"}]},
        refused='spec.keys[1]: Duplicate value: {"name":"k"}',
    ),
    Case(
        kind=TENANT,
        first={"spec.network": {"egressCIDRs": ["10.0.0.0/99"]}},
        refused="spec.network.egressCIDRs[0]: '10.0.0.0/99' is no CIDR; write it as 198.51.100.0/24",
    ),
    Case(
        kind=TENANT,
        first={"spec.network": {"egressProfiles": [{"name": "hub", "cidrs": ["1.2.3/8"]}]}},
        refused="spec.network.egressProfiles[0].cidrs[0]: '1.2.3/8' is no CIDR; write it as 198.51.100.0/24",
    ),
    Case(
        kind=TENANT, first={"spec.network": {"egressCIDRs": ["2001:db8::/32", "198.51.100.0/24"]}}
    ),
]

LABEL = "is not the name of a label; write it as nvidia.com/gpu.product"
TENANTS += [
    Case(
        kind=TENANT,
        first={"spec.quota": {"devices": {"two words": "1"}}},
        refused="spec.quota.devices: 'two words' is not the name of a resource; write it as nvidia.com/gpu",
    ),
    Case(
        kind=TENANT,
        first={"spec.nodePools": [{"name": "a", "nodeSelector": {"a b": "x"}}]},
        refused=f"spec.nodePools[0].nodeSelector: 'a b' {LABEL}",
    ),
]

OTHER_MODEL = "make a BaseModel with another name"

MODELS = [
    Case(kind=MODEL),
    *(
        Case(
            kind=MODEL,
            first={"spec.image": image},
            refused=f"spec: spec.image '{image}' is no image by digest; name the worker's image as "
            "registry/name@sha256:<64 hex digits>",
        )
        for image in ("", "registry.test/worker:latest")
    ),
    Case(
        kind=MODEL,
        first={"spec.image": LEFT_OUT},
        refused="spec: spec.image '' is no image by digest; name the worker's image as "
        "registry/name@sha256:<64 hex digits>",
    ),
    stays("image", DIGEST, OTHER, OTHER_MODEL, MODEL),
    stays("architecture", "Llama", "Qwen2", OTHER_MODEL, MODEL),
    Case(
        kind=MODEL,
        then={"spec.weights": {"path": "/models/other"}},
        refused=f"spec: spec.weights cannot be changed; {OTHER_MODEL}",
    ),
    Case(
        kind=MODEL,
        first={"spec.weights": LEFT_OUT},
        refused="spec: spec.weights has []; set exactly one of path, pvc, hubRef and image",
    ),
    Case(
        kind=MODEL,
        first={"spec.weights": {"path": "/m", "hubRef": {"repository": "a/b"}}},
        refused='spec: spec.weights has ["path", "hubRef"]; set exactly one of path, pvc, hubRef and image',
    ),
    *(
        Case(kind=MODEL, first={"spec.weights": weights})
        for weights in (
            {"pvc": {"claimName": "w"}},
            {"hubRef": {"repository": "a/b"}},
            {"image": {"reference": DIGEST}},
        )
    ),
    Case(
        kind=MODEL,
        first={
            "spec.profiles": [
                {
                    "name": "gpu",
                    "device": {"resourceName": "nvidia.com/gpu"},
                    "dra": {"deviceClassName": "gpu"},
                }
            ]
        },
        refused="spec.profiles[0]: profile 'gpu' has both device and dra; leave one of them out",
    ),
    Case(
        kind=MODEL,
        first={"spec.profiles": [{"name": "a"}, {"name": "a"}]},
        refused='spec.profiles[1]: Duplicate value: {"name":"a"}',
    ),
    Case(
        kind=MODEL, then={"spec.deprecated": True, "spec.profiles": [{"name": "a"}, {"name": "b"}]}
    ),
]

MODELS += [
    Case(
        kind=MODEL,
        first={"spec.profiles": [{"name": "a", "nodeSelector": {"a b": "x"}}]},
        refused=f"spec.profiles[0].nodeSelector: 'a b' {LABEL}",
    ),
]

CARDS = [
    Case(kind=CARD, first={"spec.prices": prices("*") + prices("tiny")}),
    Case(
        kind=CARD,
        then={"spec.currency": "EUR"},
        refused="spec: spec of a RateCard cannot be changed; make a RateCard with another name and a later "
        "effectiveFrom",
    ),
    Case(kind=CARD, then={"metadata.labels": {"team": "billing"}}),
    Case(
        kind=CARD,
        first={"spec.prices": prices("*") + prices("tiny", "train")},
        refused="spec: spec.prices has 1 of the 4 prices of model 'tiny'; give one each for prefill, cached_prefill, "
        "sample and train",
    ),
    Case(
        kind=CARD,
        first={"spec.prices": prices("*", "train", "train", "sample", "prefill")},
        refused='spec.prices[1]: Duplicate value: {"meter":"train","model":"*"}',
    ),
    Case(kind=CARD, first={"spec.prices": [each for n in range(64) for each in prices(f"m{n}")]}),
    Case(
        kind=CARD,
        first={
            "spec.prices": [
                *prices("*")[:3],
                {"model": "*", "meter": "train", "price": "1.1234567"},
            ]
        },
        refused="spec.prices[3].price: spec.prices[3].price in body should match '^[0-9]{1,9}(\\.[0-9]{1,6})?$'",
    ),
]

CASES = [*NAMES, *SESSIONS, *TENANTS, *MODELS, *CARDS]


@pytest.fixture(scope="module")
def definitions(control_cluster: Cluster) -> Iterator[ApiServer]:
    missing = install_definitions(control_cluster)
    yield ApiServer(control_cluster)
    for name in missing:
        control_cluster.delete("crd", name, wait=True)


def case_id(case: Case) -> str:
    changes = case.first if case.then is None else case.then
    names = ",".join(path.removeprefix("spec.") for path in changes) or "plain"
    verb = "create" if case.then is None else "update"
    return f"{case.kind}-{verb}-{names}-{'refused' if case.refused else 'accepted'}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_change_is_accepted_or_refused_in_these_words(
    control_cluster: Cluster, definitions: ApiServer, case: Case
) -> None:
    thing = an_object(case.kind, "default", case.first)
    reply = definitions.create(thing)
    if case.then is not None:
        assert reply.refusals == [], "the first object"
        made = reply.body
        reply = definitions.call("PUT", path_of(made), changed(made, case.then))
    definitions.delete(thing)
    assert reply.refusals == ([case.refused] if case.refused else [])


def rules(schema: Json) -> Iterator[Json]:
    yield from schema.get("x-kubernetes-validations", [])
    for below in schema.get("properties", {}).values():
        yield from rules(below)
    if "items" in schema:
        yield from rules(schema["items"])
    if "additionalProperties" in schema:
        yield from rules(schema["additionalProperties"])


def all_rules() -> Iterator[tuple[str, Json]]:
    for file in sorted(CRDS.glob("*.yaml")):
        definition = yaml.safe_load(file.read_text())["spec"]
        for rule in rules(definition["versions"][0]["schema"]["openAPIV3Schema"]):
            yield definition["names"]["kind"], rule


def says(rule: Json) -> re.Pattern[str]:
    """What a refusal by the rule looks like: the texts of its message, with anything for values."""
    expression = rule.get("messageExpression")
    texts = [rule["message"]] if expression is None else re.findall(r'"([^"]{12,})"', expression)
    texts = texts or re.findall(r"'([^']{12,})'", expression or "")
    return re.compile("|".join(re.sub(r"%[sd]", ".*", re.escape(text)) for text in texts))


def test_every_rule_has_a_case_that_it_refuses() -> None:
    refused = [(case.kind, case.refused.partition(": ")[2]) for case in CASES if case.refused]
    unproven = [
        f"{kind}: {rule['rule']}"
        for kind, rule in all_rules()
        if not any(of == kind and says(rule).fullmatch(text) for of, text in refused)
    ]
    assert unproven == []
