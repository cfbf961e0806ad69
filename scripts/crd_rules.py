"""What the schemas of our custom resources cannot say: CEL rules, printer columns, names. Pure data.

A rule's message names the field, the value and the remedy; `message` is what the server falls back to
where the expression cannot be evaluated.
"""

from dataclasses import dataclass
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.resources import QUALIFIED_KEY_PATTERN, Resource
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant

CEL_RESERVED: Final = frozenset({"namespace"})
"""Fields whose names are words of CEL."""
NAME_MAX: Final = limits.OBJECT_NAME_CHARS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of x-kubernetes-validations. `at` is the path of the schema that it belongs to."""

    at: str
    rule: str
    message: str
    expression: str = ""
    """CEL text of the message, with values; empty = `message` says it all."""
    field: str = ""
    """What the server names as the field, below `at`; empty = `at`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    path: str
    type: str = "string"
    description: str
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One custom resource definition."""

    model: type[Resource]
    plural: str
    short: str
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...]
    selectable: tuple[str, ...] = ()
    spec_required: bool = True
    said_by_rules: frozenset[tuple[str, str]] = frozenset()
    """(path, keyword) left out of the schema: a rule says it better."""


def said(text: str, *values: str) -> str:
    """CEL of a message. `format` is the one way to put text together whose cost the server can bound."""
    return f'"{text}".format([{", ".join(values)}])'


def value(who: str, path: str, empty: str = "''") -> str:
    """CEL: the value at `path` below `who`, or `empty` (CEL, too) where there is none.

    No optionals: the server takes their length for unbounded.
    """
    names = [f"__{name}__" if name in CEL_RESERVED else name for name in path.split(".")]
    steps = [".".join((who, *names[:end])) for end in range(1, len(names) + 1)]
    there = " && ".join(f"has({step})" for step in steps)
    return f"({there} ? {steps[-1]} : {empty})"


def immutable(field: str, remedy: str, empty: str = "''") -> Rule:
    """A text or number of the spec that stays. Not set and `empty` (CEL) are the same."""
    before, now = value("oldSelf", field, empty), value("self", field, empty)
    return Rule(
        at="spec",
        rule=f"{now} == {before}",
        message=f"spec.{field} cannot be changed; {remedy}",
        expression=said(f"spec.{field} cannot be changed from '%s' to '%s'; {remedy}", before, now),
    )


def same(field: str) -> str:
    """CEL: an object of the spec is as it was."""
    return (
        f"has(self.{field}) == has(oldSelf.{field}) && "
        f"(!has(self.{field}) || self.{field} == oldSelf.{field})"
    )


def name_rules(pattern: str, form: str, room: str) -> tuple[Rule, Rule]:
    return (
        Rule(
            at="",
            field=".metadata.name",
            rule=f"size(self.metadata.name) <= {NAME_MAX}",
            message=f"metadata.name has more than {NAME_MAX} characters; choose a shorter name",
            expression=said(
                f"metadata.name '%s' has %d characters; choose a name of at most {NAME_MAX}, which leaves "
                f"room for {room}",
                "self.metadata.name",
                "size(self.metadata.name)",
            ),
        ),
        Rule(
            at="",
            field=".metadata.name",
            rule=f"self.metadata.name.matches('{pattern}')",
            message=f"metadata.name is not valid; {form}",
            expression=said(f"metadata.name '%s' is not valid; {form}", "self.metadata.name"),
        ),
    )


def keys_rule(at: str, what: str, example: str) -> Rule:
    """The keys of a map: a structural schema bounds values alone."""
    sound = f"size(k) <= 316 && k.matches('{QUALIFIED_KEY_PATTERN}')"
    return Rule(
        at=at,
        rule=f"self.all(k, {sound})",
        message=f"a key is not the name of a {what}; write it as {example}",
        expression=said(
            f"'%s' is not the name of a {what}; write it as {example}",
            f"self.filter(k, !({sound}))[0]",
        ),
    )


OWN_NAMES: Final = name_rules(
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    "use lower-case letters, digits and hyphens, and begin and end with a letter or digit",
    "the names that are made of it",
)


def condition_column(name: str, type_: str, what: str, field: str = "status") -> Column:
    path = f'.status.conditions[?(@.type=="{type_}")].{field}'
    return Column(name=name, path=path, description=what, priority=int(field == "reason"))


AGE: Final = Column(
    name="Age",
    path=".metadata.creationTimestamp",
    type="date",
    description="How long ago it was made.",
)
REASON: Final = condition_column("Reason", "Ready", "Why it is ready, or not.", "reason")

# --- TrainingSession -----------------------------------------------------------------------------

ANOTHER: Final = "make another session"


def grows(field: str) -> Rule:
    path = f"limits.{field}"
    before, now = value("oldSelf", path, "0"), value("self", path, "0")
    return Rule(
        at="spec",
        rule=f"{now} >= {before}",
        message=f"spec.{path} may only grow; keep it or set more",
        expression=said(
            f"spec.{path} may only grow; it is %d and cannot become %s: keep it or set more",
            before,
            f"({now} == 0 ? 'unset' : string({now}))",
        ),
    )


def lora(who: str) -> str:
    """CEL: the adapter's numbers for a message."""
    return f"{value(who, 'lora.rank', '0')}, {value(who, 'lora.alpha', '0')}"


