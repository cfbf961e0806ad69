"""Reads from the API server, and patches of a status, without kubectl, whose start costs a third of a second of a core.

Kinds are named as kubectl takes them: singular, plural, short name, kind, or `name.group`.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

Json = dict[str, Any]
T = TypeVar("T")

HOST, PORT = "127.0.0.1", 6443
TIMEOUT_S = 30.0
BUSY_S = 30.0
MERGE = "application/merge-patch+json"
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


class ApiError(AssertionError):
    """The server refused; the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    prefix: str  # api/v1 or apis/GROUP/VERSION
    plural: str
    namespaced: bool

    def path(self, namespace: str | None, name: str | None) -> str:
        place = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return f"/{self.prefix}{place}/{self.plural}" + (f"/{quote(name)}" if name else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The administrator's view. `network` is the namespace that the server listens in."""

    keys: Path
    network: Path
    enter: Callable[[], None]
    known: dict[str, Resource] = field(default_factory=dict)

    def get(self, kind: str, name: str, namespace: str | None) -> Json:
        """The object; ApiError 404 where there is none."""
        resource = self.resource(kind)
        return self.read(resource.path(namespace or "default", name))

    def items(self, kind: str, namespace: str | None, selector: str) -> list[Json]:
        """All objects of a kind; they carry no kind of their own, as in any list of the API."""
        query = "?" + urlencode({"labelSelector": selector}) if selector else ""
        found: list[Json] = self.read(self.resource(kind).path(namespace, None) + query)["items"]
        return found

    def resource(self, kind: str) -> Resource:
        word = kind.lower()
        if word not in self.known:  # it may be newer than what we know
            self.discover()
        if word not in self.known:
            raise ApiError(404, f"the server has no resource type {kind!r}")
        return self.known[word]

    def discover(self) -> None:
        found: dict[str, Resource] = {}
        for root in ("api", "apis"):
            for group in self.read(f"/{root}", accept=DISCOVERY)["items"]:
                learn(found, group)
        self.known.clear()
        self.known.update(found)

    def read(self, path: str, accept: str = "application/json") -> Json:
        """A definition that was just made answers 429 for a moment; that is waited for."""
        until = time.monotonic() + BUSY_S
        while True:
            status, body = self.in_network(lambda: self._exchange(path, accept))
            if status != 429 or time.monotonic() > until:
                break
            time.sleep(0.2)
        content: Json = json.loads(body) if body.startswith(b"{") else {"message": body.decode()}
        if status != 200:
            raise ApiError(status, content.get("message", ""))
        return content

    def patch_status(self, kind: str, name: str, namespace: str | None, status: Json) -> None:
        """A merge patch of the status subresource; ApiError on refusal."""
        path = self.resource(kind).path(namespace, name) + "/status"
        body = json.dumps({"status": status}).encode()
        code, answer = self.in_network(lambda: self._exchange(path, "application/json", body))
        if code != 200:
            raise ApiError(code, answer.decode())

    def _exchange(self, path: str, accept: str, patch: bytes | None = None) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(self.keys / "ca.crt"))
        context.load_cert_chain(self.keys / "admin.crt", self.keys / "admin.key")
        connection = http.client.HTTPSConnection(HOST, PORT, timeout=TIMEOUT_S, context=context)
        try:
            method, more = ("GET", {}) if patch is None else ("PATCH", {"Content-Type": MERGE})
            connection.request(method, path, body=patch, headers={"Accept": accept, **more})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def in_network(self, call: Callable[[], T]) -> T:
        """Run it here if this thread is in the cluster's network, else in a thread that goes there."""
        if os.readlink("/proc/thread-self/ns/net") == os.readlink(self.network):
            return call()
        results: list[T] = []
        errors: list[Exception] = []

        def there() -> None:
            try:
                self.enter()
                results.append(call())
            except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


def learn(found: dict[str, Resource], group: Json) -> None:
    """Add the names of one group's resources, in its preferred version; the first to take a name keeps it."""
    name = group["metadata"].get("name", "")
    for version in group["versions"]:
        prefix = f"apis/{name}/{version['version']}" if name else f"api/{version['version']}"
        for entry in version.get("resources", []):
            plural = entry["resource"]
            resource = Resource(
                prefix=prefix, plural=plural, namespaced=entry["scope"] == "Namespaced"
            )
            kind = entry.get("responseKind", {}).get("kind", "")
            words = {
                plural,
                entry.get("singularResource", ""),
                kind.lower(),
                *entry.get("shortNames", []),
            }
            for word in words - {""}:
                found.setdefault(word, resource)
                found.setdefault(f"{word}.{name}", resource)


def data_of(secret: Json) -> dict[str, bytes]:
    """A Secret's values."""
    return {key: base64.b64decode(value) for key, value in secret.get("data", {}).items()}
