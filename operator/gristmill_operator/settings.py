"""The operator's settings: environment variables `GRISTMILL_OPERATOR_*`, read once in `__main__`."""

import ipaddress
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gristmill_contracts.resources import QUANTITY_PATTERN

ENV_PREFIX: Final = "GRISTMILL_OPERATOR_"


def _split(value: object) -> object:
    """A list in a variable: parts between commas."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _check_cidrs(cidrs: tuple[str, ...]) -> tuple[str, ...]:
    for cidr in cidrs:
        ipaddress.ip_network(cidr, strict=False)
    return cidrs


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Cidrs = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_cidrs)]
Ports = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65_535)], ...], NoDecode, BeforeValidator(_split)
]
AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"]


class OperatorSettings(BaseSettings):
    """A field is set by its upper-case name behind the prefix, as in GRISTMILL_OPERATOR_PORT."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    host: str = "0.0.0.0"  # noqa: S104 - the kubelet and Prometheus come from outside the pod
    """Address of /healthz, /readyz and /metrics."""
    port: int = Field(default=8480, ge=0, le=65_535)
    """Port of /healthz, /readyz and /metrics; 0 takes a free one, which the log names."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    identity: str = ""
    """Name in the Lease; empty = the host's name and a random part."""
    system_namespace: str = "gristmill-system"
    """Namespace of the operator, its Lease and the cluster key."""

    # --- the API server ---
    kubeconfig: Path | None = None
    """Not set = the service account of the pod, else $KUBECONFIG, else ~/.kube/config."""
    api_server_url: str = ""
    """Replaces the address of the API server; credentials stay as they are."""
    qps: float = Field(default=200.0, gt=0)
    """Requests a second to the API server, in the long run. A session's start takes about 14."""
    burst: int = Field(default=400, ge=1)
    """Requests that may go out at once after a pause."""
    connections_max: int = Field(default=32, ge=1)
    request_timeout_s: float = Field(default=30.0, gt=0)
    initial_streaming: bool = True
    """Fill the caches by a streaming list; needs Kubernetes 1.34."""

    # --- the loop ---
    workers: int = Field(default=16, ge=1, le=256)
    """How many objects are reconciled at once."""
    resync_s: float = Field(default=600.0, gt=0)
    """Every object is looked at once in this time, though nothing changed."""
    sweep_s: float = Field(default=180.0, gt=0)
    """How often the caches are compared with the API server."""
    lease_s: float = Field(default=15.0, gt=0)
    """How long a leader that stopped renewing is believed to lead."""
    lease_renew_s: float = Field(default=10.0, gt=0)
    """A leader that could not renew for this long stops writing and exits."""
    lease_retry_s: float = Field(default=2.0, gt=0)

    # --- what sessions are made with ---
    ledger_url: str
    """Where the ledger answers, for the operator and for meters, as http://gristmill-ledger.gristmill-system:8460."""
    cluster_key_file: Path | None = None
    """The cluster key as a file; not set, or not there yet = read from its Secret."""
    meter_image: str = ""
    """Image of the meter, by digest. A session keeps the one that it first started with."""

    # --- what children are made with ---
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: Names = ()
    """Secrets of the tenants' namespaces that open the registry."""
    image_volumes: bool = True
    """Whether the nodes serve volumes that are made from an image."""
    dns_ports: Ports = (53, 1053)
    """Ports that the pods of DNS listen on, which are not those of its Service."""
    dns_namespace: str = "kube-system"
    dns_pod_label: str = "kube-dns"
    """Value of the label k8s-app on the pods of DNS."""
    dns_cidrs: Cidrs = ()
    """Addresses of DNS that is no pod, as a cache on the node: 169.254.20.10/32."""
    pod_cidrs: Cidrs = ()
    """Addresses of pods: no tenant's egress reaches them."""
    service_cidrs: Cidrs = ()
    """Addresses of Services: no tenant's egress reaches them."""
    node_cidrs: Cidrs = ()
    """Addresses of nodes and of the API server: no tenant's egress reaches them."""
    ledger_port: int = Field(default=8460, ge=1, le=65_535)
    """Port that the ledger's pods listen on."""
    hub_cidrs: Cidrs = ("0.0.0.0/0",)
    """Where fetch Jobs may load weights from."""
    hub_ports: Ports = (443,)
    metrics_namespace: str = ""
    """Namespace whose pods may read the metrics of meters; empty = none."""
    storage_class: str = ""
    """Storage class of session volumes that name none; empty = the cluster's default."""
    storage_access_mode: AccessMode = "ReadWriteOnce"
    weights_class: str = ""
    """Storage class of volumes of weights; empty = that of session volumes."""
    weights_access_mode: AccessMode = "ReadWriteOnce"
    """ReadWriteMany lets the sessions of one model run on several nodes."""
    weights_size: str = Field(default="100Gi", pattern=QUANTITY_PATTERN)
    node_paths: bool = False
    """Whether weights may be a folder of the node, which the restricted Pod Security level refuses."""
    meter_cpu: str = Field(default="100m", pattern=QUANTITY_PATTERN)
    meter_memory: str = Field(default="512Mi", pattern=QUANTITY_PATTERN)
    meter_log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    worker_tmp_size: str = Field(default="4Gi", pattern=QUANTITY_PATTERN)
    """Room in /tmp of a worker."""
    pod_security_version: str = Field(default="v1.32", pattern=r"^(latest|v1\.[0-9]{1,3})$")
    """Version of the Pod Security Standards that tenants are held to."""
    worker_claims: dict[str, str] = Field(default_factory=dict, max_length=8)
    """JSON object, path -> claim of the tenant's namespace: mounted read-only in every worker, as {"/data": "data"}."""
    pod_environment: dict[str, str] = Field(default_factory=dict)
    """JSON object: set in every container of children, as HTTPS_PROXY."""
    operator_account: str = "gristmill-operator"
    """ServiceAccount of the operator."""
    tenant_role: str = "gristmill-operator-tenant"
    """ClusterRole with the operator's rights in one tenant's namespace."""
    viewer_role: str = "gristmill-viewer"
    editor_role: str = "gristmill-editor"
    namespace_deletion: bool = False
    """Whether the operator may delete the namespace of a tenant whose deletionPolicy is Delete."""
