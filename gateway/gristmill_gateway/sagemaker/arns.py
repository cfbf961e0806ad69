"""ARNs: made from and read into plain names. Pure.

The account field is the tenant's 12-digit account id. The region is whatever the caller signed for:
we run in one place, so a region in an ARN is carried along and never decides anything.
"""

import re
from typing import Final, NamedTuple

from gristmill_contracts.errors import ForbiddenError, InvalidRequestError

HUB_NAME: Final = "SageMakerPublicHub"
MODEL_VERSION: Final = "1.0.0"
"""Base models are immutable: a new version is a model with another name."""

_NAME: Final = r"[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,62}"
_BASE_MODEL: Final = re.compile(
    r"arn:[a-z0-9.-]{1,63}:sagemaker:[a-zA-Z0-9]+(?:-[a-zA-Z0-9]+)+:(?:[0-9]{12}|aws):hub-content/"
    rf"({_NAME})/Model/([a-zA-Z0-9](?:-*[a-zA-Z0-9]){{0,63}})(?:/([0-9]{{1,4}}(?:\.[0-9]{{1,4}}){{2}}))?"
)
_GROUP: Final = re.compile(
    r"(?:arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:([0-9]{12}):model-package-group/)?" + f"({_NAME})"
)
_PACKAGE: Final = re.compile(
    r"(?:arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:([0-9]{12}):model-package/)?"
    + rf"({_NAME})/([0-9]{{1,9}})"
)
_HUB: Final = re.compile(
    r"(?:arn:[a-z0-9.-]{1,63}:sagemaker:[a-zA-Z0-9]+(?:-[a-zA-Z0-9]+)+:(?:[0-9]{12}|aws):hub/)?"
    + f"({_NAME})"
)


class Scope(NamedTuple):
    """The two fields every ARN of a caller carries."""

    region: str
    account_id: str


class BaseModelName(NamedTuple):
    hub: str
    name: str
    version: str | None


class PackageName(NamedTuple):
    """A model package: a version, from 1, in a model package group."""

    group: str
    version: int


def session_arn(scope: Scope, name: str) -> str:
    return f"arn:aws:sagemaker:{scope.region}:{scope.account_id}:training-session/{name}"


def group_arn(scope: Scope, name: str) -> str:
    return f"arn:aws:sagemaker:{scope.region}:{scope.account_id}:model-package-group/{name}"


def package_arn(scope: Scope, package: PackageName) -> str:
    return (
        f"arn:aws:sagemaker:{scope.region}:{scope.account_id}:model-package/"
        f"{package.group}/{package.version}"
    )


def hub_arn(region: str) -> str:
    return f"arn:aws:sagemaker:{region}:aws:hub/{HUB_NAME}"


def model_arn(region: str, name: str) -> str:
    """The hub content ARN of a base model, as the SDK builds it from a model package."""
    return f"arn:aws:sagemaker:{region}:aws:hub-content/{HUB_NAME}/Model/{name}/{MODEL_VERSION}"


def parse_base_model(text: str) -> BaseModelName:
    """Read a hub content ARN of a model. Raises InvalidRequestError."""
    match = _BASE_MODEL.fullmatch(text)
    if match is None:
        raise InvalidRequestError(
            f"BaseModelArn {text!r} is not of the form arn:aws:sagemaker:<region>:<12 digits or aws>:"
            f"hub-content/{HUB_NAME}/Model/<name>[/<version>]; ListHubContents shows the ARNs there are"
        )
    return BaseModelName(match.group(1), match.group(2), match.group(3))


def parse_group(text: str, account_id: str) -> str:
    """The name of a model package group, from its name or ARN.

    Raises InvalidRequestError, and ForbiddenError for another account's.
    """
    match = _GROUP.fullmatch(text)
    if match is None:
        raise InvalidRequestError(
            f"model package group {text!r} is neither a name of 1 to 63 letters, digits and hyphens "
            f"nor an ARN of the form {group_arn(Scope('<region>', account_id), '<name>')}"
        )
    _check_account(text, match.group(1), account_id)
    return match.group(2)


def parse_package(text: str, account_id: str) -> PackageName:
    """Read a model package's ARN or `<group>/<version>`.

    Raises InvalidRequestError, and ForbiddenError for another account's.
    """
    match = _PACKAGE.fullmatch(text)
    if match is None or int(match.group(3)) < 1:
        raise InvalidRequestError(
            f"model package {text!r} is not an ARN of the form "
            f"{package_arn(Scope('<region>', account_id), PackageName('<group>', 1))}; the version "
            "at its end counts from 1"
        )
    _check_account(text, match.group(1), account_id)
    return PackageName(match.group(2), int(match.group(3)))


def parse_hub(text: str) -> str:
    """The name of a hub, from its name or ARN. Raises InvalidRequestError."""
    match = _HUB.fullmatch(text)
    if match is None:
        raise InvalidRequestError(
            f"HubName {text!r} is neither a hub's name nor its ARN; use {HUB_NAME}"
        )
    return match.group(1)


def _check_account(text: str, found: str | None, account_id: str) -> None:
    if found is not None and found != account_id:
        raise ForbiddenError(
            f"{text!r} belongs to account {found}, and the caller's account is {account_id}; "
            "use an ARN of the caller's own account"
        )
