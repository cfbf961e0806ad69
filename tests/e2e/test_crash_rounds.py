"""Rounds of kill -9 on gateway, meter, worker, ledger and PostgreSQL under real traffic.

`make crash-test ROUNDS=200` runs more of them; CI runs 20.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.crash_rounds import PARTS, CrashRounds
from gristmill_testing.instance import RunningGristmill, running_gristmill
from gristmill_testing.mixed_run import MixedRun
from gristmill_testing.postgres import PostgresMissingError, create_database, running_postgres
from gristmill_testing.raw_wire import GAP_TIMEOUT_S
from gristmill_testing.tiny_models import build_tiny_llama

ROUNDS = int(os.environ.get("GRISTMILL_CRASH_ROUNDS", "20"))
SEED = 11

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300 + 60 * ROUNDS),
    pytest.mark.usefixtures("recorded"),
]


@dataclass(frozen=True, slots=True)
class Server:
    """A PostgreSQL that syncs, and the ledger's database on it."""

    url: str
    database_url: str


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    try:
        with running_postgres(durable=True) as url:
            yield Server(url, create_database(url, "ledger"))
    except PostgresMissingError as error:
        pytest.skip(f"PostgreSQL: {error}")


@pytest.fixture(scope="module")
def instance(
    postgres: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGristmill]:
    """A Gristmill of this module alone, whose ledger is on PostgreSQL."""
    model = build_tiny_llama(tmp_path_factory.mktemp("model"))
    settings = {
        "GRISTMILL_METER_GAP_TIMEOUT_S": str(GAP_TIMEOUT_S),
        "GRISTMILL_LEDGER_DATABASE_URL": postgres.database_url,
    }
    folder: Path = tmp_path_factory.mktemp("gmpg")
    with running_gristmill(folder, model=model, environment=settings) as instance:
        yield instance


def test_rounds_of_kills_leave_nothing_lost_double_or_overspent(
    client: sdk.TrainingClient, instance: RunningGristmill, postgres: Server
) -> None:
    rounds = CrashRounds(
        instance=instance,
        server_url=postgres.url,
        database_url=postgres.database_url,
        run=MixedRun(client, client.create_sampling_client()),
        rng=random.Random(SEED),
    )
    rounds.set_budget()
    for _ in range(ROUNDS):
        rounds.round()
        rounds.audit(client.training_session_name)
    instance.books.expect_no_difference(client.training_session_name, timeout_s=120.0)
    print(f"{rounds.rounds} rounds, kills {dict(rounds.kills)}, inside {dict(rounds.landed)}")
    assert rounds.rounds == ROUNDS
    assert all(rounds.kills[part] >= ROUNDS // len(PARTS) for part in PARTS)
    assert rounds.landed.total() >= ROUNDS // 2
