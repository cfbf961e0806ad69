"""The command line of every component, and which of them a level runs."""

from __future__ import annotations

import sys

from plan import (
    API_PORT,
    HERE,
    METADATA_IP,
    NODE,
    NODE_IP,
    OUTSIDE_IP,
    POLICY_QUEUE,
    SERVICE_CIDR,
    WORLD_IP,
    Level,
    Plan,
)

CONTROL = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_ONLY = ("world", "containerd", "kubelet", "kube-proxy", "netpol", "provisioner", "gpuplugin")
LEVELS: dict[Level, tuple[str, ...]] = {"control": CONTROL, "node": (*CONTROL, *NODE_ONLY)}
ETCD = "http://127.0.0.1:2379"
AUDIT_MEGABYTES_MAX = 1024


def commands(plan: Plan) -> dict[str, list[str]]:
    """Component -> argument list; `fakenodes` is there at both levels and runs when it is asked for."""
    control = {
        "etcd": etcd(plan),
        "kube-apiserver": apiserver(plan),
        "kube-controller-manager": controller_manager(plan),
        "kube-scheduler": scheduler(plan),
        "fakenodes": fakenodes(plan),
    }
    return control if plan.level == "control" else {**control, **node_commands(plan)}


def etcd(plan: Plan) -> list[str]:
    peer = "http://127.0.0.1:2380"
    return [
        str(plan.bin / "etcd"),
        f"--data-dir={plan.folder}/etcd",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync=true",
        "--log-level=warn",
        f"--quota-backend-bytes={4 << 30}",
    ]


def apiserver(plan: Plan) -> list[str]:
    keys = f"{plan.folder}/pki"
    return [
        str(plan.bin / "kube-apiserver"),
        f"--etcd-servers={ETCD}",
        "--bind-address=0.0.0.0",
        f"--secure-port={API_PORT}",
        f"--advertise-address={NODE_IP}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        f"--tls-cert-file={keys}/apiserver.crt",
        f"--tls-private-key-file={keys}/apiserver.key",
        f"--client-ca-file={keys}/ca.crt",
        f"--token-auth-file={plan.folder}/tokens.csv",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        "--enable-admission-plugins=NodeRestriction",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={keys}/sa.pub",
        f"--service-account-signing-key-file={keys}/sa.key",
        f"--kubelet-certificate-authority={keys}/ca.crt",
        f"--kubelet-client-certificate={keys}/kubelet-client.crt",
        f"--kubelet-client-key={keys}/kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        *aggregation(keys),
        f"--audit-policy-file={plan.folder}/audit.json",
        f"--audit-log-path={plan.folder}/audit/audit.log",
        f"--audit-log-maxsize={AUDIT_MEGABYTES_MAX}",
        "--audit-log-maxbackup=1",
        # 300 s by default: too long for any eviction test.
        "--default-not-ready-toleration-seconds=10",
        "--default-unreachable-toleration-seconds=10",
        "--max-requests-inflight=2000",
        "--max-mutating-requests-inflight=1000",
        "--profiling=false",
        "--v=1",
    ]


def aggregation(keys: str) -> list[str]:
    """What an API served by a pod needs to trust the API server's word on the caller."""
    return [
        f"--requestheader-client-ca-file={keys}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={keys}/front-proxy-client.crt",
        f"--proxy-client-key-file={keys}/front-proxy-client.key",
    ]


def controller_manager(plan: Plan) -> list[str]:
    keys, config = f"{plan.folder}/pki", plan.kubeconfig("kube-controller-manager")
    return [
        str(plan.bin / "kube-controller-manager"),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--service-account-private-key-file={keys}/sa.key",
        f"--root-ca-file={keys}/ca.crt",
        f"--cluster-signing-cert-file={keys}/ca.crt",
        f"--cluster-signing-key-file={keys}/ca.key",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        f"--cert-dir={plan.folder}/run/controller-manager",
        "--bind-address=127.0.0.1",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={plan.node_grace_s}s",
        "--profiling=false",
        "--v=1",
    ]


def scheduler(plan: Plan) -> list[str]:
    config = plan.kubeconfig("kube-scheduler")
    return [
        str(plan.bin / "kube-scheduler"),
        f"--config={plan.folder}/scheduler.json",
        "--bind-address=127.0.0.1",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--cert-dir={plan.folder}/run/scheduler",
        "--v=1",
    ]


def fakenodes(plan: Plan) -> list[str]:
    # Beside a real node, pods without a toleration belong on the real one.
    taint = "true" if plan.level == "node" else "false"
    return [
        str(plan.bin / "fakenodes"),
        f"--kubeconfig={plan.kubeconfig('helpers')}",
        f"--taint={taint}",
    ]


def node_commands(plan: Plan) -> dict[str, list[str]]:
    helpers = f"--kubeconfig={plan.kubeconfig('helpers')}"
    kubelet = [
        str(plan.bin / "kubelet"),
        f"--config={plan.folder}/kubelet.json",
        f"--kubeconfig={plan.kubeconfig('kubelet')}",
        f"--hostname-override={NODE}",
        f"--node-ip={NODE_IP}",
        "--root-dir=/var/lib/kubelet",
        f"--cert-dir={plan.folder}/run/kubelet",
        "--v=2",
    ]
    world = [WORLD_IP, OUTSIDE_IP, METADATA_IP]
    return {
        "world": ["unshare", "--net", sys.executable, str(HERE / "world.py"), *world],
        "containerd": ["containerd", f"--config={plan.folder}/containerd.toml", "--log-level=warn"],
        "kubelet": kubelet,
        "kube-proxy": [
            str(plan.bin / "kube-proxy"),
            f"--config={plan.folder}/kube-proxy.json",
            "--v=1",
        ],
        "netpol": [str(plan.bin / "netpol"), helpers, f"--node={NODE}", f"--queue={POLICY_QUEUE}"],
        "provisioner": [
            str(plan.bin / "provisioner"),
            helpers,
            f"--node={NODE}",
            f"--root={plan.folder}/pv",
        ],
        "gpuplugin": [
            str(plan.bin / "gpuplugin"),
            f"--count={plan.gpus}",
            f"--broken={plan.folder}/broken-gpus",
        ],
    }
