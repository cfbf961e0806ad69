"""What fills up a forward pass is never a token of the client's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill_contracts.operations import ForwardBackward, count_result
from gristmill_contracts.usage import Counts
from gristmill_testing.local_runner import Client, datum, load, logprobs, make_runner
from gristmill_worker.counters import WorkerMetrics

ROWS = {
    "prompt and answer of two": [10 + 4, 9 + 3],
    "one that is too short for a pass": [3],
    "long beside short": [40, 2, 2],
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_f08_padding_is_never_counted(
    family_dir: Callable[[str], Path], tmp_path: Path, family: str, lengths: list[int]
) -> None:
    runner = make_runner(load(family_dir(family)), tmp_path / "artifacts")
    client = Client(runner, "88888888-8888-8888-8888-888888888888", str(tmp_path / "state"))
    client.open()
    datums = [datum(range(5, 5 + length)) for length in lengths]
    result = client.train(datums)
    assert [len(row) for row in logprobs(result)] == lengths
    operation = ForwardBackward(loss="cross_entropy", loss_config={}, datums=datums)
    assert count_result(operation, result) == Counts(train=sum(lengths))
    metrics = WorkerMetrics()
    metrics.count(operation, result, failed=False, replay=False, seconds=0)
    assert metrics.tokens.labels("train", "false")._value.get() == sum(lengths)