SESSION_RULES: Final = (
    *name_rules(
        "^[a-z]([-a-z0-9]*[a-z0-9])?$",
        "use lower-case letters, digits and hyphens, begin with a letter and end with a letter or digit",
        "the names of its pods",
    ),
    Rule(
        at="spec",
        rule="has(self.lora) != has(self.full)",
        message="spec needs exactly one of lora and full",
        expression="has(self.lora) ? 'spec.lora and spec.full are both set; leave one of them out' : "
        "'spec.lora and spec.full are both missing; set one of them, as lora: {}'",
    ),
    immutable("displayName", ANOTHER),
    immutable("clientToken", ANOTHER),
    immutable("baseModelRef.name", ANOTHER),
    immutable("baseModelRef.profile", ANOTHER, "'default'"),
    Rule(
        at="spec",
        rule=f"{same('lora')} && has(self.full) == has(oldSelf.full)",
        message=f"spec.lora and spec.full cannot be changed; {ANOTHER}",
        expression=said(
            "spec.lora and spec.full cannot be changed from rank %d, alpha %d, targets %s to rank %d, alpha %d, "
            f"targets %s; {ANOTHER}",
            lora("oldSelf"),
            value("oldSelf", "lora.targets", "[]"),
            lora("self"),
            value("self", "lora.targets", "[]"),
        ),
    ),
    immutable("workers", ANOTHER, "1"),
    Rule(
        at="spec",
        rule="oldSelf.desiredState != 'Stopped' || self.desiredState == 'Stopped'",
        message=f"spec.desiredState is Stopped, which is for good; {ANOTHER}",
        expression=said(
            f"spec.desiredState is Stopped, which is for good, and cannot become %s; {ANOTHER}",
            "self.desiredState",
        ),
    ),
    grows("pendingSeconds"),
    grows("wakeSeconds"),
    grows("lifetimeSeconds"),
    Rule(
        at="spec",
        rule="self.idle.parkAfterSeconds == 0 || self.idle.parkAfterSeconds >= 60",
        message="spec.idle.parkAfterSeconds is below 60; set 0 for never, or at least 60",
        expression=said(
            "spec.idle.parkAfterSeconds is %d; set 0 for never, or at least 60",
            "self.idle.parkAfterSeconds",
        ),
    ),
    Rule(
        at="spec",
        rule="self.failurePolicy.backoffMaxSeconds >= self.failurePolicy.backoffSeconds",
        message="spec.failurePolicy.backoffMaxSeconds is below backoffSeconds; raise it",
        expression=said(
            "spec.failurePolicy.backoffMaxSeconds is %d, below backoffSeconds, which is %d; raise the one or lower "
            "the other",
            "self.failurePolicy.backoffMaxSeconds",
            "self.failurePolicy.backoffSeconds",
        ),
    ),
    Rule(
        at="spec",
        rule="quantity(self.storage.size).compareTo(quantity(oldSelf.storage.size)) >= 0",
        message="spec.storage.size may only grow; keep it or set more",
        expression=said(
            "spec.storage.size may only grow; it is %s and cannot become %s: keep it or set more",
            "oldSelf.storage.size",
            "self.storage.size",
        ),
    ),
    immutable("storage.storageClassName", ANOTHER),
    immutable("storage.durability", ANOTHER, "'Volume'"),
    immutable("rateCardRef.name", ANOTHER),
    Rule(
        at="spec",
        rule="!has(self.budget) || !has(self.budget.maxTokens) || !has(self.budget.maxCost)",
        message="spec.budget has both maxTokens and maxCost; leave one of them out",
        expression=said(
            "spec.budget has both maxTokens %d and maxCost %s; leave one of them out",
            value("self", "budget.maxTokens", "0"),
            value("self", "budget.maxCost"),
        ),
    ),
    Rule(
        at="spec",
        rule=f"{value('self', 'budget.maxTokens', '1')} > 0",
        message="spec.budget.maxTokens is below 1; set at least 1, or leave it out for no bound",
        expression=said(
            "spec.budget.maxTokens is %d; set at least 1, or leave it out for no bound",
            value("self", "budget.maxTokens", "0"),
        ),
    ),
    Rule(
        at="spec",
        rule=value("self", "budget.maxCost", "'1'") + ".matches('[1-9]')",
        message="spec.budget.maxCost is 0; set more than 0, or leave it out for no bound",
        expression=said(
            "spec.budget.maxCost is %s; set more than 0, or leave it out for no bound",
            value("self", "budget.maxCost"),
        ),
    ),
    immutable("queueName", ANOTHER),
    immutable("priorityClassName", ANOTHER),
    Rule(
        at="spec",
        # Kubernetes lets every namespace use these: a session's pods would push the cluster's own aside.
        rule=f"!{value('self', 'priorityClassName')}.startsWith('system-')",
        message="spec.priorityClassName is one of the cluster's own classes; choose another, or leave it out",
        expression=said(
            "spec.priorityClassName is '%s', one of the cluster's own classes; choose another, or leave it out "
            "for the tenant's",
            value("self", "priorityClassName"),
        ),
    ),
    immutable("project", ANOTHER),
    immutable("output.path", ANOTHER),
    immutable("output.checkpointGroup", ANOTHER, "'sagemaker-default'"),
    immutable("encryption.keyRef", ANOTHER),
    immutable("serviceAccountName", ANOTHER),
    immutable("roleArn", ANOTHER),
)

