"""What the chart runs: images, settings, security, probes, placement."""

import importlib
from typing import Any

import pytest

from gristmill_contracts.environment import unknown_variables
from gristmill_testing.chart import container, environment_of, find, kinds, pod_specs, render

COMPONENTS = ("operator", "gateway", "ledger")
EVERYTHING: dict[str, Any] = {
    "test.model": "tiny",
    "test.namespace": "gm-acme",
    "monitoring.dashboard.enabled": True,
    "monitoring.rules.enabled": True,
    "monitoring.serviceMonitor.enabled": True,
}


RUNNING = [
    "Deployment gristmill-operator",
    "Deployment gristmill-gateway",
    "Deployment gristmill-ledger",
    "Job gristmill-uninstall-check",
    "Pod gristmill-test",
]


def test_the_list_of_what_runs_is_whole() -> None:
    assert sorted(name for name, _ in pod_specs(render(EVERYTHING))) == sorted(RUNNING)


@pytest.mark.parametrize("name", RUNNING)
def test_every_pod_is_restricted(name: str) -> None:
    spec = dict(pod_specs(render(EVERYTHING)))[name]
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] >= 10_000
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["enableServiceLinks"] is False
    for each in spec["containers"]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert set(each["resources"]) == {"requests", "limits"}
    allowed = {"emptyDir", "configMap", "secret", "persistentVolumeClaim"}
    assert {next(iter(set(volume) - {"name"})) for volume in spec["volumes"]} <= allowed


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_process_has_probes_and_a_place_to_write(component: str) -> None:
    each = container(render(), component)
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    found = [each[probe]["httpGet"]["path"] for probe in probes]
    assert found == ["/healthz", "/healthz", "/readyz"]
    assert {mount["mountPath"] for mount in each["volumeMounts"]} >= {"/tmp"}


def test_the_key_of_the_chains_is_mounted_where_the_ledger_looks() -> None:
    objects = render({"ledger.chain.existingSecret": "chain-key", "ledger.chain.key": "k.pem"})
    ledger = container(objects, "ledger")
    path = environment_of(ledger)["GRISTMILL_LEDGER_CHAIN_KEY_FILE"]
    folders = {mount["name"]: mount["mountPath"] for mount in ledger["volumeMounts"]}
    assert path == f"{folders['chain']}/k.pem"
    assert "GRISTMILL_LEDGER_CHAIN_KEY_FILE" not in environment_of(container(render(), "ledger"))


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_settings_are_ones_that_the_process_knows_and_takes(
    component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "proxy.https": "http://proxy:3128",
        "networkPolicy.dns.cidrs": ["169.254.20.10/32"],
        "networkPolicy.cluster.podCIDRs": ["10.0.0.0/8", "fd00::/8"],
        "sessions.environment": {"NCCL_DEBUG": "WARN"},
        "ledger.database.existingSecret": "database",
        "ledger.artifacts.url": "s3://checkpoints/ours",
        "ledger.artifacts.existingSecret": "bucket-key",
        "ledger.chain.existingSecret": "chain-key",
    }
    module = importlib.import_module(f"gristmill_{component}.settings")
    settings_class = getattr(module, f"{component.capitalize()}Settings")
    for variant in ({}, values):
        variables = environment_of(container(render(variant), component))
        assert unknown_variables(settings_class, variables) == []
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            settings_class()


def test_the_operator_is_told_what_sessions_are_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill_operator.settings import OperatorSettings

    objects = render(
        {
            "proxy.https": "http://proxy:3128",
            "sessions.environment": {"NCCL_DEBUG": "WARN"},
            "global.imageRegistry": "mirror.example.com",
            "meter.image.digest": "sha256:" + "a" * 64,
            "networkPolicy.cluster.podCIDRs": ["10.0.0.0/8", "fd00::/8"],
            "networkPolicy.cluster.nodeCIDRs": ["192.0.2.0/24"],
            "networkPolicy.apiServer.cidrs": ["0.0.0.0/0", "198.51.100.7/32"],
            "rbac.namespaceDeletion": True,
        }
    )
    for name, value in environment_of(container(objects, "operator")).items():
        monkeypatch.setenv(name, value)
    settings = OperatorSettings()
    assert settings.meter_image == "mirror.example.com/gristmill-meter@sha256:" + "a" * 64
    assert settings.ledger_url == "http://gristmill-ledger.gristmill-system.svc:8460"
    assert settings.pod_environment["HTTPS_PROXY"] == "http://proxy:3128"
    assert settings.pod_environment["NCCL_DEBUG"] == "WARN"
    assert [str(each) for each in settings.pod_cidrs] == ["10.0.0.0/8", "fd00::/8"]
    # Where the API server is known to lie no tenant's range reaches it.
    assert settings.node_cidrs == ("192.0.2.0/24", "198.51.100.7/32")
    assert settings.namespace_deletion is True
    namespace_verbs = [
        rule["verbs"]
        for rule in find(objects, "ClusterRole", "gristmill-operator")["rules"]
        if rule["resources"] == ["namespaces"]
    ]
    assert "delete" in namespace_verbs[0]


