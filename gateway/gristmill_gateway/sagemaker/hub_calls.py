"""Answers the hub operations from the base models of the store."""

import asyncio
from typing import Any

from gristmill_contracts import limits
from gristmill_contracts.base_model import BaseModelResource
from gristmill_gateway.sagemaker import control_pages, hub
from gristmill_gateway.sagemaker.control_context import Caller, Context
from gristmill_gateway.sagemaker.control_fields import read_request
from gristmill_gateway.sagemaker.registry_validate import (
    DescribeHub,
    DescribeHubContent,
    ListHubContents,
)

Body = dict[str, Any]  # Any: JSON


async def list_models(context: Context) -> list[BaseModelResource]:
    """All base models: they are the installation's, not a tenant's."""
    return await asyncio.to_thread(context.store.list, BaseModelResource, None)


async def describe_hub(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(DescribeHub, "DescribeHub", body)
    hub.check_hub(request.hub_name)
    return hub.describe_hub(caller.scope.region, await list_models(context))


async def describe_hub_content(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(DescribeHubContent, "DescribeHubContent", body)
    hub.check_hub(request.hub_name)
    hub.require_model_type(request.hub_content_type, request.hub_content_name)
    model = hub.require_model(request.hub_content_name, await list_models(context))
    hub.require_version(request.hub_content_version, request.hub_content_name)
    return hub.describe(model, caller.scope.region)


async def list_hub_contents(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(ListHubContents, "ListHubContents", body)
    hub.check_hub(request.hub_name)
    models = hub.choose(await list_models(context), request)
    plain = request.model_copy(update={"next_token": None, "max_results": None})
    question = (caller.tenant, "ListHubContents", plain)
    start = 0
    if request.next_token is not None:
        last = control_pages.read_token(context.token_key, question, request.next_token, (str,))[0]
        start = hub.index_behind(models, str(last))
    shown = models[start : start + (request.max_results or limits.LIST_PAGE_MAX)]
    answer: Body = {
        "HubContentSummaries": [hub.summary(model, caller.scope.region) for model in shown]
    }
    if shown and start + len(shown) < len(models):
        place: control_pages.Place = [shown[-1].metadata.name]
        answer["NextToken"] = control_pages.make_token(context.token_key, question, place)
    return answer
