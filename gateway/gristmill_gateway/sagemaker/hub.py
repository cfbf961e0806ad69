"""Base models as the contents of the one hub there is. Pure."""

import json
import re
from typing import Any, Final

from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.errors import InvalidRequestError, NotFoundError
from gristmill_gateway.sagemaker import arns
from gristmill_gateway.sagemaker.arns import BaseModelName
from gristmill_gateway.sagemaker.registry_validate import ListHubContents

Shape = dict[str, Any]  # Any: a shape of the service model as JSON

CAPABILITY_KEYWORD: Final = "@capability:training_session"
"""The SDK lists only models that carry it."""
ID_KEYWORD: Final = "@huggingface-id:"
KEYWORD_CHARS_MAX: Final = 255
DESCRIPTION_CHARS_MAX: Final = 1023
SCHEMA_VERSION: Final = "2.3.0"


def check_hub(text: str) -> None:
    """Raises InvalidRequestError for no name, NotFoundError for another hub than ours."""
    name = arns.parse_hub(text)
    if name != arns.HUB_NAME:
        raise NotFoundError(f"hub {name!r} does not exist; the only hub here is {arns.HUB_NAME}")


def find_model(wanted: BaseModelName, models: list[BaseModelResource]) -> BaseModelResource:
    """The model of a hub content ARN. Raises NotFoundError listing what there is."""
    if wanted.hub != arns.HUB_NAME:
        raise NotFoundError(
            f"hub {wanted.hub!r} does not exist; the only hub here is {arns.HUB_NAME}"
        )
    model = require_model(wanted.name, models)
    require_version(wanted.version, wanted.name)
    return model


def require_model(name: str, models: list[BaseModelResource]) -> BaseModelResource:
    """The model of a content name: its own name, else its Hugging Face id spelt as one.

    Raises NotFoundError listing what there is, InvalidRequestError if the id is that of several.
    """
    for model in models:
        if model.metadata.name == name:
            return model
    found = [model for model in models if _spelt(name) in _ids(model)]
    names = ", ".join(sorted(model.metadata.name for model in found or models))
    if len(found) > 1:
        raise InvalidRequestError(
            f"base model {name!r} may be any of {names}; use one of these names"
        )
    if not found:
        raise NotFoundError(
            f"base model {name!r} does not exist; there {f'are: {names}' if names else 'is none yet'}"
        )
    return found[0]


def _ids(model: BaseModelResource) -> set[str]:
    """Its Hugging Face id as content names: whole, and without the provider."""
    identity = model.spec.hugging_face_id
    return {_spelt(identity), _spelt(identity.rpartition("/")[2])} if identity else set()


def _spelt(text: str) -> str:
    """Content names have neither slashes nor dots, and case does not matter."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def summary(model: BaseModelResource, region: str) -> Shape:
    """HubContentInfo."""
    return {
        "HubContentName": model.metadata.name,
        "HubContentArn": arns.model_arn(region, model.metadata.name),
        "HubContentVersion": arns.MODEL_VERSION,
        "HubContentType": "Model",
        "DocumentSchemaVersion": SCHEMA_VERSION,
        "HubContentDisplayName": model.metadata.name,
        "HubContentDescription": _description(model),
        "SupportStatus": "Supported",
        "HubContentSearchKeywords": keywords(model),
        "HubContentStatus": "Available",
        "CreationTime": model.metadata.creation_time_us / 1e6,
    }


def describe(model: BaseModelResource, region: str) -> Shape:
    """DescribeHubContentResponse."""
    detail = summary(model, region)
    return detail | {
        "HubName": arns.HUB_NAME,
        "HubArn": arns.hub_arn(region),
        "HubContentDocument": json.dumps(document(model)),
        "LastModifiedTime": detail["CreationTime"],
    }


def describe_hub(region: str, models: list[BaseModelResource]) -> Shape:
    """DescribeHubResponse. A hub is as old as its first model."""
    times = [model.metadata.creation_time_us / 1e6 for model in models]
    return {
        "HubName": arns.HUB_NAME,
        "HubArn": arns.hub_arn(region),
        "HubDescription": "The base models of this installation",
        "HubStatus": "InService",
        "CreationTime": min(times, default=0),
        "LastModifiedTime": max(times, default=0),
    }


def keywords(model: BaseModelResource) -> list[str]:
    """HubContentSearchKeywords. An id counts for the SDK only if it holds a slash."""
    found = [CAPABILITY_KEYWORD]
    identity = f"{ID_KEYWORD}{model.spec.hugging_face_id.lower()}"
    if "/" in model.spec.hugging_face_id and len(identity) <= KEYWORD_CHARS_MAX:
        found.append(identity)
    return found


def document(model: BaseModelResource) -> Shape:
    """The hub document, of which the SDK reads HuggingfaceId: what it loads the tokenizer by."""
    spec = model.spec
    facts = {
        "Architecture": spec.architecture,
        "VocabularySize": spec.vocabulary_size,
        "ContextLength": spec.context_length,
        "Dtype": spec.dtype,
        "Revision": spec.revision,
    }
    identity = {"HuggingfaceId": spec.hugging_face_id} if spec.hugging_face_id else {}
    return identity | {"Capabilities": ["TRAINING_SESSION"]} | {k: v for k, v in facts.items() if v}


def choose(models: list[BaseModelResource], request: ListHubContents) -> list[BaseModelResource]:
    """The models that pass the filters of a list, in its order: by default the newest first."""
    found = [model for model in models if _passes(model, request)]
    by_name = request.sort_by == "HubContentName"
    return sorted(
        found,
        key=lambda m: ("" if by_name else m.metadata.creation_time_us, m.metadata.name),
        reverse=request.sort_order != "Ascending",
    )


def index_behind(models: list[BaseModelResource], name: str) -> int:
    """Where the page behind the model `name` begins; at the start if it was removed meanwhile."""
    names = [model.metadata.name for model in models]
    return names.index(name) + 1 if name in names else 0


def _passes(model: BaseModelResource, request: ListHubContents) -> bool:
    created = model.metadata.creation_time_us / 1e6
    return (
        request.hub_content_type == "Model"
        and (request.name_contains or "") in model.metadata.name
        and _version(request.max_schema_version or SCHEMA_VERSION) >= _version(SCHEMA_VERSION)
        and (request.creation_time_after is None or created > request.creation_time_after)
        and (request.creation_time_before is None or created < request.creation_time_before)
    )


def _version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def require_model_type(kind: str, name: str) -> None:
    """Raises NotFoundError for another kind of content than models."""
    if kind != "Model":
        raise NotFoundError(
            f"{kind} {name!r} does not exist; this hub holds contents of type Model alone"
        )


def require_version(version: str | None, name: str) -> None:
    """Raises NotFoundError for another version than the one there is."""
    if version not in (None, arns.MODEL_VERSION):
        raise NotFoundError(
            f"base model {name!r} has no version {version}; the only one is {arns.MODEL_VERSION}"
        )


def _description(model: BaseModelResource) -> str:
    spec = model.spec
    parts = [spec.architecture, spec.dtype]
    parts += [f"context {spec.context_length}"] if spec.context_length else []
    return ", ".join(part for part in parts if part)[:DESCRIPTION_CHARS_MAX]
