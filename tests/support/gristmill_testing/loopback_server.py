"""An ASGI app behind uvicorn on a free loopback port, in a thread, so that blocking clients can call it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from gristmill_testing.prompt_server import PromptServer


@contextmanager
def serve(app: Any) -> Iterator[str]:
    """The app's base URL while the block runs. Raises RuntimeError if it does not start."""
    started = threading.Event()

    class Server(PromptServer):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    server = Server(
        uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", ws="none", lifespan="auto"
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        if not started.wait(20) or not server.servers:
            raise RuntimeError("the app did not start on a loopback port within 20 s")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.stop()
        thread.join(20)
