"""Who may do what: the roles of the chart, no wider and no narrower than what is done."""

from collections.abc import Iterator
from typing import Any

import pytest

from gristmill_operator.permissions import Right, needed
from gristmill_testing.chart import NAMESPACE, find, kinds, render

Rule = tuple[str, str, str, str]
"""Group, resource, verb, name ("" = any)."""
EVERYTHING: dict[str, Any] = {
    "test.model": "tiny",
    "test.namespace": "gm-acme",
    "rbac.namespaceDeletion": True,
    "operator.hubTokenSecrets": ["hub"],
}


def rules(objects: list[dict[str, Any]], kind: str, name: str) -> Iterator[Rule]:
    for rule in find(objects, kind, name)["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for each in rule.get("resourceNames", [""]):
                        yield group, resource, verb, each


def all_roles(objects: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (each["kind"], each["metadata"]["name"])
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
    ]


def test_no_role_has_a_wildcard_or_a_way_to_more_rights() -> None:
    objects = render(EVERYTHING)
    roles = all_roles(objects)
    assert len(roles) >= 7
    for kind, name in roles:
        for group, resource, verb, _ in rules(objects, kind, name):
            assert "*" not in (group, resource, verb), name
            assert verb not in ("escalate", "impersonate"), name


def test_one_role_may_be_bound_and_it_is_named() -> None:
    objects = render(EVERYTHING)
    bound = [
        (name, *rule)
        for kind, name in all_roles(objects)
        for rule in rules(objects, kind, name)
        if rule[2] == "bind"
    ]
    assert bound == [
        (
            "gristmill-operator",
            "rbac.authorization.k8s.io",
            "clusterroles",
            "bind",
            "gristmill-operator-tenant",
        )
    ]


def grants(right: Right) -> Rule:
    return right.group, right.resource, right.verb, right.name


def test_the_operator_has_what_it_asks_for_at_its_start() -> None:
    objects = render()
    cluster_wide = set(rules(objects, "ClusterRole", "gristmill-operator"))
    at_home = set(rules(objects, "Role", "gristmill-operator"))
    asked = needed(NAMESPACE)
    assert len(asked) > 30
    lacking = [
        str(right)
        for right in asked
        if grants(right) not in (at_home if right.namespace else cluster_wide)
    ]
    assert lacking == []


BEYOND = {
    # Not asked for, since they matter in some clusters alone, or later.
    ("gristmill.dev", "trainingsessions/finalizers", "update", ""),
    ("gristmill.dev", "tenants/finalizers", "update", ""),
    ("rbac.authorization.k8s.io", "clusterroles", "bind", "gristmill-operator-tenant"),
    ("", "secrets", "create", ""),
    # Before its role is bound in a tenant's namespace it looks which bindings are there.
    ("rbac.authorization.k8s.io", "rolebindings", "list", ""),
}


def test_the_operator_has_no_more_than_that_outside_of_tenants() -> None:
    objects = render()
    granted = {
        *rules(objects, "ClusterRole", "gristmill-operator"),
        *rules(objects, "Role", "gristmill-operator"),
    }
    assert granted - {grants(right) for right in needed(NAMESPACE)} == BEYOND


def test_the_operator_deletes_namespaces_only_where_that_was_allowed() -> None:
    deletes = ("", "namespaces", "delete", "")
    assert deletes not in set(rules(render(), "ClusterRole", "gristmill-operator"))
    allowed = render({"rbac.namespaceDeletion": True})
    assert deletes in set(rules(allowed, "ClusterRole", "gristmill-operator"))


def test_nobody_reads_secrets_of_all_namespaces() -> None:
    objects = render(EVERYTHING)
    for name in ("gristmill-operator", "gristmill-gateway"):
        assert not any(rule[1] == "secrets" for rule in rules(objects, "ClusterRole", name))
    in_tenants = {
        rule[2]
        for rule in rules(objects, "ClusterRole", "gristmill-operator-tenant")
        if rule[1] == "secrets"
    }
    assert in_tenants == {"get", "create", "patch", "delete"}


def test_hub_tokens_are_read_by_their_names() -> None:
    named = {
        rule[3]
        for rule in rules(render(EVERYTHING), "Role", "gristmill-operator")
        if rule[1] == "secrets" and rule[2] == "get"
    }
    assert named == {"gristmill-cluster-key", "hub"}


@pytest.mark.parametrize("role", ["gristmill-viewer", "gristmill-editor"])
def test_the_operator_may_bind_the_roles_of_people_because_it_holds_their_rights(role: str) -> None:
    objects = render()
    held = set(rules(objects, "ClusterRole", "gristmill-operator-tenant"))
    assert set(rules(objects, "ClusterRole", role)) - held == set()


def test_the_gateway_has_this_and_no_more() -> None:
    ours = "gristmill.dev"
    read = {"get", "list", "watch"}
    kinds = ("trainingsessions", "tenants", "basemodels")
    assert set(rules(render(), "ClusterRole", "gristmill-gateway")) == {
        *((ours, kind, verb, "") for kind in kinds for verb in read),
        *((ours, "trainingsessions", v, "") for v in ("create", "patch", "delete")),
        ("authorization.k8s.io", "subjectaccessreviews", "create", ""),
    }


@pytest.mark.parametrize("role", ["view", "edit", "admin"])
def test_the_roles_of_people_are_aggregated_unless_told_otherwise(role: str) -> None:
    name = {"view": "gristmill-viewer", "edit": "gristmill-editor", "admin": "gristmill-admin"}[
        role
    ]
    label = f"rbac.authorization.k8s.io/aggregate-to-{role}"
    assert find(render(), "ClusterRole", name)["metadata"]["labels"][label] == "true"
    alone = render({"rbac.aggregate": False})
    assert label not in find(alone, "ClusterRole", name)["metadata"]["labels"]


def test_everybody_reads_models_and_prices_unless_told_otherwise() -> None:
    objects = render()
    granted = set(rules(objects, "ClusterRole", "gristmill-catalogue"))
    assert {rule[2] for rule in granted} == {"get", "list", "watch"}
    assert not any(rule[1].startswith("tenants") for rule in granted)
    closed = kinds(render({"rbac.catalogue": False}))
    assert not [each for each in closed if each[1] == "gristmill-catalogue"]


def test_a_viewer_changes_nothing_and_an_editor_only_sessions() -> None:
    objects = render()
    viewer = {rule[2] for rule in rules(objects, "ClusterRole", "gristmill-viewer")}
    assert viewer == {"get", "list", "watch"}
    changed = {
        rule[1]
        for rule in rules(objects, "ClusterRole", "gristmill-editor")
        if rule[2] not in viewer
    }
    assert changed == {"trainingsessions"}
