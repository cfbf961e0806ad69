"""The chart, installed on the test cluster's node as a platform team would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill_testing.chart import CHART, NAMESPACE, arguments_of
from gristmill_testing.cluster import Answer, Cluster, run

# The node has two processors: they are for the workers.
SMALL: dict[str, Any] = {
    "requests": {"cpu": "10m", "memory": "64Mi"},
    "limits": {"memory": "512Mi"},
}
NODE_VALUES: dict[str, Any] = {
    "operator.resources": SMALL,
    "gateway.resources": SMALL,
    "ledger.resources": SMALL,
    "meter.cpu": "50m",
    "meter.memory": "256Mi",
    "global.imageRegistry": "gristmill.test",
    "networkPolicy.apiServer.cidrs": ["172.30.0.2/32"],
    "gateway.leaveSeconds": 5,
    "gateway.shutdownSeconds": 5,
}
KINDS = ("trainingsessions", "tenants", "basemodels", "ratecards")


def install(
    cluster: Cluster,
    values: Mapping[str, Any] | None = None,
    *,
    wait_s: int = 120,
    chart: Path = CHART,
) -> None:
    """Install or upgrade, and wait until all of our pods are Ready."""
    cluster.helm(
        "upgrade", "--install", "gristmill", str(chart), f"-n{NAMESPACE}", "--create-namespace",
        "--take-ownership", "--force-conflicts", "--wait", f"--timeout={wait_s}s",
        *arguments_of({**NODE_VALUES, **digests(cluster), **(values or {})}),
        timeout=wait_s + 30,
    )  # fmt: skip
    for kind in KINDS:
        cluster.wait_condition("crd", f"{kind}.gristmill.dev", "Established")


def digests(cluster: Cluster) -> dict[str, str]:
    """The images that the node has now, pinned: an upgrade after new ones were loaded rolls the pods."""
    return {
        f"{part}.image.digest": cluster.image(part).partition("@")[2]
        for part in ("operator", "gateway", "ledger", "meter")
    }


def try_uninstall(cluster: Cluster, *more: str) -> Answer:
    """`helm uninstall`, whatever comes of it."""
    argv = [
        str(cluster.bin / "helm"), f"--kubeconfig={cluster.kubeconfig}",
        "uninstall", "gristmill", f"-n{NAMESPACE}", "--wait", "--timeout=90s", *more,
    ]  # fmt: skip
    return run(argv, env={"HOME": str(cluster.folder / "home")}, timeout=120)


def remove_everything(cluster: Cluster) -> None:
    """What an uninstall keeps as well; sessions are deleted first, while the operator is there."""
    if cluster.find("crd", "trainingsessions.gristmill.dev") is not None:
        for kind in KINDS:
            scope = ["--all-namespaces"] if kind == "trainingsessions" else []
            cluster.kubectl(
                "delete", f"{kind}.gristmill.dev", "--all", *scope, "--timeout=100s", timeout=120
            )
    cluster.helm("uninstall", "gristmill", f"-n{NAMESPACE}", "--ignore-not-found", "--no-hooks")
    tenants = cluster.objects("namespaces", selector="gristmill.dev/tenant")
    names = [*(namespace["metadata"]["name"] for namespace in tenants), NAMESPACE]
    for name in names:
        cluster.delete("namespace", name)
    for name in names:
        cluster.wait_gone("namespace", name, seconds=90)
    # A retained volume remembers the claim that it had, and no other claim of that name gets it.
    for volume in cluster.objects("persistentvolumes"):
        if volume["spec"].get("claimRef", {}).get("namespace") in names:
            cluster.delete("persistentvolume", volume["metadata"]["name"])


def pods(cluster: Cluster, component: str) -> list[dict[str, Any]]:
    selector = f"app.kubernetes.io/name=gristmill,app.kubernetes.io/component={component}"
    return cluster.objects("pods", NAMESPACE, selector)


def service_ip(cluster: Cluster, component: str) -> str:
    """ClusterIP of one of our Services, which the test process reaches."""
    ip: str = cluster.get("service", f"gristmill-{component}", NAMESPACE)["spec"]["clusterIP"]
    return ip


def refused_requests(cluster: Cluster, mark: int, account: str) -> list[str]:
    """What the API server has refused one of our accounts since the mark, for want of a right."""
    user = f"system:serviceaccount:{NAMESPACE}:{account}"
    entries = cluster.audit(mark, user=user)
    return sorted({
        f"{entry['verb']} {entry['requestURI'].partition('?')[0]}"
        for entry in entries
        if entry.get("responseStatus", {}).get("code") == 403
    })  # fmt: skip
