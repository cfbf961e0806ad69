"""Commands against a cluster's gateway and ledger, which are real here and know who asks."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from yarl import URL

from gristmill_cli.cluster.signing import Credentials, signed_headers
from gristmill_cli.health import health_of
from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.http import Empty, RegisterSession
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_testing.cli import Commands
from gristmill_testing.gateway_world import World, gateway_world
from gristmill_testing.ledger import make_event, running_ledger

KEY = bytes(range(32))


@pytest.fixture(scope="module", name="world")
def world_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with gateway_world(tmp_path_factory.mktemp("gateway")) as world:
        world.add_session("Run-2", uid="22222222-2222-4333-8444-555555555555", served=False)
        model = world.store.get(BaseModelResource, "", "tiny")
        spec = model.spec.model_copy(update={"architecture": "LlamaForCausalLM"})
        world.store.update(model.model_copy(update={"spec": spec}))
        yield world


@pytest.fixture(name="asked")
def asked_fixture(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The environment of a tenant's user, and the option that names the gateway."""
    key = world.keys["acme"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"secret-of-{key}")
    return ("--endpoint", world.url)


def test_a_request_is_signed_as_the_sdk_signs_it() -> None:
    body = b'{"TrainingSessionName": "run-1"}'
    keys = {"key_id": "AKIAEXAMPLE", "secret": "s3cr3t+/", "region": "eu-central-1"}
    now = datetime(2026, 1, 31, 12, 0, 7, tzinfo=UTC)
    ours = signed_headers(
        "https://gm.example.com:8450", "DescribeTrainingSession", body, Credentials(**keys), now
    )
    plain = {name: value for name, value in ours.items() if name not in ("Authorization",)}
    request = AWSRequest("POST", "https://gm.example.com:8450/", plain, body)
    signer = SigV4Auth(BotoCredentials(keys["key_id"], keys["secret"]), "sagemaker", keys["region"])
    request.context["timestamp"] = ours["X-Amz-Date"]
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert ours["Authorization"].endswith(f"Signature={signer.signature(text, request)}")


def test_sessions_of_the_keys_tenant_are_listed(
    commands: Commands, world: World, asked: tuple[str, str]
) -> None:
    head, *rows = commands.ok("get", "sessions", *asked).splitlines()
    assert head.split() == ["NAME", "STATE", "MODEL", "RANK", "PREFILL", "SAMPLE", "TRAIN", "AGE"]
    assert [row.split()[:4] for row in rows] == [
        ["Run-2", "Running", "tiny", "32"],
        ["run-1", "Running", "tiny", "32"],
    ]
    told = commands.json("get", "session", "run-1", *asked)
    assert told["TrainingSessionName"] == "run-1"
    assert told["LastReceivedSequenceNumber"] == 0


def test_a_session_is_described(commands: Commands, asked: tuple[str, str]) -> None:
    lines = commands.ok("describe", "session", "run-1", *asked).splitlines()
    told = dict(line.split(":", 1) for line in lines)
    assert told["State"].strip() == "Running"
    assert told["Base model"].strip() == "tiny"
    assert told["Output"].strip() == "s3://data/run-1/output"


def test_models_are_listed_and_described(commands: Commands, asked: tuple[str, str]) -> None:
    rows = commands.ok("get", "models", *asked).splitlines()
    assert rows == commands.ok("models", "list", *asked).splitlines()
    assert rows[1].split() == ["tiny", "LlamaForCausalLM", "bfloat16", "64", "Lab/Tiny"]
    facts = commands.json("models", "describe", "tiny", *asked)
    assert facts["HuggingfaceId"] == "Lab/Tiny"
    assert facts["ContextLength"] == 64
    text = commands.ok("models", "describe", "tiny", *asked)
    assert "Context:      64 tokens" in text


def test_the_endpoint_may_stand_in_the_environment(
    commands: Commands, world: World, asked: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_CLI_ENDPOINT", f"{world.url}/")
    assert "run-1" in commands.ok("get", "sessions")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["describe", "session", "other"], "Training session other does not exist"),
        (["models", "describe", "huge"], "base model 'huge' does not exist; there are: tiny"),
        (["get", "tenants"], "an access key sees its own tenant alone"),
    ],
)
def test_what_is_not_there_is_said_in_the_gateways_words(
    commands: Commands, asked: tuple[str, str], words: list[str], said: str
) -> None:
    assert said in commands.refused(*words, *asked)


def test_a_wrong_key_and_no_key_are_refused(
    commands: Commands, world: World, asked: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "signature" in commands.refused("get", "sessions", *asked)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set" in commands.refused(
        "get", "sessions", *asked
    )


