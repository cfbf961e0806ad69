"""Reads a JSON body into a typed request, and says in words what is wrong with it.

Strict: no coercion, no unknown keys, no NaN. A null is an absent field, as on the real wire.
"""

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_pascal

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError

R = TypeVar("R", bound="Request")

VALUE_CHARS_SHOWN: Final = 100
PROBLEMS_SHOWN: Final = 5

_NAME_PATTERN: Final = r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$"
_TAG_PATTERN: Final = r"^[\p{L}\p{Z}\p{N}_.:/=+\-@]*$"

EntityName = Annotated[str, Field(min_length=1, max_length=63, pattern=_NAME_PATTERN)]
MaxResults = Annotated[int, Field(ge=1, le=limits.LIST_PAGE_MAX)]
NextToken = Annotated[str, Field(max_length=limits.NEXT_TOKEN_CHARS_MAX)]
NameContains = Annotated[str, Field(max_length=63, pattern=r"^[a-zA-Z0-9-]*$")]
EpochSeconds = Annotated[float, Field(ge=-1e11, le=1e11, allow_inf_nan=False)]
"""A JSON 1.1 timestamp: seconds since 1970."""


class Request(BaseModel):
    """Base of all request shapes: members in PascalCase, unknown ones refused."""

    model_config = ConfigDict(alias_generator=to_pascal, extra="forbid", strict=True, frozen=True)


class Tag(Request):
    key: Annotated[str, Field(min_length=1, max_length=128, pattern=_TAG_PATTERN)]
    value: Annotated[str, Field(max_length=256, pattern=_TAG_PATTERN)]


def read_request(shape: type[R], operation: str, body: dict[str, Any]) -> R:
    """The request of an operation. Raises InvalidRequestError naming every wrong field and its value."""
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise InvalidRequestError(_describe(error, shape, operation)) from error


def check_tags(tags: list[Tag] | None) -> None:
    """Tag keys are unique and not in the reserved `aws:` space. Raises InvalidRequestError."""
    keys = [tag.key for tag in tags or ()]
    for index, key in enumerate(keys):
        if key.lower().startswith("aws:"):
            raise InvalidRequestError(
                f"Tags[{index}].Key {key!r} begins with the reserved prefix aws:"
            )
        if key in keys[:index]:
            raise InvalidRequestError(f"Tags[{index}].Key {key!r} is given twice; keep one of them")


def _describe(error: ValidationError, shape: type[Request], operation: str) -> str:
    problems = error.errors(include_url=False, include_context=False)
    shown = [_problem(problem) for problem in problems[:PROBLEMS_SHOWN]]
    rest = len(problems) - len(shown)
    more = f"; and {rest} more" if rest else ""
    text = f"{operation} was refused: {'; '.join(shown)}{more}"
    if any(problem["type"] == "extra_forbidden" for problem in problems):
        text += f". Members of {operation}: {', '.join(_members(shape))}"
    return text


def _problem(
    problem: Any,
) -> str:  # Any: pydantic's ErrorDetails is a TypedDict without a public name
    where = _path(problem["loc"])
    if problem["type"] == "missing":
        return f"{where} is required and missing"
    if problem["type"] == "extra_forbidden":
        return f"{where} is not a member"
    return f"{where} = {_shown(problem['input'])}: {problem['msg']}"


def _path(location: tuple[str | int, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{_shown_key(part)}" if path else _shown_key(part)
    return path or "the body"


def _shown_key(key: str) -> str:
    return key if key.isalnum() and len(key) <= VALUE_CHARS_SHOWN else _shown(key)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= VALUE_CHARS_SHOWN else text[:VALUE_CHARS_SHOWN] + "..."


def _members(shape: type[Request]) -> list[str]:
    return [str(field.alias) for field in shape.model_fields.values()]
