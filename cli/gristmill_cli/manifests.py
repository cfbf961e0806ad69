"""Manifests: YAML in the shape of the custom resources, read strictly and put into the store."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import yaml
from pydantic import ValidationError

from gristmill_cli.errors import CommandError
from gristmill_contracts import labels
from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.rate_card import RateCard, check_prices
from gristmill_contracts.resources import GROUP_VERSION, Resource
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_sessions.identity import session_name
from gristmill_sessions.port import ResourceStore

Applied = TrainingSession | Tenant | RateCard
"""What is put into the store as it is."""
Manifest = Applied | BaseModelResource

KINDS: Final[Mapping[str, type[Manifest]]] = {
    "TrainingSession": TrainingSession,
    "Tenant": Tenant,
    "RateCard": RateCard,
    "BaseModel": BaseModelResource,
}
SETTABLE: Final = ("name", "namespace", "labels", "annotations")
"""Fields of metadata that a manifest may set; the others are the store's."""
MANIFEST_BYTES_MAX: Final = 4 * 2**20
IMMUTABLE: Final = (
    "display_name", "client_token", "base_model_ref", "lora", "full", "workers", "rate_card_ref", "queue_name",
    "priority_class_name", "project", "output", "encryption", "service_account_name", "role_arn",
)  # fmt: skip
TRIES_MAX: Final = 10

Outcome = Literal["created", "configured", "unchanged"]


def read_manifests(text: str, source: str, namespace: str) -> list[Manifest]:
    """All documents, or none: raises CommandError naming document, field and value."""
    if len(text.encode()) > MANIFEST_BYTES_MAX:
        raise CommandError(f"{source} is over {MANIFEST_BYTES_MAX} bytes; split it")
    try:
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise CommandError(f"{source} is not YAML: {_one_line(error)}") from error
    if not documents:
        raise CommandError(f"{source} holds no resource")
    return [
        _read(document, f"{source}, document {number}", namespace)
        for number, document in enumerate(documents, 1)
    ]


