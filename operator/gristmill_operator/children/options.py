"""What a platform team decides about all children alike: images, addresses, networks, sizes. Values only."""

from dataclasses import dataclass, replace
from typing import Literal

from gristmill_operator.settings import AccessMode, OperatorSettings

PullPolicy = Literal["Always", "IfNotPresent", "Never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    meter: str
    """The meter's image. A session keeps the one that it began with."""
    pull_policy: PullPolicy = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    """Secrets of the tenant's namespace that open the registry."""
    image_volumes: bool = True
    """Whether the API server and the nodes serve volumes made from an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Policies name the ports of pods, never those of Services."""

    dns_ports: tuple[int, ...] = (53, 1053)
    """Ports that DNS pods listen on, over UDP and TCP: 1053 where CoreDNS runs without root."""
    dns_namespace: str = "kube-system"
    dns_pod_label: str = "kube-dns"
    """Value of the label k8s-app of the DNS pods."""
    dns_cidrs: tuple[str, ...] = ()
    """Addresses of DNS that is not a pod, as a cache on the node: 169.254.20.10/32."""
    pod_cidrs: tuple[str, ...] = ()
    service_cidrs: tuple[str, ...] = ()
    """Left out of whatever a tenant's egress allows, with the metadata address."""
    node_cidrs: tuple[str, ...] = ()
    """Addresses of nodes and of the API server, left out likewise."""
    shown_cidrs: tuple[str, ...] = ()
    """What the cluster shows of its own addresses: left out of the ranges of tenants and of the hub that lie
    around them. A range of the hub within them stays: only the platform's team can have meant it."""
    ledger_port: int = 8460
    hub_cidrs: tuple[str, ...] = ("0.0.0.0/0",)
    """Where a fetch Job may load weights from."""
    hub_ports: tuple[int, ...] = (443,)
    metrics_namespace: str = ""
    """Namespace whose pods may read the meters' metrics; empty = none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    class_name: str = ""
    """Storage class of session volumes that name none; empty = the cluster's default."""
    access_mode: AccessMode = "ReadWriteOnce"
    weights_class_name: str = ""
    weights_access_mode: AccessMode = "ReadWriteOnce"
    """ReadWriteMany lets the sessions of one model run on several nodes."""
    weights_size: str = "100Gi"
    node_paths: bool = False
    """Whether weights may be a folder of the node. The restricted Pod Security level refuses that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterOptions:
    cpu: str = "100m"
    memory: str = "512Mi"
    log_level: str = "INFO"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    system_namespace: str
    """Where operator, gateway and ledger run."""
    ledger_url: str
    """The ledger, as a pod of a tenant reaches it."""
    images: ImageOptions
    network: NetworkOptions = NetworkOptions()
    storage: StorageOptions = StorageOptions()
    meter: MeterOptions = MeterOptions()
    operator_account: str = "gristmill-operator"
    """ServiceAccount of the operator."""
    tenant_role: str = "gristmill-operator-tenant"
    """ClusterRole that gives the operator its rights in one tenant's namespace."""
    viewer_role: str = "gristmill-viewer"
    editor_role: str = "gristmill-editor"
    pod_security_version: str = "v1.32"
    """Version of the Pod Security Standards: pinned, so that an upgrade of the cluster refuses no pod."""
    tmp_size: str = "4Gi"
    """Room in /tmp of a worker."""
    worker_claims: tuple[tuple[str, str], ...] = ()
    """Path and claim: mounted read-only in every worker and fetch Job."""
    extra_environment: tuple[tuple[str, str], ...] = ()
    """Set in every container: proxies and certificates."""


def beside(options: ChildOptions, shown: tuple[str, ...]) -> ChildOptions:
    """The same in a cluster that shows these addresses of its own."""
    return replace(options, network=replace(options.network, shown_cidrs=shown))


def child_options(settings: OperatorSettings) -> ChildOptions:
    """The part of the operator's settings that children are made with."""
    return ChildOptions(
        system_namespace=settings.system_namespace,
        ledger_url=settings.ledger_url,
        images=ImageOptions(
            meter=settings.meter_image,
            pull_policy=settings.image_pull_policy,
            pull_secrets=settings.image_pull_secrets,
            image_volumes=settings.image_volumes,
        ),
        network=_network(settings),
        storage=StorageOptions(
            class_name=settings.storage_class,
            access_mode=settings.storage_access_mode,
            weights_class_name=settings.weights_class,
            weights_access_mode=settings.weights_access_mode,
            weights_size=settings.weights_size,
            node_paths=settings.node_paths,
        ),
        meter=MeterOptions(
            cpu=settings.meter_cpu,
            memory=settings.meter_memory,
            log_level=settings.meter_log_level,
        ),
        operator_account=settings.operator_account,
        tenant_role=settings.tenant_role,
        viewer_role=settings.viewer_role,
        editor_role=settings.editor_role,
        pod_security_version=settings.pod_security_version,
        tmp_size=settings.worker_tmp_size,
        worker_claims=tuple(settings.worker_claims.items()),
        extra_environment=tuple(settings.pod_environment.items()),
    )


def _network(settings: OperatorSettings) -> NetworkOptions:
    return NetworkOptions(
        dns_ports=settings.dns_ports,
        dns_namespace=settings.dns_namespace,
        dns_pod_label=settings.dns_pod_label,
        dns_cidrs=settings.dns_cidrs,
        pod_cidrs=settings.pod_cidrs,
        service_cidrs=settings.service_cidrs,
        node_cidrs=settings.node_cidrs,
        ledger_port=settings.ledger_port,
        hub_cidrs=settings.hub_cidrs,
        hub_ports=settings.hub_ports,
        metrics_namespace=settings.metrics_namespace,
    )
