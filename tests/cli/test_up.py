"""`gristmill up` as a real process: it starts everything, survives what is killed, and ends in order."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from gristmill_testing.instance import RunningGristmill, running_gristmill
from gristmill_testing.raw_wire import (
    RawSession,
    create_session,
    datum,
    forward_backward,
    optimizer_step,
    raw_clients,
    wait_until,
)
from gristmill_testing.tiny_models import build_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PARTS = ("gateway", "ledger", "meter", "worker")
TOKENS = [7, 11, 13]
T = TypeVar("T")


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGristmill]:
    model = build_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    with running_gristmill(tmp_path_factory.mktemp("gm"), model=model) as instance:
        yield instance


@pytest.fixture
def session(instance: RunningGristmill) -> RawSession:
    return create_session(raw_clients(instance.environment), instance.model)


def step(session: RawSession) -> float:
    """One forward_backward and one optimizer_step; returns the loss."""
    passed = session.run(forward_backward(datum(TOKENS)))
    assert passed["status"] == "Completed", passed
    stepped = session.run(optimizer_step(learning_rate=1e-3))
    assert stepped["status"] == "Completed", stepped
    return float(passed["operationResult"]["forwardBackward"]["metrics"]["actor/pg_loss"])


def persistently(call: Callable[[], T], timeout_s: float = 120) -> T:
    """Repeat a call that the gateway or a connection refused: what every SDK does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except Exception:
            # botocore raises many kinds.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def shown(instance: RunningGristmill, name: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(instance.cli("get", "session", name, "-o", "json"))
    return found


def test_a_session_trains_and_its_tokens_are_in_the_books(
    instance: RunningGristmill, session: RawSession
) -> None:
    losses = [step(session) for _ in range(3)]
    assert losses[-1] < losses[0]
    expected = {"prefill": 0, "cached_prefill": 0, "sample": 0, "train": 3 * len(TOKENS)}
    wait_until(lambda: instance.usage_by_api(session.name) == expected, "the usage", 20)
    assert instance.usage_by_cli(session.name) == expected
    assert session.name in instance.cli("get", "sessions")


def test_status_shows_every_part_ready(instance: RunningGristmill) -> None:
    def parts() -> set[str] | None:
        done = instance.run_cli("status", "-o", "json")
        rows = json.loads(done.stdout)["processes"]
        return {row["part"] for row in rows} if done.returncode == 0 else None

    wait_until(lambda: parts() == set(PARTS), "all parts to be ready", 30)


@pytest.mark.parametrize("part", PARTS)
def test_a_killed_part_comes_back_at_its_place_and_the_session_goes_on(
    instance: RunningGristmill, session: RawSession, part: str
) -> None:
    step(session)
    before = {(row["name"], row["port"], row["socket"]) for row in instance.processes()}
    killed = instance.kill(part)
    assert instance.pid_of(part) != killed
    operation = persistently(
        lambda: session.submit(forward_backward(datum(TOKENS)), number=3, token="same")
    )
    result = persistently(lambda: session.get(operation))
    assert result["status"] == "Completed", (result, session.describe())
    assert {(row["name"], row["port"], row["socket"]) for row in instance.processes()} == before
    instance.wait_ready(part)


def test_a_second_instance_on_the_folder_is_refused(instance: RunningGristmill) -> None:
    done = instance.run_cli("up", "--port", "0")
    assert done.returncode == 1
    assert "already running" in done.stderr
    assert str(instance.process.pid) in done.stderr


def test_a_session_survives_an_orderly_end_and_a_crash_of_the_instance(
    instance: RunningGristmill, session: RawSession
) -> None:
    losses = [step(session)]
    url, children = instance.url, [row["pid"] for row in instance.processes()]
    assert instance.stop() == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
    assert "not running" in instance.run_cli("env").stderr
    instance.start()
    assert instance.url == url
    losses.append(persistently(lambda: step(session)))

    children = [row["pid"] for row in instance.processes()]
    instance.process.send_signal(signal.SIGKILL)
    instance.process.wait(10)
    wait_until(
        lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children),
        "no child to be left",
        10,
    )
    instance.start()
    losses.append(persistently(lambda: step(session)))
    assert losses == sorted(losses, reverse=True)
    assert session.describe()["LastReceivedSequenceNumber"] == 6
    assert session.describe()["BillableTokenUsage"]["TrainingTokenCount"] == 9


def test_an_applied_session_runs_is_stopped_and_is_deleted(instance: RunningGristmill) -> None:
    manifest = instance.data_dir / "session.yaml"
    text = (
        "apiVersion: gristmill.dev/v1alpha1\nkind: TrainingSession\nmetadata: {{name: applied}}\n"
        "spec: {{baseModelRef: {{name: {model}}}, lora: {{rank: 4, alpha: 8}}{more}}}\n"
    )
    manifest.write_text(text.format(model=instance.model, more=""))
    assert "created" in instance.cli("apply", "-f", str(manifest))

    def state() -> str:
        return str(shown(instance, "applied")["status"]["state"])  # type: ignore[index]

    wait_until(lambda: state() == "Running", "the session to run", 30)
    uid = json.loads(instance.cli("get", "session", "applied", "-o", "json"))["metadata"]["uid"]
    group = instance.data_dir / "groups" / "default" / instance.model
    assert (group / "meter" / uid).is_dir()
    manifest.write_text(text.format(model=instance.model, more=", desiredState: Stopped"))
    assert "configured" in instance.cli("apply", "-f", str(manifest))
    wait_until(lambda: state() == "Stopped", "the session to stop", 30)
    assert "deleted" in instance.cli("delete", "session", "applied")
    assert "no session 'applied'" in instance.run_cli("get", "session", "applied").stderr
    assert not (group / "meter" / uid).exists()
    assert not (group / "assignments" / f"{uid}.json").exists()


def test_tenants_are_apart(instance: RunningGristmill, session: RawSession) -> None:
    stranger = raw_clients(instance.environment_of("stranger"))
    listed = stranger.control.list_training_sessions()["TrainingSessionSummaries"]
    assert listed == []
    other = create_session(stranger, instance.model)
    step(other)
    instance.wait_ready("worker", "stranger")
    assert instance.pid_of("worker", "stranger") != instance.pid_of("worker", "default")
    assert step(session) > 0
