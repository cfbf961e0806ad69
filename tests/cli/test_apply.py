"""`apply`, `get`, `describe` and `delete` on the local store, in the manner of kubectl."""

import json
from typing import Any

import pytest
import yaml

from gristmill_contracts import labels
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_testing.cli import Commands


def manifest(name: str = "run-1", meta: dict[str, Any] | None = None, **spec: Any) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "gristmill.dev/v1alpha1",
            "kind": "TrainingSession",
            "metadata": {"name": name, **(meta or {})},
            "spec": {"baseModelRef": {"name": "tiny"}, **spec},
        }
    )


def apply(commands: Commands, text: str) -> str:
    return commands.ok("apply", "-f", "-", text=text).strip()


def test_a_session_is_created_then_unchanged_then_configured(commands: Commands) -> None:
    name = "trainingsession.gristmill.dev/run-1"
    assert apply(commands, manifest()) == f"{name} created"
    revision = commands.store.revision()
    assert apply(commands, manifest()) == f"{name} unchanged"
    assert commands.store.revision() == revision
    assert apply(commands, manifest(desiredState="Stopped")) == f"{name} configured"
    kept = commands.store.get(TrainingSession, "default", "run-1")
    assert (kept.spec.desired_state, kept.metadata.generation) == ("Stopped", 2)


def test_many_documents_are_applied_in_their_order(commands: Commands) -> None:
    tenant = "apiVersion: gristmill.dev/v1alpha1\nkind: Tenant\nmetadata: {name: acme}\n"
    text = "---\n".join([tenant, manifest("a", {"namespace": "acme"}), manifest("b")])
    assert [line.split()[0] for line in apply(commands, text).splitlines()] == [
        "tenant.gristmill.dev/acme",
        "trainingsession.gristmill.dev/a",
        "trainingsession.gristmill.dev/b",
    ]
    tenants = [each.metadata.name for each in commands.store.list(Tenant)]
    assert tenants == ["acme", "default"]


def test_one_wrong_document_leaves_all_unapplied(commands: Commands) -> None:
    commands.refused("apply", "-f", "-", text="---\n".join([manifest(), manifest("Bad_Name")]))
    assert commands.store.list(TrainingSession) == []


WRONG: list[tuple[str, str, str]] = [
    ("an unknown field", manifest(rank=3), "unknown field spec.rank"),
    ("an unknown nested field", manifest(lora={"beta": 3}), "unknown field spec.lora.beta"),
    ("a field in Python's spelling", manifest(display_name="x"), "unknown field spec.display_name"),
    ("a value that is too large", manifest(lora={"rank": 257}), "spec.lora.rank is 257"),
    ("a value of another type", manifest(workers="many"), "spec.workers is 'many'"),
    (
        "a word that is not one of them",
        manifest(desiredState="Gone"),
        "spec.desiredState is 'Gone'",
    ),
    ("a name that is too long", manifest("x" * 41), "metadata.name is 'xxxxx"),
    ("a name in upper case", manifest("Run"), "metadata.name is 'Run'"),
    ("a field that the store fills", manifest(meta={"uid": "x"}), "metadata.uid cannot be set"),
    ("no base model", manifest().replace("baseModelRef", "other"), "spec.baseModelRef is missing"),
    ("another kind", manifest().replace("TrainingSession", "Pod"), "kind is 'Pod'"),
    ("another version", manifest().replace("v1alpha1", "v9"), "apiVersion is 'gristmill.dev/v9'"),
    (
        "an output path that leads out of its bucket",
        manifest(output={"path": "s3://data/../../x"}),
        "spec.output.path is 's3://data/../../x'",
    ),
    (
        "an output path that is no S3 location",
        manifest(output={"path": "/etc"}),
        "spec.output.path is '/etc'",
    ),
    ("a list", "- 1\n", "a resource is a mapping, not list"),
    ("nothing", "---\n", "holds no resource"),
    ("no YAML", "a: [", "is not YAML"),
    ("a YAML tag that would run code", "!!python/object/apply:os.system [ls]", "is not YAML"),
]


@pytest.mark.parametrize(
    ("text", "words"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_a_wrong_manifest_is_refused_naming_field_and_value(
    commands: Commands, text: str, words: str
) -> None:
    error = commands.refused("apply", "-f", "-", text=text)
    assert error.startswith("error: standard input")
    assert words in error
    assert commands.store.list(TrainingSession) == []


CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"baseModelRef": {"name": "other"}}, "spec.baseModelRef"),
    ({}, {"lora": {"rank": 8}}, "spec.lora"),
    ({}, {"displayName": "Other"}, "spec.displayName"),
    ({}, {"output": {"path": "s3://elsewhere/x"}}, "spec.output"),
    ({}, {"project": "p"}, "spec.project"),
    ({"desiredState": "Stopped"}, {"desiredState": "Running"}, "spec.desiredState is Stopped"),
    ({}, {"limits": {"pendingSeconds": 60}}, "spec.limits.pendingSeconds may only grow"),
    ({"limits": {"lifetimeSeconds": 600}}, {}, "spec.limits.lifetimeSeconds may only grow"),
]


@pytest.mark.parametrize(("before", "after", "words"), CHANGES)
def test_what_a_session_is_made_of_cannot_be_changed(
    commands: Commands, before: dict[str, Any], after: dict[str, Any], words: str
) -> None:
    apply(commands, manifest(**before))
    kept = commands.store.get(TrainingSession, "default", "run-1")
    assert words in commands.refused("apply", "-f", "-", text=manifest(**after))
    assert commands.store.get(TrainingSession, "default", "run-1") == kept