@pytest.mark.parametrize(("registry", "prefix"), [("", ""), ("m.example/ai/", "m.example/ai/")])
def test_the_registry_stands_before_every_image(registry: str, prefix: str) -> None:
    objects = render({**EVERYTHING, "global.imageRegistry": registry})
    images = [each["image"] for _, spec in pod_specs(objects) for each in spec["containers"]]
    assert len(images) == len(RUNNING)
    assert all(image.startswith(f"{prefix}gristmill-") for image in images)


def test_a_digest_wins_over_a_tag_and_a_tag_over_the_version() -> None:
    digest = "sha256:" + "b" * 64
    objects = render(
        {
            "image.tag": "1.2.3",
            "gateway.image.tag": "1.2.4",
            "gateway.image.digest": digest,
            "ledger.image.tag": "1.2.5",
            "ledger.image.registry": "books.example.com",
        }
    )
    assert container(objects, "gateway")["image"] == f"gristmill-gateway@{digest}"
    assert container(objects, "ledger")["image"] == "books.example.com/gristmill-ledger:1.2.5"
    assert container(objects, "operator")["image"] == "gristmill-operator:1.2.3"


def test_pull_secrets_reach_every_pod() -> None:
    objects = render({**EVERYTHING, "global.imagePullSecrets": [{"name": "pull"}]})
    assert {str(spec["imagePullSecrets"]) for _, spec in pod_specs(objects)} == {
        "[{'name': 'pull'}]"
    }


def test_one_ledger_writes_sqlite_and_the_next_waits_for_it() -> None:
    objects = render()
    deployment = find(objects, "Deployment", "gristmill-ledger")["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    claim = find(objects, "PersistentVolumeClaim", "gristmill-ledger")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert ("PodDisruptionBudget", "gristmill-ledger") not in kinds(objects)


def test_several_ledgers_share_a_database_whose_url_is_no_variable() -> None:
    objects = render(
        {
            "ledger.replicas": 3,
            "ledger.database.existingSecret": "books-db",
            "ledger.database.key": "dsn",
            "ledger.persistence.accessModes": ["ReadWriteMany"],
        }
    )
    deployment = find(objects, "Deployment", "gristmill-ledger")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    each = container(objects, "ledger")
    variables = environment_of(each)
    assert variables["GRISTMILL_LEDGER_DATABASE_URL_FILE"] == "/etc/gristmill/database/dsn"
    assert not any("secretKeyRef" in str(variable) for variable in each["env"])
    assert find(objects, "PodDisruptionBudget", "gristmill-ledger")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("component", ["operator", "gateway"])
def test_a_disruption_takes_one_replica_and_never_all(component: str) -> None:
    budget = find(render(), "PodDisruptionBudget", f"gristmill-{component}")["spec"]
    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget
    alone = render({f"{component}.replicas": 1})
    assert ("PodDisruptionBudget", f"gristmill-{component}") not in kinds(alone)


def holders_of(objects: list[dict[str, Any]], secret: str) -> set[str]:
    return {
        name
        for name, spec in pod_specs(objects)
        if any(v.get("secret", {}).get("secretName") == secret for v in spec["volumes"])
    }


KEY_PATH = "/etc/gristmill/cluster-key/cluster.key"


def test_gateway_and_ledger_wait_for_the_key_that_the_operator_makes() -> None:
    objects = render()
    assert holders_of(objects, "gristmill-cluster-key") == {
        "Deployment gristmill-gateway",
        "Deployment gristmill-ledger",
    }
    for component in ("gateway", "ledger"):
        variables = environment_of(container(objects, component))
        assert variables[f"GRISTMILL_{component.upper()}_CLUSTER_KEY_FILE"] == KEY_PATH


def test_a_key_that_is_there_is_used_and_none_is_made() -> None:
    objects = render({"clusterKey.existingSecret": "vault-key"})
    assert holders_of(objects, "vault-key") == {
        f"Deployment gristmill-{component}" for component in COMPONENTS
    }
    variables = environment_of(container(objects, "operator"))
    assert variables["GRISTMILL_OPERATOR_CLUSTER_KEY_FILE"] == KEY_PATH
    role = find(objects, "Role", "gristmill-operator")
    assert not any(
        "create" in rule["verbs"] for rule in role["rules"] if rule["resources"] == ["secrets"]
    )


def test_only_those_that_call_the_api_server_have_a_token() -> None:
    tokens = {name: spec["automountServiceAccountToken"] for name, spec in pod_specs(render())}
    assert tokens["Deployment gristmill-ledger"] is False
    assert tokens["Deployment gristmill-operator"] is True
    assert tokens["Deployment gristmill-gateway"] is True


@pytest.mark.parametrize("component", COMPONENTS)
def test_proxy_and_certificates_reach_every_process(component: str) -> None:
    each = container(
        render(
            {
                "proxy.https": "http://proxy:3128",
                "proxy.none": "corp.example",
                "ca.existingConfigMap": "corp-ca",
            }
        ),
        component,
    )
    variables = environment_of(each)
    assert variables["HTTPS_PROXY"] == "http://proxy:3128"
    assert {".svc", "corp.example", "$(KUBERNETES_SERVICE_HOST)"} <= set(
        variables["NO_PROXY"].split(",")
    )
    assert variables["SSL_CERT_FILE"] == "/etc/gristmill/ca/ca.crt"
    assert "/etc/gristmill/ca" in {mount["mountPath"] for mount in each["volumeMounts"]}


@pytest.mark.parametrize("component", COMPONENTS)
def test_placement_and_extras_are_passed_on(component: str) -> None:
    constraint = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    objects = render(
        {
            f"{component}.priorityClassName": "platform",
            f"{component}.nodeSelector": {"pool": "system"},
            f"{component}.tolerations": [{"key": "system", "operator": "Exists"}],
            f"{component}.affinity": {"nodeAffinity": {}},
            f"{component}.topologySpreadConstraints": [constraint],
            f"{component}.extraEnv": [{"name": "OTEL_SDK_DISABLED", "value": "true"}],
            f"{component}.extraVolumes": [{"name": "more", "emptyDir": {}}],
            f"{component}.extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            f"{component}.podAnnotations": {"example.com/a": "b"},
            f"{component}.podLabels": {"team": "platform"},
            f"{component}.serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn"},
        }
    )
    template = find(objects, "Deployment", f"gristmill-{component}")["spec"]["template"]
    spec = template["spec"]
    assert spec["priorityClassName"] == "platform"
    assert spec["nodeSelector"] == {"pool": "system"}
    assert spec["tolerations"] == [{"key": "system", "operator": "Exists"}]
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["topologySpreadConstraints"] == [constraint]
    assert environment_of(spec["containers"][0])["OTEL_SDK_DISABLED"] == "true"
    assert {"name": "more", "emptyDir": {}} in spec["volumes"]
    assert {"name": "more", "mountPath": "/more"} in spec["containers"][0]["volumeMounts"]
    assert template["metadata"]["annotations"]["example.com/a"] == "b"
    assert template["metadata"]["labels"]["team"] == "platform"
    account = find(objects, "ServiceAccount", f"gristmill-{component}")
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn"}


