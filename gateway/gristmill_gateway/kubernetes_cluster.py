"""Puts together what a gateway has in a cluster."""

from dataclasses import dataclass
from pathlib import Path

import aiohttp

from gristmill_contracts import secrets
from gristmill_contracts.errors import InvalidRequestError, UnavailableError
from gristmill_gateway.directory import ReadSession
from gristmill_gateway.kubernetes import KubernetesStore
from gristmill_gateway.kubernetes_access import KubernetesAccess
from gristmill_gateway.kubernetes_api import ApiServer, api_access, open_api_http
from gristmill_gateway.settings import GatewaySettings
from gristmill_gateway.tenancy import DeclaredTenancy


@dataclass(slots=True, kw_only=True)
class KubernetesCluster:
    """`cluster.Cluster`."""

    key: bytes
    store: KubernetesStore
    tenancy: DeclaredTenancy
    access: KubernetesAccess
    http: aiohttp.ClientSession

    @property
    def read_session(self) -> ReadSession:
        return self.store.read_session

    def start(self) -> None:
        self.store.start()

    async def stop(self) -> None:
        await self.store.stop()
        await self.http.close()

    def away(self) -> list[str]:
        return [f"watch of {kind}" for kind in self.store.away()]


def open_cluster(settings: GatewaySettings) -> KubernetesCluster:
    """Raises InvalidRequestError where a setting is missing or wrong."""
    if settings.cluster_key_file is None:
        raise InvalidRequestError(
            "GRISTMILL_GATEWAY_STORE is kubernetes and GRISTMILL_GATEWAY_CLUSTER_KEY_FILE is not set; name "
            "the file that the Secret gristmill-cluster-key is mounted as"
        )
    key = read_cluster_key(settings.cluster_key_file)
    access = api_access(settings.api_url, settings.api_token_file, settings.api_ca_file)
    http = open_api_http(access)
    api = ApiServer(http, access)
    store = KubernetesStore(api, key)
    return KubernetesCluster(
        key=key,
        store=store,
        tenancy=DeclaredTenancy(store),
        access=KubernetesAccess(api),
        http=http,
    )


def read_cluster_key(path: Path) -> bytes:
    """Raises UnavailableError for a file that is not there, InvalidRequestError for another length."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise UnavailableError(f"the cluster key {path} cannot be read: {error}") from error
    if len(key) != secrets.CLUSTER_KEY_BYTES:
        raise InvalidRequestError(
            f"the cluster key {path} has {len(key)} bytes, and a key has {secrets.CLUSTER_KEY_BYTES}"
        )
    return key
