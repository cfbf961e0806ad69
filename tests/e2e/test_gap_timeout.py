"""A gap that nobody fills fails the session, naming the number that is missing."""

from pathlib import Path

import pytest
from gristmill_testing.instance import running_gristmill

from gristmill_testing.raw_wire import (
    create_session,
    datum,
    forward_backward,
    optimizer_step,
    raw_clients,
    refusal,
    wait_until,
)
from gristmill_testing.tiny_models import build_tiny_llama

pytestmark = pytest.mark.e2e


def test_a_gap_that_times_out_fails_the_session_and_names_the_missing_number(
    tmp_path: Path,
) -> None:
    model = build_tiny_llama(tmp_path / "model")
    with running_gristmill(
        tmp_path / "data", model=model, environment={"GRISTMILL_METER_GAP_TIMEOUT_S": "1"}
    ) as instance:
        session = create_session(raw_clients(instance.environment), instance.model)
        first = session.submit(forward_backward(datum([7, 11, 13])), number=1)
        third = session.submit(optimizer_step(), number=3)
        wait_until(lambda: session.status == "Failed", "the session to fail", timeout_s=30)
        assert "2" in session.describe()["ErrorDetails"]
        assert session.get(first)["status"] == "Completed"
        assert session.get(third)["status"] == "Skipped"
        code, _, _ = refusal(lambda: session.submit(optimizer_step(), number=2))
        assert code in {"ConflictException", "ValidationException"}
        assert session.describe()["BillableTokenUsage"]["TrainingTokenCount"] == 3