SESSION: Final = Kind(
    model=TrainingSession,
    plural="trainingsessions",
    short="gms",
    selectable=(".status.state", ".spec.baseModelRef.name"),
    said_by_rules=frozenset({("spec.budget.maxTokens", "minimum"), ("spec.lora", "default")}),
    columns=(
        Column(
            name="State", path=".status.state", description="In the words of the SageMaker API."
        ),
        Column(
            name="Model", path=".spec.baseModelRef.name", description="The model that is trained."
        ),
        Column(
            name="Workers", path=".spec.workers", type="integer", description="Pods of the session."
        ),
        Column(
            name="Up",
            path=".status.workers.ready",
            type="integer",
            description="Pods that are ready.",
            priority=1,
        ),
        Column(
            name="Prefill",
            path=".status.usage.prefill",
            type="integer",
            description="Prompt tokens that were computed.",
        ),
        Column(
            name="Cached",
            path=".status.usage.cachedPrefill",
            type="integer",
            description="Prompt tokens that were found in the cache.",
            priority=1,
        ),
        Column(
            name="Sample",
            path=".status.usage.sample",
            type="integer",
            description="Tokens that were sampled.",
        ),
        Column(
            name="Train",
            path=".status.usage.train",
            type="integer",
            description="Tokens of training.",
        ),
        Column(
            name="Cost",
            path=".status.cost",
            description="What the tokens cost; the ledger is the truth.",
        ),
        condition_column("Parked", "Parked", "Whether its pods are away until the next call."),
        REASON,
        AGE,
    ),
    rules=SESSION_RULES,
)

