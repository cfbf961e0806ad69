"""Every recipe, and every program in the docs, as its users run it, on a tiny model."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gristmill_testing.instance import RunningGristmill, running_gristmill
from gristmill_testing.raw_wire import wait_until
from gristmill_testing.recipe import run_program, run_recipe
from gristmill_testing.tiny_models import build_tiny_llama

DOCS = Path(__file__).resolve().parents[2] / "docs"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGristmill]:
    model = build_tiny_llama(tmp_path_factory.mktemp("model"))
    with running_gristmill(tmp_path_factory.mktemp("gm"), model=model) as instance:
        yield instance


@pytest.fixture
def environment(instance: RunningGristmill) -> dict[str, str]:
    return instance.environment


def expect_bill(instance: RunningGristmill, session: str, counted: Mapping[str, int]) -> None:
    """The recipe waited for the ledger before it printed its bill: no waiting here."""
    billed = instance.usage_by_api(session)
    assert {name: counted.get(name, 0) for name in billed} == billed
    assert sum(billed.values()) > 0


def test_sft(instance: RunningGristmill, environment: dict[str, str], tmp_path: Path) -> None:
    summary, shown = run_recipe("sft", environment, tmp_path, "--steps", "12", "--rank", "4")
    assert len(summary["loss"]) == 12
    assert summary["held_out"][1] < summary["held_out"][0]
    expect_bill(instance, summary["session"], summary["tokens"])
    assert f"{summary['tokens']['train']:,}" in shown
    assert "cost" in shown
    assert ":model-package/" in summary["model_package"]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_rl_and_the_evaluation_of_what_it_made(
    instance: RunningGristmill, environment: dict[str, str], tmp_path: Path, loss: str
) -> None:
    arguments = ["--iterations", "2", "--prompts", "2", "--group", "4", "--rank", "4"]
    summary, _ = run_recipe("rl", environment, tmp_path, "--loss", loss, *arguments)
    assert len(summary["rewards"]) == 2
    assert all(0 <= reward <= 1 for reward in summary["rewards"])
    expect_bill(instance, summary["session"], summary["tokens"])
    assert summary["tokens"]["cached_prefill"] == 3 * summary["tokens"]["prefill"]

    package = ["--model-package", summary["model_package"]]
    found, _ = run_recipe("evaluate", environment, tmp_path, "--samples", "2", *package)
    assert [policy["policy"] for policy in found] == ["base", "checkpoint"]
    for policy in found:
        assert {way: len(rewards) for way, rewards in policy["rewards"].items()} == {
            "tokens": 6,
            "chat": 6,
        }
        # The same seed, prompt and parameters: both ways draw the same answers.
        assert policy["rewards"]["tokens"] == policy["rewards"]["chat"]
        expect_bill(instance, policy["session"], policy["tokens"])


def test_resume(instance: RunningGristmill, environment: dict[str, str], tmp_path: Path) -> None:
    summary, shown = run_recipe("resume", environment, tmp_path, "--steps", "3")
    losses = summary["losses"]
    assert losses["resumed"] == losses["uninterrupted"]
    assert losses["weights alone"] != losses["uninterrupted"]
    assert "to the last bit: True" in " ".join(shown.split())
    assert len(summary["sessions"]) == 3
    for session, counted in summary["sessions"].items():
        expect_bill(instance, session, counted)


def program_in(page: str) -> str:
    """The one Python program on a page of the docs."""
    (program,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    return str(program)


def test_the_tutorial(
    instance: RunningGristmill, environment: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "first.py"
    program.write_text(program_in("tutorial/first-step.md"))
    lines = run_program([str(program)], environment).splitlines()
    losses = [float(line.split()[1]) for line in lines if re.match(r"\d ", line)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    (tokens,) = re.findall(r"trained (\d+) tokens", "\n".join(lines))
    expected = {"prefill": 0, "cached_prefill": 0, "sample": 0, "train": int(tokens)}
    wait_until(lambda: instance.usage_by_cli("first") == expected, f"first to cost {expected}", 30)


def test_the_prices_of_the_docs(instance: RunningGristmill) -> None:
    page = (DOCS / "how-to/prices.md").read_text()
    (path,) = re.findall(r"^    gristmill apply -f (\S+)$", page, re.M)
    # Once more, and nothing is refused: a card that did not change.
    for _ in range(2):
        assert "standard-2026" in instance.cli("apply", "-f", str(DOCS.parent / path))
