"""What must hold before the operator begins: it reaches the API server, may do its work, finds its kinds."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from gristmill_contracts import resources
from gristmill_contracts.errors import GristmillError, InvalidRequestError, NotFoundError
from gristmill_operator import permissions
from gristmill_operator.client import ApiClient
from gristmill_operator.kinds import PRIMARY

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S: Final = 2.0
STREAMING_SINCE: Final = 34
"""Minor version of Kubernetes 1 that serves streaming lists everywhere."""


class NotFitError(InvalidRequestError):
    """The cluster is not prepared for the operator; the message says how to put that right."""


async def check(client: ApiClient, system_namespace: str) -> bool:
    """Wait for the API server, then raise NotFitError if anything is missing.

    Returns whether the server serves streaming lists.
    """
    minor = await patiently(lambda: _minor_version(client))
    lacking = await patiently(lambda: permissions.missing(client, system_namespace))
    if lacking:
        raise NotFitError(permissions.complaint(lacking))
    absent = await patiently(lambda: _absent_kinds(client))
    if absent:
        raise NotFitError(
            f"the API server does not serve {', '.join(absent)} of {resources.GROUP_VERSION}: install "
            "the custom resource definitions (crds/, or the Helm chart with crds.enabled)"
        )
    return minor >= STREAMING_SINCE


async def absent_kinds(client: ApiClient) -> list[str]:
    """Plural names of our kinds that are not served, as while their definitions are made again."""
    return await patiently(lambda: _absent_kinds(client))


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until the API server answers."""
    while True:
        try:
            return await ask()
        except GristmillError as error:
            if not error.retryable:
                raise
            logger.warning("api_server_away", extra={"error": error.message})
            await asyncio.sleep(RETRY_S)


async def _minor_version(client: ApiClient) -> int:
    text = str((await client.raw("/version")).get("minor", ""))
    digits = re.match(r"[0-9]+", text)
    return int(digits.group()) if digits else 0


async def _absent_kinds(client: ApiClient) -> list[str]:
    try:
        listed = await client.raw(f"/apis/{resources.GROUP_VERSION}")
    except NotFoundError:
        listed = {}
    served = {each["name"] for each in listed.get("resources") or ()}
    return [kind.plural for kind in PRIMARY if kind.plural not in served]
