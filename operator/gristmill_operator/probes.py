"""/healthz, /readyz and /metrics.

Alive: the event loop is not stuck, no watch is silent while the API server answers, and who lost the lead has
not much longer to end. An absent API server is no reason to be restarted. Ready: the caches are warm; a follower
is as ready as the leader.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from gristmill_operator.kinds import Kind

LAG_S_MAX: Final = 30.0
END_S_MAX: Final = 30.0
TICK_S: Final = 0.5
LAG_WINDOW: Final = 60
"""Ticks whose lag is remembered."""


@dataclass(slots=True, kw_only=True)
class LoopLag:
    """How late the event loop comes to what is due."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    told: Callable[[float], None] = lambda lag_s: None
    _lags: deque[float] = field(default_factory=lambda: deque(maxlen=LAG_WINDOW))

    @property
    def worst_s(self) -> float:
        return max(self._lags, default=0.0)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            before = self.clock()
            await self.sleep(TICK_S)
            self._lags.append(max(0.0, self.clock() - before - TICK_S))
            self.told(self.worst_s)


@dataclass(slots=True, kw_only=True)
class Health:
    """What the probes answer."""

    lag: LoopLag
    silent_since: Mapping[Kind, float]
    warm: bool = False
    leads: Callable[[], bool] = lambda: False
    lost_s: Callable[[], float] = lambda: 0.0
    """How long ago the lead was lost; 0 = it was not."""

    def ill(self) -> str:
        """Why the process should be restarted; "" = it should not."""
        if self.lag.worst_s > LAG_S_MAX:
            return f"the event loop was {self.lag.worst_s:.0f} s late"
        if self.lost_s() > END_S_MAX:
            return f"the lead was lost {self.lost_s():.0f} s ago, and the process has not ended"
        if self.silent_since:
            silent = ", ".join(sorted(kind.plural for kind in self.silent_since))
            return f"the API server answers, but the watch of {silent} does not tell its changes"
        return ""

    def application(self, metrics: Callable[[], bytes]) -> web.Application:
        async def healthz(_: web.Request) -> web.Response:
            ill = self.ill()
            return web.json_response(
                {"healthy": not ill, "reason": ill}, status=503 if ill else 200
            )

        async def readyz(_: web.Request) -> web.Response:
            answer = {"ready": self.warm, "leads": self.leads()}
            return web.json_response(answer, status=200 if self.warm else 503)

        async def exposition(_: web.Request) -> web.Response:
            return web.Response(body=metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

        application = web.Application()
        application.add_routes(
            [
                web.get("/healthz", healthz),
                web.get("/readyz", readyz),
                web.get("/metrics", exposition),
            ]
        )
        return application


async def serve(application: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve; returns what to `cleanup` at the end, and the port that it became."""
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    address = runner.addresses[0]
    return runner, int(address[1])