# --- Tenant --------------------------------------------------------------------------------------

TENANT: Final = Kind(
    model=Tenant,
    plural="tenants",
    short="gmt",
    spec_required=False,
    columns=(
        Column(name="Namespace", path=".status.namespace", description="Where its sessions run."),
        Column(name="Account", path=".status.accountId", description="Its account in ARNs."),
        condition_column("Ready", "Ready", "Whether its sessions can start."),
        Column(
            name="Suspended",
            path=".spec.suspended",
            type="boolean",
            description="Whether it was suspended.",
        ),
        REASON,
        AGE,
    ),
    rules=(
        *OWN_NAMES,
        immutable("namespace", "make another tenant"),
        Rule(
            at="spec",
            rule=f"!({value('self', 'namespace')} in ['default', 'gristmill-system']) && "
            f"!{value('self', 'namespace')}.startsWith('kube-')",
            message="spec.namespace is a namespace of the system; leave it out or name another",
            expression=said(
                "spec.namespace '%s' is a namespace of the system; leave it out for gm-<name>, or name one of the "
                "tenant's own",
                value("self", "namespace"),
            ),
        ),
        Rule(
            at="spec",
            rule=value("self", "budget.hard", "'1'") + ".matches('[1-9]')",
            message="spec.budget.hard is 0; set more than 0, or suspend the tenant",
            expression=said(
                "spec.budget.hard is %s; set more than 0, leave budget out for no bound, or set suspended: true",
                value("self", "budget.hard"),
            ),
        ),
        Rule(
            at="spec.subjects[]",
            rule=f"(self.kind == 'ServiceAccount') == ({value('self', 'namespace')} != '')",
            message="a subject has a namespace if it is a ServiceAccount, and none otherwise",
            expression="self.kind == 'ServiceAccount' ? "
            + said("ServiceAccount '%s' has no namespace; name the one that it is in", "self.name")
            + " : "
            + said("%s '%s' has a namespace; leave it out", "self.kind", "self.name"),
        ),
        Rule(
            at="spec.keys[]",
            rule="!oldSelf.revoked || self.revoked",
            message="a revoked key stays revoked; add a key with another name",
            expression=said(
                "key '%s' is revoked, which is for good; add a key with another name", "self.name"
            ),
        ),
        *(
            Rule(
                at=at,
                rule="isCIDR(self)",
                message="an egress range is no CIDR; write it as 198.51.100.0/24",
                expression=said("'%s' is no CIDR; write it as 198.51.100.0/24", "self"),
            )
            for at in ("spec.network.egressCIDRs[]", "spec.network.egressProfiles[].cidrs[]")
        ),
        keys_rule("spec.quota.devices", "resource", "nvidia.com/gpu"),
        keys_rule("spec.nodePools[].nodeSelector", "label", "nvidia.com/gpu.product"),
    ),
)

# --- BaseModel -----------------------------------------------------------------------------------

OTHER_MODEL: Final = "make a BaseModel with another name"


def named_weights() -> str:
    """CEL: the names of the places that spec.weights names."""
    places = [f"{value('self', 'weights.path')} != '' ? 'path' : ''"]
    places += [
        f"has(self.weights) && has(self.weights.{name}) ? '{name}' : ''"
        for name in ("pvc", "hubRef", "image")
    ]
    return f"[{', '.join(places)}].filter(name, name != '')"


