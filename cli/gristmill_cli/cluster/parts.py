"""Whether the parts of a cluster serve, as they say themselves."""

import asyncio
from collections.abc import Mapping
from typing import Final

import aiohttp

from gristmill_cli.health import health_of

PROBE_TIMEOUT_S: Final = 5


async def probe_parts(urls: Mapping[str, str]) -> list[dict[str, str]]:
    """A row with `name`, `url` and `health` (`ready`, or what /readyz said) of each part."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        healths = await asyncio.gather(*(_health(client, url) for url in urls.values()))
    return [
        {"name": name, "url": url, "health": health}
        for (name, url), health in zip(urls.items(), healths, strict=True)
    ]


async def _health(client: aiohttp.ClientSession, url: str) -> str:
    try:
        async with client.get(f"{url.rstrip('/')}/readyz") as response:
            return health_of(response.status, await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return f"does not answer ({type(error).__name__})"