def test_a_limit_may_grow(commands: Commands) -> None:
    apply(commands, manifest(limits={"lifetimeSeconds": 600}))
    assert apply(commands, manifest(limits={"lifetimeSeconds": 601})).endswith("configured")


def test_the_durable_identity_cannot_be_changed(commands: Commands) -> None:
    apply(commands, manifest(meta={"annotations": {labels.SESSION_ID: "mine"}}))
    other = manifest(meta={"annotations": {labels.SESSION_ID: "another"}})
    assert "'mine' for good" in commands.refused("apply", "-f", "-", text=other)


def test_labels_are_added_to_those_that_are_there(commands: Commands) -> None:
    apply(commands, manifest(meta={"labels": {"a": "1"}}))
    apply(commands, manifest(meta={"labels": {"b": "2"}}))
    kept = commands.store.get(TrainingSession, "default", "run-1")
    assert kept.metadata.labels == {"a": "1", "b": "2"}


def test_a_display_name_is_taken_once_in_a_tenant(commands: Commands) -> None:
    apply(commands, manifest("a", displayName="Same"))
    error = commands.refused("apply", "-f", "-", text=manifest("b", displayName="Same"))
    assert "taken by trainingsession.gristmill.dev/a" in error
    assert apply(commands, manifest("b", {"namespace": "other"}, displayName="Same"))


def test_a_status_in_the_manifest_is_not_taken_over(commands: Commands) -> None:
    apply(commands, manifest() + "status: {state: Running}\n")
    assert commands.store.get(TrainingSession, "default", "run-1").status.state == "Created"


def test_what_get_prints_can_be_applied_again(commands: Commands) -> None:
    apply(commands, manifest(displayName="Run-1"))
    shown = yaml.safe_load(commands.ok("get", "session", "run-1", "--output", "yaml"))
    shown["metadata"] = {"name": shown["metadata"]["name"]}
    assert apply(commands, yaml.safe_dump(shown)).endswith("unchanged")


def test_a_file_that_is_not_there_is_named(commands: Commands) -> None:
    assert "no-such.yaml cannot be read" in commands.refused("apply", "-f", "no-such.yaml")


def test_apply_says_when_nothing_runs(commands: Commands) -> None:
    result = commands.run("apply", "-f", "-", text=manifest())
    assert "takes effect at the next `gristmill up`" in result.stderr
    with commands.pretend_running():
        assert commands.run("apply", "-f", "-", text=manifest()).stderr == ""


# --- get, describe, delete -----------------------------------------------------------------------


def test_sessions_are_listed_by_tenant(commands: Commands) -> None:
    apply(commands, "---\n".join([manifest("a"), manifest("b", {"namespace": "other"})]))
    assert [row["metadata"]["name"] for row in commands.json("get", "sessions")] == ["a"]
    assert len(commands.json("get", "sessions", "--all-tenants")) == 2
    table = commands.ok("get", "sessions", "--tenant", "other")
    assert table.splitlines()[0].split()[:4] == ["TENANT", "NAME", "STATE", "MODEL"]
    assert table.splitlines()[1].split()[:4] == ["other", "b", "Created", "tiny"]


def test_a_session_is_found_by_its_display_name_too(commands: Commands) -> None:
    apply(commands, manifest("ts-abc", displayName="Long.Name".replace(".", "-")))
    for name in ("ts-abc", "Long-Name"):
        assert commands.json("get", "session", name)["metadata"]["name"] == "ts-abc"
        assert "Long-Name" in commands.ok("describe", "session", name)


def test_what_is_not_there_is_said_in_one_line(commands: Commands) -> None:
    assert "no session 'x'" in commands.refused("get", "session", "x")
    assert "no session 'x'" in commands.refused("describe", "session", "x")
    assert "no session 'x'" in commands.refused("delete", "session", "x")
    assert "no 'x'; known: none" in commands.refused("get", "model", "x")
    assert "no 'x'; known: none" in commands.refused("get", "tenant", "x")


def test_an_unknown_noun_is_a_usage_error(commands: Commands) -> None:
    commands.refused("get", "pods", code=2)


def test_a_session_that_nobody_took_up_is_deleted_at_once(commands: Commands) -> None:
    apply(commands, manifest())
    answer = json.loads(commands.ok("delete", "session", "run-1", "--output", "json"))
    assert answer["outcome"] == "deleted"
    assert "run-1" in answer["resource"]
    assert commands.store.list(TrainingSession) == []


def test_a_session_with_usage_needs_the_instance_to_be_deleted(commands: Commands) -> None:
    apply(commands, manifest())
    kept = commands.store.get(TrainingSession, "default", "run-1")
    meta = kept.metadata.model_copy(update={"finalizers": [labels.METERING_FLUSH]})
    commands.store.update(kept.model_copy(update={"metadata": meta}))
    assert "not running" in commands.refused("delete", "session", "run-1")
    assert commands.store.get(TrainingSession, "default", "run-1").metadata.deletion_time_us is None
    with commands.pretend_running():
        error = commands.refused("delete", "session", "run-1", "--timeout-s", "0")
        assert "not gone after 0 s" in error
        assert "is being deleted" in commands.ok("delete", "session", "run-1", "--no-wait")
    assert commands.store.get(TrainingSession, "default", "run-1").metadata.deletion_time_us


def test_a_session_that_is_being_deleted_is_not_changed(commands: Commands) -> None:
    apply(commands, manifest())
    kept = commands.store.get(TrainingSession, "default", "run-1")
    meta = kept.metadata.model_copy(update={"finalizers": ["somebody/else"]})
    commands.store.update(kept.model_copy(update={"metadata": meta}))
    commands.store.delete(TrainingSession, "default", "run-1")
    assert "is being deleted" in commands.refused("apply", "-f", "-", text=manifest())
