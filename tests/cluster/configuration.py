"""Every configuration file of the components: functions from a plan to content, and one that writes them."""

from __future__ import annotations

import pki
from plan import API_IP, DNS_IP, NODE, NODE_IP, POD_CIDR, WORLD_IP, Plan, write

# Folders of the state folder. The ones under `host` are bound over the machine's own inside the cluster's
# mount namespace: their paths are constants of containerd, the kubelet and CNI.
HOST_FOLDERS = {
    "kubelet": "/var/lib/kubelet",
    "containerd": "/var/lib/containerd",
    "run-containerd": "/run/containerd",
    "cni": "/var/lib/cni",
    "netns": "/run/netns",
    "varlog": "/var/log",
}
FOLDERS = ("want", "log", "etcd", "mnt", "run", "pv", "home", "audit", *HOST_FOLDERS)

# Cheap users for tests: token, user, uid, groups.
TOKENS = """\
alice-token,alice,1001,"tenant-a"
bob-token,bob,1002,"tenant-b"
nobody-token,nobody,1003,"strangers"
"""


def write_all(plan: Plan) -> None:
    """Lay out the state folder: certificates, kubeconfigs, configuration files."""
    for name in FOLDERS:
        (plan.folder / name).mkdir(parents=True, exist_ok=True)
    for user in pki.make_all(plan.folder / "pki", node=NODE, node_ip=NODE_IP, api_ip=API_IP):
        write(plan.kubeconfig(user), kubeconfig(plan, user))
    write(plan.folder / "tokens.csv", TOKENS)
    write(plan.folder / "resolv.conf", f"nameserver {WORLD_IP}\n")
    write(plan.folder / "audit.json", audit_policy())
    write(plan.folder / "scheduler.json", scheduler(plan))
    if plan.level == "node":
        write(plan.folder / "kubelet.json", kubelet(plan))
        write(plan.folder / "kube-proxy.json", kube_proxy(plan))
        write(plan.folder / "containerd.toml", containerd(plan))
        write(plan.folder / "cni-conf/10-gristmill.conflist", cni())
    plan.save()


def kubeconfig(plan: Plan, user: str) -> dict[str, object]:
    keys = plan.folder / "pki"
    certificate = {"client-certificate": f"{keys}/{user}.crt", "client-key": f"{keys}/{user}.key"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [
            {
                "name": "test",
                "cluster": {"server": plan.api, "certificate-authority": f"{keys}/ca.crt"},
            }
        ],
        "users": [{"name": user, "user": certificate}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
    }


def audit_policy() -> dict[str, object]:
    """Who did what to which object, for everyone but the control plane itself, whose own traffic is noise."""
    own = [
        "system:apiserver",
        "system:kube-controller-manager",
        "system:kube-scheduler",
        "system:kube-proxy",
        "helpers",
    ]
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "users": own},
            {"level": "None", "userGroups": ["system:serviceaccounts:kube-system", "system:nodes"]},
            {
                "level": "None",
                "nonResourceURLs": ["/healthz*", "/readyz*", "/livez*", "/version", "/openapi*"],
            },
            {"level": "Metadata"},
        ],
    }


def scheduler(plan: Plan) -> dict[str, object]:
    client = {"kubeconfig": str(plan.kubeconfig("kube-scheduler")), "qps": 500, "burst": 1000}
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": client,
        "leaderElection": {"leaderElect": False},
    }


def kubelet(plan: Plan) -> dict[str, object]:
    keys = plan.folder / "pki"
    # Imported images cannot be pulled again: never collect them, never evict for a full disk.
    disk = dict.fromkeys(
        ("nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"), "0%"
    )
    images = {
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "imageMaximumGCAge": "0s",
    }
    heartbeats = {
        "nodeStatusUpdateFrequency": "2s", "nodeStatusReportFrequency": "10s", "nodeLeaseDurationSeconds": 10,
    }  # fmt: skip
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{plan.name}",  # one tree to remove at the end; "/" would leave cgroups everywhere
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["pods"],
        "failCgroupV1": False,  # the default since 1.35 refuses a cgroup v1 machine
        "failSwapOn": False,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDNS": [DNS_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": str(plan.folder / "resolv.conf"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{keys}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{keys}/kubelet.crt",
        "tlsPrivateKeyFile": f"{keys}/kubelet.key",
        "rotateCertificates": False,
        "serverTLSBootstrap": False,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": 10248,
        **images,
        "evictionHard": {"memory.available": "100Mi", **disk},
        **heartbeats,
        "maxPods": 110,
        "syncFrequency": "10s",  # Secrets and ConfigMaps reach running pods sooner than in a minute
        "volumeStatsAggPeriod": "10s",
    }


def kube_proxy(plan: Plan) -> dict[str, object]:
    # Zero leaves the machine's connection tracking limits alone.
    untouched = {
        "maxPerCore": 0,
        "min": 0,
        "tcpEstablishedTimeout": "0s",
        "tcpCloseWaitTimeout": "0s",
    }
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(plan.kubeconfig("kube-proxy"))},
        "hostnameOverride": NODE,
        "mode": "nftables",
        "clusterCIDR": POD_CIDR,
        "nftables": {"minSyncPeriod": "200ms", "syncPeriod": "30s"},
        "conntrack": untouched,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }


def containerd(plan: Plan) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    unused = ", ".join(
        f'"io.containerd.{name}"'
        for name in (
            "snapshotter.v1.aufs", "snapshotter.v1.btrfs", "snapshotter.v1.devmapper", "snapshotter.v1.zfs",
            "internal.v1.tracing", "tracing.processor.v1.otlp",
        )
    )  # fmt: skip
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [{unused}]
[grpc]
  address = "/run/containerd/containerd.sock"
[{cri}]
  sandbox_image = "gristmill.test/pause:1"
  # Without CAP_SYS_RESOURCE runc cannot lower an oom score.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [{cri}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{cri}.containerd.runtimes.runc.options]
        SystemdCgroup = false
  [{cri}.cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{plan.folder}/cni-conf"
    max_conf_num = 1
"""


def cni() -> dict[str, object]:
    """`ptp`, not `bridge`: every packet between pods is routed, so policies need no br_netfilter."""
    ipam = {
        "type": "host-local",
        "dataDir": "/var/lib/cni/networks",
        "ranges": [[{"subnet": POD_CIDR}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "0.4.0",
        "name": "gristmill",
        "plugins": [
            {"type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
