"""Objects of the API server as our resources, and what to patch. Pure."""

from functools import lru_cache
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.resources import GROUP_VERSION, Metadata, Model, Resource
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_operator.seams import Json

R = TypeVar("R", bound=Resource)
_METADATA: Final = frozenset(field.alias or name for name, field in Metadata.model_fields.items())
UNKNOWN_MAX: Final = 64


def session_from(body: Json) -> TrainingSession:
    return read(TrainingSession, body)


def tenant_from(body: Json) -> Tenant:
    return read(Tenant, body)


def model_from(body: Json) -> BaseModelResource:
    return read(BaseModelResource, body)


def card_from(body: Json) -> RateCard:
    return read(RateCard, body)


def read(kind: type[R], body: Json) -> R:
    """Fields that this version does not know are left out: a newer version may have written them.

    Raises InvalidRequestError that names the field whose value cannot be read, and what is allowed.
    """
    document = {
        "apiVersion": GROUP_VERSION,
        "kind": kind.model_fields["kind"].default,
        "metadata": {name: each for name, each in body["metadata"].items() if name in _METADATA},
        **{part: body[part] for part in ("spec", "status") if body.get(part) is not None},
    }
    document["metadata"].setdefault("namespace", "")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        if not unknown or len(unknown) > UNKNOWN_MAX:
            raise _unreadable(document, error) from error
    for path in unknown:
        document = _without(document, path)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _unreadable(document, error) from error


def _unreadable(document: Json, error: ValidationError) -> InvalidRequestError:
    first, meta = error.errors()[0], document["metadata"]
    where = ".".join(str(part) for part in first["loc"])
    return InvalidRequestError(
        f"{document['kind']} {meta['namespace']}/{meta['name']} cannot be read: {where}: "
        f"{first['msg']}, not {first['input']!r:.200}. A newer version of Gristmill may have written "
        "it: upgrade the operator, or change the field"
    )


def _without(value: Any, path: tuple[int | str, ...]) -> Any:  # Any: JSON
    """A copy of `value` without what lies at `path`."""
    head, *rest = path
    if isinstance(value, dict) and head in value:
        if not rest:
            return {name: each for name, each in value.items() if name != head}
        return value | {head: _without(value[head], tuple(rest))}
    if isinstance(value, list) and isinstance(head, int) and rest:
        return [_without(e, tuple(rest)) if i == head else e for i, e in enumerate(value)]
    return value


def status_patch(body: Json, status: Model) -> Json | None:
    """JSON merge patch from the status in `body` to `status`; None = they are the same.

    It carries the resourceVersion: a status that was decided on something older is refused. Fields of
    the status that this version does not know are left as they are.
    """
    known = body.get("status") or {}
    fresh = status.model_dump(mode="json", by_alias=True)
    defaults = _defaults(type(status))
    changes = _difference(known, fresh, defaults)
    if not changes:
        return None
    # Whoever reads without our defaults, as kubectl does, should see the first state, too.
    words = {name: value for name, value in fresh.items() if isinstance(value, str) and value}
    changes = {name: value for name, value in words.items() if name not in known} | changes
    version = body["metadata"]["resourceVersion"]
    return {"metadata": {"resourceVersion": version}, "status": changes}


@lru_cache(maxsize=16)
def _defaults(kind: type[Model]) -> Json:
    return kind().model_dump(mode="json", by_alias=True)


def _difference(known: Json, fresh: Json, defaults: Json) -> Json:
    """What to merge into `known`. A default that was never written needs no writing."""
    changes: Json = {}
    for name, value in fresh.items():
        if name not in known:
            if value is not None and value != defaults.get(name):
                changes[name] = value
        elif value is None:
            changes[name] = None
        elif isinstance(value, dict) and isinstance(known[name], dict):
            deeper = _difference(known[name], value, defaults.get(name) or {})
            if deeper:
                changes[name] = deeper
        elif not _same(known[name], value):
            changes[name] = value
    return changes


def _same(known: Any, fresh: Any) -> bool:  # Any: JSON
    """Equal, where fields of a list's items that are empty may as well be missing."""
    if isinstance(known, list) and isinstance(fresh, list):
        return [_full(each) for each in known] == [_full(each) for each in fresh]
    return bool(known == fresh)


def _full(item: Any) -> Any:  # Any: JSON
    if not isinstance(item, dict):
        return item
    return {name: each for name, each in item.items() if each not in (None, "", 0)}