def test_a_gateway_that_is_away_is_named(commands: Commands, asked: tuple[str, str]) -> None:
    said = commands.refused("get", "sessions", "--endpoint", "http://127.0.0.1:9")
    assert "the gateway at http://127.0.0.1:9 does not answer" in said


async def test_usage_is_read_from_a_ledger_that_asks_who_reads(
    commands: Commands, tmp_path: Path
) -> None:
    key_file = tmp_path / "cluster.key"
    key_file.write_bytes(KEY)
    async with running_ledger(tmp_path / "ledger", cluster_key_file=key_file) as ledger:
        session = RegisterSession(
            uid=SessionUid("s-1"), tenant=TenantName("acme"), project="p", name="run-1",
            model="tiny", rank=8, created_us=1,
        )  # fmt: skip
        await ledger.as_service(KEY, "operator").ask(Empty, "POST", "/v1/sessions", session)
        meter = ledger.as_meter(KEY, "s-1")
        await meter.register("s-1")
        event = make_event(1)
        await meter.post("s-1", [event])
        assert event.counts is not None
        asked = ("usage", "--group-by", "session", "--ledger-url", ledger.url)
        known = (*asked, "--cluster-key-file", str(key_file))
        answer = await asyncio.to_thread(commands.json, *known)
        row = answer["rows"][0]
        assert (row["session_name"], row["total"]) == ("run-1", event.counts.total)
        assert "run-1" in await asyncio.to_thread(commands.ok, *known)
        said = await asyncio.to_thread(commands.refused, *asked)
        assert "the call shows nobody" in said
        ready = await asyncio.to_thread(commands.json, "status", "--ledger-url", ledger.url)
        assert ready["parts"] == [{"name": "ledger", "url": ledger.url, "health": "ready"}]


async def test_status_tells_why_a_ledger_is_not_ready(commands: Commands, tmp_path: Path) -> None:
    async with running_ledger(tmp_path / "ledger") as ledger:
        ledger.ledger.stopping = True
        asked = ("status", "-o", "json")
        cluster = await asyncio.to_thread(commands.run, *asked, "--ledger-url", ledger.url)
        (part,) = json.loads(cluster.stdout)["parts"]
        with commands.pretend_running(ledger.url):
            row = {
                "name": "ledger", "pid": 1, "port": URL(ledger.url).port, "socket": "", "restarts": 0,
                "started_us": 1, "log": "",
            }  # fmt: skip
            commands.layout.processes.write_text(json.dumps([row]))
            machine = await asyncio.to_thread(commands.run, *asked)
        (process,) = json.loads(machine.stdout)["processes"]
    assert (cluster.exit_code, machine.exit_code) == (1, 1)
    why = "the ledger is stopping; ask another replica"
    assert (part["health"], process["health"]) == (why, why)


@pytest.mark.parametrize(
    ("body", "health"),
    [
        (b"", "status 503"),
        (b"not yet\n", "not yet"),
        (b"\x85\xff", "\ufffd\ufffd"),
        (b"\x81\xa4code\xa1\xff", "\ufffd\ufffdcode\ufffd\ufffd"),
        (b'{"code": "unavailable", "message": "two\\nlines"}', "two lines"),
    ],
)
def test_whatever_a_part_says_is_one_line(body: bytes, health: str) -> None:
    assert health_of(503, body) == health


def test_a_key_file_that_is_none_is_named(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    asked = ("usage", "--ledger-url", "http://127.0.0.1:9", "--cluster-key-file", str(file))
    assert f"the cluster's key {file} cannot be read" in commands.refused(*asked)
    file.write_text("short")
    assert "has 5 bytes, not 32" in commands.refused(*asked)


def test_the_status_of_a_cluster_fails_while_a_part_is_away(
    commands: Commands, world: World
) -> None:
    result = commands.run(
        "status", "--endpoint", world.url, "--ledger-url", "http://127.0.0.1:9", "-o", "json"
    )
    parts = {each["name"]: each["health"] for each in json.loads(result.stdout)["parts"]}
    assert result.exit_code == 1
    assert parts["gateway"] == "ready"
    assert parts["ledger"].startswith("does not answer")


def test_a_models_ways_to_run_are_described_on_one_machine(
    commands: Commands, world: World
) -> None:
    model = world.store.get(BaseModelResource, "", "tiny")
    commands.store.create(model.model_copy(update={"metadata": model.metadata.model_copy()}))
    text = commands.ok("models", "describe", "tiny")
    assert "  default: cpu 1, memory 2Gi, no device" in text
    assert "there is no model 'x'; known: tiny" in commands.refused("models", "describe", "x")