WEIGHTS: Final = named_weights()

BASE_MODEL: Final = Kind(
    model=BaseModelResource,
    plural="basemodels",
    short="gmm",
    said_by_rules=frozenset({("spec.image", "pattern")}),
    columns=(
        Column(name="Architecture", path=".spec.architecture", description="Class of the model."),
        Column(
            name="Context",
            path=".spec.contextLength",
            type="integer",
            description="Tokens that one sequence may have.",
        ),
        condition_column("Ready", "Ready", "Whether sessions can start on it."),
        condition_column("Weights", "WeightsAvailable", "Whether its weights are there."),
        condition_column(
            "Devices", "DevicesOffered", "Whether some node has the devices it needs."
        ),
        Column(
            name="Deprecated",
            path=".spec.deprecated",
            type="boolean",
            description="Whether it takes no new sessions.",
            priority=1,
        ),
        REASON,
        AGE,
    ),
    rules=(
        *OWN_NAMES,
        Rule(
            at="spec",
            rule=f"{value('self', 'image')}.matches('^[a-z0-9./:_-]+@sha256:[a-f0-9]{{64}}$')",
            message="spec.image must name the worker's image by digest",
            expression=said(
                "spec.image '%s' is no image by digest; name the worker's image as "
                "registry/name@sha256:<64 hex digits>",
                value("self", "image"),
            ),
        ),
        immutable("image", OTHER_MODEL),
        Rule(
            at="spec",
            rule=same("weights"),
            message=f"spec.weights cannot be changed; {OTHER_MODEL}",
        ),
        immutable("architecture", OTHER_MODEL),
        Rule(
            at="spec",
            rule=f"{WEIGHTS}.size() == 1",
            message="spec.weights needs exactly one of path, pvc, hubRef and image",
            expression=said(
                "spec.weights has %s; set exactly one of path, pvc, hubRef and image", WEIGHTS
            ),
        ),
        Rule(
            at="spec.profiles[]",
            rule="!has(self.device) || !has(self.dra)",
            message="a profile has both device and dra; leave one of them out",
            expression=said(
                "profile '%s' has both device and dra; leave one of them out", "self.name"
            ),
        ),
        keys_rule("spec.profiles[].nodeSelector", "label", "nvidia.com/gpu.product"),
    ),
)

# --- RateCard ------------------------------------------------------------------------------------

SAME_MODEL: Final = "self.prices.filter(q, q.model == p.model).size()"

RATE_CARD: Final = Kind(
    model=RateCard,
    plural="ratecards",
    short="gmr",
    columns=(
        Column(name="Currency", path=".spec.currency", description="Currency of the prices."),
        Column(
            name="From",
            path=".spec.effectiveFrom",
            description="From when on the prices hold.",
        ),
        condition_column("Recorded", "Recorded", "Whether the ledger holds the prices."),
        condition_column("Reason", "Recorded", "Why it holds them, or not.", "reason"),
        AGE,
    ),
    rules=(
        *OWN_NAMES,
        Rule(
            at="spec",
            rule="self == oldSelf",
            message="spec of a RateCard cannot be changed; make a RateCard with another name and a later "
            "effectiveFrom",
        ),
        Rule(
            at="spec",
            rule=f"self.prices.all(p, {SAME_MODEL} == 4)",
            message="spec.prices needs a price for each of prefill, cached_prefill, sample and train of every model",
            expression=said(
                "spec.prices has %d of the 4 prices of model '%s'; give one each for prefill, cached_prefill, sample "
                "and train",
                f"self.prices.filter(p, {SAME_MODEL} != 4).map(p, {SAME_MODEL})[0]",
                f"self.prices.filter(p, {SAME_MODEL} != 4)[0].model",
            ),
        ),
    ),
)

KINDS: Final = (SESSION, TENANT, BASE_MODEL, RATE_CARD)