def test_replicas_are_spread_where_there_is_more_than_one_node() -> None:
    spec = find(render(), "Deployment", "gristmill-gateway")["spec"]["template"]["spec"]
    keys = {each["topologyKey"] for each in spec["topologySpreadConstraints"]}
    assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}


def test_a_rolling_update_of_the_gateway_takes_nobody_away_first() -> None:
    deployment = find(render(), "Deployment", "gristmill-gateway")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    spec = deployment["template"]["spec"]
    variables = environment_of(spec["containers"][0])
    leave, shutdown = (int(variables[f"GRISTMILL_GATEWAY_{n}_S"]) for n in ("LEAVE", "SHUTDOWN"))
    assert leave >= 5
    assert spec["terminationGracePeriodSeconds"] >= leave + shutdown + 5


def test_a_ledger_keeps_its_artifacts_in_a_bucket_whose_secret_is_no_variable() -> None:
    objects = render(
        {
            "ledger.artifacts.url": "s3://checkpoints/ours",
            "ledger.artifacts.endpoint": "https://s3.example.com",
            "ledger.artifacts.existingSecret": "bucket-key",
        }
    )
    each = container(objects, "ledger")
    variables = environment_of(each)
    assert variables["GRISTMILL_LEDGER_ARTIFACTS_URL"] == "s3://checkpoints/ours"
    assert variables["GRISTMILL_LEDGER_ARTIFACTS_ENDPOINT"] == "https://s3.example.com"
    assert "GRISTMILL_LEDGER_ARTIFACTS_DIR" not in variables
    folder = variables["GRISTMILL_LEDGER_ARTIFACTS_CREDENTIALS_DIR"]
    assert {"name": "artifacts", "mountPath": folder, "readOnly": True} in each["volumeMounts"]
    deployment = find(objects, "Deployment", "gristmill-ledger")["spec"]["template"]["spec"]
    assert {"name": "artifacts", "secret": {"secretName": "bucket-key"}} in deployment["volumes"]
    without = environment_of(container(render({}), "ledger"))
    assert "GRISTMILL_LEDGER_ARTIFACTS_URL" not in without
    assert "GRISTMILL_LEDGER_ARTIFACTS_DIR" in without
