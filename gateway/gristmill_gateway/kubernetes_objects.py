"""Our resources as objects of the API server, and back. Pure.

What comes from the API server may be of a newer version than this process: fields that we do not know
are left out on reading, and never sent back, for a change is sent as a patch of what changed alone.
"""

from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.resources import GROUP, GROUP_VERSION, VERSION, Metadata, Resource
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant

R = TypeVar("R", bound=Resource)
Json = dict[str, Any]  # Any: an object of the API server


class Collection(NamedTuple):
    """Where the objects of a kind are found."""

    plural: str
    namespaced: bool


COLLECTIONS: Final[dict[type[Resource], Collection]] = {
    TrainingSession: Collection("trainingsessions", namespaced=True),
    Tenant: Collection("tenants", namespaced=False),
    BaseModelResource: Collection("basemodels", namespaced=False),
}
SESSIONS: Final = COLLECTIONS[TrainingSession].plural
_METADATA: Final = frozenset(field.alias or name for name, field in Metadata.model_fields.items())
_SERVER_MADE: Final = frozenset(
    {"uid", "resource_version", "generation", "creation_time_us", "deletion_time_us"}
)


def path_of(
    kind: type[Resource], namespace: str = "", name: str = "", subresource: str = ""
) -> str:
    """Path of an object, or of a collection; `namespace` "" = of all namespaces."""
    collection = COLLECTIONS[kind]
    parts = [f"/apis/{GROUP}/{VERSION}"]
    if collection.namespaced and namespace:
        parts += ["namespaces", quote(namespace, safe="")]
    parts += [collection.plural, *(quote(part, safe="") for part in (name, subresource) if part)]
    return "/".join(parts)


def read_object(kind: type[R], content: Json) -> R:
    """An object as our resource. Raises ValueError where it is not of our shape.

    What we do not know is dropped; so are the parts of its metadata that nobody here needs.
    """
    metadata = {k: v for k, v in content.get("metadata", {}).items() if k in _METADATA}
    metadata.setdefault("namespace", "")
    document = {
        "apiVersion": GROUP_VERSION,
        "kind": content.get("kind") or kind.model_fields["kind"].default,
        "metadata": metadata,
        **{part: content[part] for part in ("spec", "status") if content.get(part) is not None},
    }
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        if not unknown:
            raise
        for path in unknown:
            document = _without(document, path)
    return kind.model_validate(document)


def _without(value: Any, path: tuple[int | str, ...]) -> Any:  # Any: JSON
    """A copy of `value` without what lies at `path`."""
    head, *rest = path
    if isinstance(value, dict):
        if not rest:
            return {key: each for key, each in value.items() if key != head}
        return value | {head: _without(value[head], tuple(rest))} if head in value else value
    if isinstance(value, list) and isinstance(head, int) and rest:
        return [_without(e, tuple(rest)) if i == head else e for i, e in enumerate(value)]
    return value


def object_to_create(resource: Resource) -> Json:
    """What to send to make it: only what was said, so that the cluster's own defaults hold."""
    metadata = resource.metadata.model_dump(
        mode="json", by_alias=True, exclude=set(_SERVER_MADE), exclude_defaults=True
    )
    metadata["name"] = resource.metadata.name
    spec = getattr(resource, "spec", None)
    content: Json = {
        "apiVersion": GROUP_VERSION,
        "kind": resource.kind,
        "metadata": metadata,
    }
    if spec is not None:
        content["spec"] = spec.model_dump(
            mode="json", by_alias=True, exclude_unset=True, exclude_none=True
        )
    return content


def patch_between(before: Resource, after: Resource) -> Json:
    """A JSON merge patch from one version to the next of metadata and spec; {} = nothing changed.

    It holds the version that it was made on, so that the API server refuses it on any other.
    """
    old, new = _parts(before), _parts(after)
    changes = _difference(old, new)
    if changes:
        changes.setdefault("metadata", {})["resourceVersion"] = str(after.metadata.resource_version)
    return changes


def status_patch(after: Resource) -> Json:
    """A merge patch of the status alone."""
    status = getattr(after, "status", None)
    return {
        "metadata": {"resourceVersion": str(after.metadata.resource_version)},
        "status": None if status is None else status.model_dump(mode="json", by_alias=True),
    }


def _parts(resource: Resource) -> Json:
    dumped = resource.model_dump(mode="json", by_alias=True, include={"metadata", "spec"})
    kept = ("labels", "annotations", "finalizers")
    dumped["metadata"] = {name: dumped["metadata"][name] for name in kept}
    return dumped


def _difference(old: Json, new: Json) -> Json:
    """RFC 7386: null removes, objects are merged, all else is replaced."""
    changes: Json = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if value == before:
            continue
        nested = isinstance(value, dict) and isinstance(before, dict)
        changes[name] = _difference(before, value) if nested else value  # type: ignore[arg-type]
    return changes
