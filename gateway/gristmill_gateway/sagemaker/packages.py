"""Resolves model packages that a request names to checkpoints in the ledger."""

import msgspec

from gristmill_contracts.errors import ForbiddenError, InvalidRequestError, NotFoundError
from gristmill_contracts.http import Checkpoint
from gristmill_contracts.operations import (
    CheckpointRef,
    ComputeLogprobs,
    LoadState,
    LoadWeightsForSampling,
    Operation,
    Sample,
)
from gristmill_gateway.caller import Caller
from gristmill_gateway.ledger_client import LedgerClient
from gristmill_gateway.sagemaker import arns
from gristmill_gateway.sagemaker.model_facts import SessionFacts


async def resolve(
    ledger: LedgerClient, caller: Caller, facts: SessionFacts, operation: Operation
) -> Operation:
    """The operation with the checkpoint that it names filled in.

    Raises InvalidRequestError for a package that is not the caller's, is not there, or does not fit;
    UnavailableError if the ledger cannot be asked.
    """
    if isinstance(operation, LoadState):
        ref = await _find(ledger, caller, facts, operation.checkpoint.name, state_only=True)
        return msgspec.structs.replace(operation, checkpoint=ref)
    if isinstance(operation, LoadWeightsForSampling):
        ref = await _find(ledger, caller, facts, operation.adapter.name)
        return msgspec.structs.replace(operation, adapter=ref)
    if isinstance(operation, Sample | ComputeLogprobs) and operation.adapter is not None:
        ref = await _find(ledger, caller, facts, operation.adapter.name)
        return msgspec.structs.replace(operation, adapter=ref)
    return operation


async def _find(
    ledger: LedgerClient, caller: Caller, facts: SessionFacts, arn: str, *, state_only: bool = False
) -> CheckpointRef:
    try:
        package = arns.parse_package(arn, caller.account_id)
        found = await ledger.get_checkpoint(caller.tenant, package.group, package.version)
    except ForbiddenError as error:
        raise InvalidRequestError(error.message) from error
    except NotFoundError as error:
        raise InvalidRequestError(
            f"Model package {arn!r} does not exist; ListModelPackages shows those that do"
        ) from error
    check_fit(found, arn, facts, state_only=state_only)
    return CheckpointRef(id=found.id, path=found.path, name=arn)


def check_fit(found: Checkpoint, arn: str, facts: SessionFacts, *, state_only: bool) -> None:
    """Raises InvalidRequestError where a checkpoint cannot be used in the session."""
    if found.model != facts.model:
        raise InvalidRequestError(
            f"model package {arn!r} was trained on base model {found.model!r}, and this session's is "
            f"{facts.model!r}; use it in a session on {found.model!r}"
        )
    if state_only and found.kind != "state":
        raise InvalidRequestError(
            f"model package {arn!r} holds weights for sampling, and loadState needs a training state; use "
            "a package that saveState made, or loadWeightsForSampling"
        )
