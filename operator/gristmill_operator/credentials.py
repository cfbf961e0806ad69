"""How to reach the API server: as the pod's service account, or as a kubeconfig says."""

import base64
import contextlib
import os
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from gristmill_contracts.errors import InvalidRequestError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
UNAUTHENTICATED: Final = 401
TOKEN_AGE_S_MAX: Final = 60.0
"""The kubelet changes the token's file long before the old token ends."""


@dataclass(slots=True, kw_only=True)
class Token:
    """A bearer token; one in a file is read again now and then, since it changes."""

    text: str = ""
    file: Path | None = None
    source: Callable[[], str] | None = None
    """Asked each time: it keeps the token for as long as it is good."""
    _read_at: float = field(default=float("-inf"), repr=False)

    def value(self) -> str:
        if self.source is not None:
            return self.source()
        if self.file is not None and time.monotonic() - self._read_at > TOKEN_AGE_S_MAX:
            self.text = self.file.read_text().strip()
            self._read_at = time.monotonic()
        return self.text

    def has_changed(self) -> bool:
        """Read the file again though it is not time: the token was refused."""
        before = self.text
        self._read_at = float("-inf")
        return self.value() != before


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Address, trust and identity."""

    server: str
    """URL without a slash at its end."""
    tls: ssl.SSLContext | None
    """None for http."""
    token: Token

    def session(self, *, connections_max: int, user_agent: str) -> aiohttp.ClientSession:
        """A session whose requests carry the token of the moment. The caller closes it."""
        connector = aiohttp.TCPConnector(limit=connections_max, ssl=self.tls or True)
        return aiohttp.ClientSession(
            connector=connector, headers={"User-Agent": user_agent}, middlewares=(self._authorize,)
        )

    async def _authorize(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        token = self.token.value()
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        answer = await handler(request)
        if answer.status == UNAUTHENTICATED and self.token.has_changed():
            answer.release()
            request.headers["Authorization"] = f"Bearer {self.token.value()}"
            answer = await handler(request)
        return answer


def find_access(kubeconfig: Path | None, api_server_url: str = "") -> Access:
    """From `kubeconfig` if given, else the pod's own account, else $KUBECONFIG or ~/.kube/config.

    Raises InvalidRequestError saying what was looked for. `api_server_url` replaces the address.
    """
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        return _in_cluster(api_server_url)
    named = kubeconfig or Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    try:
        config = yaml.safe_load(named.read_text())
        return _from_kubeconfig(config, named.parent, api_server_url)
    except (OSError, yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
        raise InvalidRequestError(
            f"no way to the API server: not in a pod, and the kubeconfig {named} cannot be used "
            f"({type(error).__name__}: {error})"
        ) from error


def _in_cluster(api_server_url: str) -> Access:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = api_server_url or f"https://{f'[{host}]' if ':' in host else host}:{port}"
    return Access(
        server=server.rstrip("/"),
        tls=_tls(server, ca=(SERVICE_ACCOUNT / "ca.crt").read_text()),
        token=Token(file=SERVICE_ACCOUNT / "token"),
    )


def _from_kubeconfig(
    config: dict[str, Any],  # Any: a kubeconfig
    folder: Path,
    api_server_url: str,
) -> Access:
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    helped = "exec" in user or "auth-provider" in user
    server = api_server_url or cluster["server"]
    tls = _tls(
        server,
        ca=_material(cluster, "certificate-authority", folder),
        certificate=_material(user, "client-certificate", folder),
        key=_material(user, "client-key", folder),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
    )
    file = user.get("tokenFile")
    token = Token(file=folder / file) if file else Token(text=user.get("token", ""))
    if helped:
        token = Token(source=_token_of_program(config))
    return Access(server=server.rstrip("/"), tls=tls, token=token)


def _token_of_program(config: dict[str, Any]) -> Callable[[], str]:  # Any: a kubeconfig
    """Cloud providers' kubeconfigs name a program that prints a token: the official client runs it,
    and runs it again when the token has ended.
    """
    # Imported here: it holds 50 MB of models, and in a pod there is no kubeconfig.
    from kubernetes import client
    from kubernetes.config import ConfigException, load_kube_config_from_dict

    official = client.Configuration()
    with contextlib.suppress(ConfigException):
        load_kube_config_from_dict(config, client_configuration=official)  # type: ignore[no-untyped-call]

    def ask() -> str:
        # The name of this entry has changed before; the headers that it leads to have not.
        settings: Any = official.auth_settings().values()  # Any: typed as objects
        headers = [each["value"] for each in settings if each["key"].lower() == "authorization"]
        return str(headers[0]).removeprefix("Bearer ") if headers else ""

    if not ask():
        raise InvalidRequestError(
            "the program that the kubeconfig names for a token gave none; run it by hand to see why"
        )
    return ask


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:  # Any: a kubeconfig
    return next(each for each in entries if each["name"] == name)


def _material(entry: dict[str, Any], name: str, folder: Path) -> str | None:  # Any: a kubeconfig
    """PEM text from `<name>-data` or the file `<name>`."""
    if f"{name}-data" in entry:
        return base64.b64decode(entry[f"{name}-data"]).decode()
    return (folder / entry[name]).read_text() if entry.get(name) else None


def _tls(
    server: str,
    *,
    ca: str | None,
    certificate: str | None = None,
    key: str | None = None,
    insecure: bool = False,
) -> ssl.SSLContext | None:
    if not server.startswith("https://"):
        return None
    context = ssl.create_default_context(cadata=ca)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate and key:
        # The ssl module reads certificates from files alone.
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(certificate.rstrip() + "\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context