def _read(document: object, where: str, namespace: str) -> Manifest:
    if not isinstance(document, dict):
        raise CommandError(f"{where}: a resource is a mapping, not {type(document).__name__}")
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CommandError(f"{where}: kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if document.get("apiVersion") != GROUP_VERSION:
        raise CommandError(
            f"{where}: apiVersion is {document.get('apiVersion')!r}; it must be {GROUP_VERSION!r}"
        )
    body = {name: value for name, value in document.items() if name != "status"}
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        for name in metadata:
            if name not in SETTABLE:
                raise CommandError(
                    f"{where}: metadata.{name} cannot be set; set {', '.join(SETTABLE)} alone"
                )
        body["metadata"] = {"namespace": namespace, **metadata}
    try:
        # Names are those of YAML: without this, snake_case would pass as well.
        resource = KINDS[kind].model_validate(body, by_alias=True, by_name=False)
        if isinstance(resource, RateCard):
            check_prices(resource.spec)
    except ValidationError as error:
        raise CommandError(f"{where}: {'; '.join(_problems(error))}") from error
    except ValueError as error:
        raise CommandError(f"{where}: {error}") from error
    return resource


def _problems(error: ValidationError) -> Iterator[str]:
    for each in error.errors(include_url=False):
        field = ".".join(str(part) for part in each["loc"]) or "the resource"
        if each["type"] == "extra_forbidden":
            yield f"unknown field {field}"
        elif each["type"] == "missing":
            yield f"{field} is missing"
        else:
            yield f"{field} is {each['input']!r}: {each['msg']}"


def apply(store: ResourceStore, wanted: Applied) -> Outcome:
    """Make the store hold it. Raises CommandError where that is not allowed."""
    for _ in range(TRIES_MAX):
        try:
            return _apply_once(store, wanted)
        except ConflictError:
            continue
    raise CommandError(f"{label(wanted)} is changing too fast to be applied now; try again")


def _apply_once(store: ResourceStore, wanted: Applied) -> Outcome:
    meta = wanted.metadata
    try:
        known = store.get(type(wanted), meta.namespace, meta.name)
    except NotFoundError:
        if isinstance(wanted, TrainingSession):
            _check_display_name(store, wanted)
        store.create(wanted)
        return "created"
    changed = merge(known, wanted)
    if changed == known:
        return "unchanged"
    store.update(changed)
    return "configured"


def merge(known: Applied, wanted: Applied) -> Applied:
    """`known` as `wanted` has it: spec replaced, labels and annotations added to. Raises CommandError."""
    if known.metadata.deletion_time_us is not None:
        raise CommandError(f"{label(known)} is being deleted; wait until it is gone")
    if isinstance(known, TrainingSession) and isinstance(wanted, TrainingSession):
        check_change(known, wanted)
    if isinstance(known, RateCard) and known.spec != wanted.spec:
        raise CommandError(
            f"{label(known)}: the prices of a card never change; apply a RateCard with another name and a later "
            "effectiveFrom"
        )
    metadata = known.metadata.model_copy(
        update={
            "labels": {**known.metadata.labels, **wanted.metadata.labels},
            "annotations": {**known.metadata.annotations, **wanted.metadata.annotations},
        }
    )
    return known.model_copy(update={"metadata": metadata, "spec": wanted.spec})


def check_change(known: TrainingSession, wanted: TrainingSession) -> None:
    """What a session is made of stays; a stop is for good; a limit only grows."""
    minted = known.metadata.annotations.get(labels.SESSION_ID)
    if minted and wanted.metadata.annotations.get(labels.SESSION_ID, minted) != minted:
        raise CommandError(
            f"{label(known)}: annotation {labels.SESSION_ID} is {minted!r} for good; leave it out"
        )
    for name in IMMUTABLE:
        before, after = getattr(known.spec, name), getattr(wanted.spec, name)
        if before != after:
            raise CommandError(
                f"{label(known)}: spec.{_alias(known, name)} cannot be changed from {_shown(before)} to "
                f"{_shown(after)}; make another session"
            )
    if known.spec.desired_state == "Stopped" and wanted.spec.desired_state != "Stopped":
        raise CommandError(
            f"{label(known)}: spec.desiredState is Stopped, which is for good; make another session"
        )
    for name in ("pending_seconds", "wake_seconds", "lifetime_seconds"):
        before, after = getattr(known.spec.limits, name), getattr(wanted.spec.limits, name)
        if before is not None and (after is None or after < before):
            raise CommandError(
                f"{label(known)}: spec.limits.{_alias_of_limits(name)} may only grow; it is {before}, not {after}"
            )


def _check_display_name(store: ResourceStore, wanted: TrainingSession) -> None:
    name = session_name(wanted)
    for other in store.list(TrainingSession, wanted.metadata.namespace):
        if session_name(other) == name:
            raise CommandError(
                f"{label(wanted)}: the name {name!r} is taken by {label(other)}; choose another displayName"
            )


def label(resource: Resource) -> str:
    """`trainingsession.gristmill.dev/name`, as kubectl writes it."""
    return f"{resource.kind.lower()}.gristmill.dev/{resource.metadata.name}"


def as_manifest(resource: Resource) -> dict[str, Any]:  # Any: JSON
    """The resource as YAML has it, without what is empty in metadata."""
    data = resource.model_dump(by_alias=True, mode="json")
    data["metadata"] = {name: value for name, value in data["metadata"].items() if value}
    return data


def _alias(session: TrainingSession, name: str) -> str:
    return type(session.spec).model_fields[name].alias or name


def _alias_of_limits(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


def _shown(value: object) -> str:
    dump = getattr(value, "model_dump", None)
    return repr(dump(by_alias=True) if dump is not None else value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
