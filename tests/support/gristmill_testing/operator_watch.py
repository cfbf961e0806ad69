"""Plain calls and watches with the test cluster's administrator, for benchmarks: no kubectl, no client library."""

import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import msgspec

Json = dict[str, Any]
CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Api:
    """`keys` holds ca.crt, admin.crt and admin.key; the caller is in the cluster's network."""

    keys: Path

    def connect(self) -> HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.keys / "ca.crt"))
        context.load_cert_chain(self.keys / "admin.crt", self.keys / "admin.key")
        return HTTPSConnection("127.0.0.1", 6443, timeout=600, context=context)

    def send(self, calls: list[tuple[str, str, bytes]]) -> None:
        """All (method, path, body), over a few connections. Raises RuntimeError with the first refusal."""
        share = [calls[at::CONNECTIONS] for at in range(min(CONNECTIONS, len(calls)))]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(self._send, share))

    def _send(self, calls: list[tuple[str, str, bytes]]) -> None:
        connection = self.connect()
        for method, path, body in calls:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]!r}")
        connection.close()

    def watch(self, path: str) -> Iterator[Json]:
        """Events of one watch, the objects that are there first."""
        connection = self.connect()
        connection.request("GET", f"{path}{'&' if '?' in path else '?'}watch=true")
        for line in connection.getresponse():
            yield msgspec.json.decode(line)

    def follow(self, path: str, look: Callable[[Json], None]) -> None:
        """Give every object that is added or changed to `look`, for as long as the process lives."""
        while True:
            try:
                for event in self.watch(path):
                    if event["type"] in {"ADDED", "MODIFIED"}:
                        look(event["object"])
            except (OSError, HTTPException):
                continue
