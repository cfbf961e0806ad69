"""Answers the model registry operations from the ledger."""

import logging
from typing import Any

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, InvalidRequestError, NotFoundError
from gristmill_contracts.http import Checkpoint, CheckpointGroup, CreateGroup
from gristmill_contracts.ids import TenantName
from gristmill_gateway.access import Verb
from gristmill_gateway.sagemaker import arns, control_pages, registry
from gristmill_gateway.sagemaker.control_context import Caller, Context
from gristmill_gateway.sagemaker.control_fields import check_tags, read_request
from gristmill_gateway.sagemaker.registry_validate import (
    CreateModelPackageGroup,
    DeleteModelPackage,
    DescribeModelPackage,
    DescribeModelPackageGroup,
    ListModelPackages,
)

Body = dict[str, Any]  # Any: JSON

logger = logging.getLogger(__name__)

LEDGER_PAGES_PER_ANSWER = 20
"""A list whose filters match little answers a short page with a NextToken after this many."""


async def create_model_package_group(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(CreateModelPackageGroup, "CreateModelPackageGroup", body)
    await _check_right(context, caller, "create")
    check_tags(request.tags)
    name = request.model_package_group_name
    _refuse_unsupported(request)
    group = CreateGroup(
        tenant=TenantName(caller.tenant),
        name=name,
        description=request.model_package_group_description or "",
    )
    try:
        await context.ledger.create_group(group)
    except ConflictError as error:
        # The SDK looks for these words and describes the group instead.
        raise ConflictError(
            f"Model package group already exists: {arns.group_arn(caller.scope, name)}"
        ) from error
    return {"ModelPackageGroupArn": arns.group_arn(caller.scope, name)}


def _refuse_unsupported(request: CreateModelPackageGroup) -> None:
    managed = request.managed_configuration
    if managed is not None and managed.managed_storage_type is not None:
        raise InvalidRequestError(
            "ManagedConfiguration.ManagedStorageType is not supported: checkpoints lie in the caller's "
            "own buckets; leave it out"
        )
    if request.tags:
        raise InvalidRequestError(
            "Tags of a model package group are not kept; leave them out, and tag the training session"
        )


async def describe_model_package_group(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(DescribeModelPackageGroup, "DescribeModelPackageGroup", body)
    await _check_right(context, caller, "list")
    name = arns.parse_group(request.model_package_group_name, caller.scope.account_id)
    return registry.describe_group(await require_group(context, caller.tenant, name), caller.scope)


async def list_model_packages(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(ListModelPackages, "ListModelPackages", body)
    await _check_right(context, caller, "list")
    group = request.model_package_group_name
    name = None if group is None else arns.parse_group(group, caller.scope.account_id)
    if name is not None:
        # A list of what does not exist is a mistake, and an empty answer would hide it.
        await require_group(context, caller.tenant, name)
    question = (
        caller.tenant,
        "ListModelPackages",
        request.model_copy(update={"next_token": None, "max_results": None}),
    )
    after = None
    if request.next_token is not None:
        after = str(
            control_pages.read_token(context.token_key, question, request.next_token, (str,))[0]
        )
    found, after = await _collect(context, caller, request, name, after)
    answer: Body = {
        "ModelPackageSummaryList": [registry.summary(each, caller.scope) for each in found]
    }
    if after is not None:
        answer["NextToken"] = control_pages.make_token(context.token_key, question, [after])
    return answer


async def _collect(
    context: Context,
    caller: Caller,
    request: ListModelPackages,
    group: str | None,
    after: str | None,
) -> tuple[list[Checkpoint], str | None]:
    """Up to MaxResults checkpoints that pass the filters, and where to go on; None at the end.

    The ledger is asked for no more than are still wanted, so that its cursor is ours.
    """
    most = request.max_results or limits.LIST_PAGE_MAX
    found: list[Checkpoint] = []
    for _ in range(LEDGER_PAGES_PER_ANSWER):
        page = await context.ledger.list_checkpoints(
            caller.tenant,
            group=group,
            after=after,
            limit=most - len(found),
            order="desc" if request.sort_order == "Descending" else "asc",
        )
        found += [each for each in page.checkpoints if registry.is_wanted(each, request)]
        after = page.next_after
        if after is None or len(found) == most:
            break
    return found, after


async def describe_model_package(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(DescribeModelPackage, "DescribeModelPackage", body)
    await _check_right(context, caller, "list")
    package = arns.parse_package(request.model_package_name, caller.scope.account_id)
    try:
        found = await context.ledger.get_checkpoint(caller.tenant, package.group, package.version)
    except NotFoundError as error:
        raise _no_package(package, caller) from error
    return registry.describe(found, caller.scope)


async def delete_model_package(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(DeleteModelPackage, "DeleteModelPackage", body)
    await _check_right(context, caller, "delete")
    package = arns.parse_package(request.model_package_name, caller.scope.account_id)
    try:
        await context.ledger.delete_checkpoint(caller.tenant, package.group, package.version)
    except NotFoundError as error:
        raise _no_package(package, caller) from error
    extra = {"tenant": caller.tenant, "group": package.group, "version": package.version}
    logger.info("checkpoint_deleted", extra=extra)
    return {}


async def ensure_group(context: Context, tenant: str, name: str) -> None:
    """Make the group if it is not there."""
    try:
        await context.ledger.create_group(CreateGroup(tenant=TenantName(tenant), name=name))
    except ConflictError:
        return


async def require_group(context: Context, tenant: str, name: str) -> CheckpointGroup:
    """Raises NotFoundError."""
    try:
        return await context.ledger.get_group(tenant, name)
    except NotFoundError as error:
        raise NotFoundError(
            f"Model package group {name} does not exist; make it with CreateModelPackageGroup"
        ) from error


async def _check_right(context: Context, caller: Caller, verb: Verb) -> None:
    """What sessions made is treated as they are. Raises AccessDeniedError."""
    namespace = await context.namespace(caller.tenant)
    await context.access.check(caller.service_account, verb, namespace, lasting=True)


def _no_package(package: arns.PackageName, caller: Caller) -> NotFoundError:
    return NotFoundError(f"Model package {arns.package_arn(caller.scope, package)} does not exist")
