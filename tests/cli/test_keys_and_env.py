"""Keys are made, listed without secrets and revoked; `env` prints what a shell can run."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from gristmill_contracts.credentials import AccessKey
from gristmill_contracts.tenant import Tenant
from gristmill_testing.cli import Commands


def give_account(commands: Commands, tenant: str = "default") -> None:
    """What the supervisor does once the ledger answers."""
    known = commands.store.get(Tenant, "", tenant)
    status = known.status.model_copy(update={"account_id": "100000000001"})
    commands.store.update_status(known.model_copy(update={"status": status}))


def test_a_key_is_made_with_its_tenant(commands: Commands) -> None:
    made = commands.json("keys", "create", "--tenant", "acme", "--description", "ci")
    assert made["accessKeyId"].startswith("AKIA")
    assert len(made["accessKeyId"]) == 20
    assert len(made["secretAccessKey"]) == 40
    kept = commands.store.list(AccessKey, "acme")[0]
    assert kept.spec.secret_access_key == made["secretAccessKey"]
    assert commands.store.get(Tenant, "", "acme").spec.suspended is False


def test_no_two_keys_are_alike(commands: Commands) -> None:
    made = [commands.json("keys", "create") for _ in range(5)]
    assert len({key["accessKeyId"] for key in made}) == 5
    assert len({key["secretAccessKey"] for key in made}) == 5


def test_a_list_shows_no_secret(commands: Commands) -> None:
    secret = commands.json("keys", "create", "--tenant", "acme")["secretAccessKey"]
    for output in ("table", "json", "yaml"):
        shown = commands.ok("keys", "list", "--output", output)
        assert "acme" in shown
        assert secret not in shown


def test_a_revoked_key_is_kept_and_no_longer_handed_out(commands: Commands) -> None:
    first = commands.json("keys", "create")["accessKeyId"]
    second = commands.json("keys", "create")["accessKeyId"]
    give_account(commands)
    commands.ok("keys", "revoke", first)
    revoked = commands.json("keys", "list")[0]["revoked"]
    assert revoked is not None
    commands.ok("keys", "revoke", first)
    with commands.pretend_running():
        assert commands.json("env")["AWS_ACCESS_KEY_ID"] == second
        commands.ok("keys", "revoke", second)
        assert "no access key" in commands.refused("env")


def test_what_cannot_be_is_refused(commands: Commands) -> None:
    assert "no key 'AKIAX'" in commands.refused("keys", "revoke", "AKIAX")
    assert "'Bad Name' is not valid" in commands.refused("keys", "create", "--tenant", "Bad Name")
    assert commands.store.list(Tenant) == []


def test_env_needs_a_running_instance(commands: Commands) -> None:
    commands.ok("keys", "create")
    error = commands.refused("env")
    assert "not running" in error
    assert f"gristmill up --data-dir {commands.data_dir}" in error


def test_env_names_a_tenant_that_is_not_there(commands: Commands) -> None:
    with commands.pretend_running():
        assert "no tenant 'acme'" in commands.refused("env", "--tenant", "acme")


def test_a_shell_takes_over_what_env_prints(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "it's a $HOME `echo folder`")
    commands.ok("keys", "create")
    give_account(commands)
    with commands.pretend_running():
        lines = commands.ok("env")
        expected = commands.json("env")
    script = f"{lines}\nexec env -0"
    before = {"AWS_SESSION_TOKEN": "old", "AWS_PROFILE": "old", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], env=before, capture_output=True, check=True)
    seen = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line)
    assert {name: seen.get(name) for name in expected} == expected
    assert not {"AWS_SESSION_TOKEN", "AWS_PROFILE"} & set(seen)


def test_env_says_all_that_the_sdks_look_for(commands: Commands) -> None:
    commands.ok("keys", "create")
    give_account(commands)
    with commands.pretend_running():
        found = commands.json("env")
    for name in (
        "SAGEMAKER_TRAINING_SESSION_ENDPOINT",
        "SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT",
        "AWS_ENDPOINT_URL_SAGEMAKER",
        "AWS_ENDPOINT_URL_S3",
    ):
        assert found[name] == "http://127.0.0.1:8450"
    assert found["AWS_REGION"] == found["AWS_DEFAULT_REGION"]
    assert found["GRISTMILL_DATA_DIR"] == str(commands.data_dir)
    with open(found["SAGEMAKER_USER_CONFIG_OVERRIDE"], encoding="utf-8") as file:
        modules = yaml.safe_load(file)["SageMaker"]["PythonSDK"]["Modules"]
    assert modules["Session"]["DefaultS3Bucket"] == "gristmill-100000000001"


def test_the_sdk_itself_accepts_the_configuration_file(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.ok("keys", "create")
    give_account(commands)
    with commands.pretend_running():
        path = commands.json("env")["SAGEMAKER_USER_CONFIG_OVERRIDE"]
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", path)
    from sagemaker.core.config.config import load_sagemaker_config

    config = load_sagemaker_config()
    assert "gristmill-100000000001" in json.dumps(config)
