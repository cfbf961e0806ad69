"""Reinforcement learning with a verifiable reward, on the official SageMaker SDK.

    eval "$(gristmill env)"
    python recipes/rl.py --loss importance_sampling

The task: "Name an animal. Answer with one lowercase word." A function checks each answer, no model
judges it. Every iteration saves the policy, samples a group of answers for each prompt, takes each
answer's advantage over its group, and makes one optimizer step. Answers end at the model's end
token, at punctuation or at a line break, so that they stay short.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.live import Live
from rich.table import Table
from sagemaker.train.training_session import (
    AdamParams,
    Datum,
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
    TensorDtype,
    TrainingClient,
)

THINGS = [
    "an animal", "a fruit", "a colour", "a city", "a tool", "a bird", "a country", "a vegetable",
    "a drink", "a sport", "a flower", "a metal",
]  # fmt: skip
STOP = ["\n", ".", ",", ":", "!"]
LOSSES = ("importance_sampling", "ppo")
ROLE_ARN = os.environ.get("SAGEMAKER_ROLE_ARN", "arn:aws:iam::000000000000:role/researcher")
console = Console(soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer: its tokens, the sampler's log-probability of each, and what it earned."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float


def reward_of(text: str) -> float:
    """Half for brevity (1 / words), half for being all lowercase letters. In [0, 1]."""
    # The text of sampled tokens still holds what stopped it.
    text = re.split(f"[{''.join(STOP)}]", text.strip(), maxsplit=1)[0]
    words = text.split()
    if not words:
        return 0.0
    return 0.5 / len(words) + 0.5 * (text.isalpha() and text.islower())


def sample_answers(
    sampler: SamplingClient, tokenizer: Any, things: list[str], group: int, seed: int
) -> list[list[Answer]]:
    """One group of answers for each thing. All prompts are in flight at once."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Name {thing}. Answer with one lowercase word."}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for thing in things
    ]
    futures = [
        sampler.sample(
            ModelInput.from_ints(prompt),
            num_samples=group,
            sampling_params=SamplingParams(
                max_tokens=512, temperature=1.0, stop=STOP, seed=seed + index
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    groups = []
    for prompt, future in zip(prompts, futures, strict=True):
        answers = []
        for sequence in future.result().sequences:
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            answers.append(
                Answer(prompt, sequence.tokens, sequence.logprobs or [], text, reward_of(text))
            )
        groups.append(answers)
    return groups


def datums_of(groups: list[list[Answer]]) -> list[Datum]:
    """Policy-gradient datums. An answer that earned what its group earned on average teaches nothing."""
    datums = []
    for answers in groups:
        mean = sum(answer.reward for answer in answers) / len(answers)
        for answer in answers:
            if answer.reward != mean and answer.tokens:
                datums.append(datum_of(answer, answer.reward - mean))
    return datums


def datum_of(answer: Answer, advantage: float) -> Datum:
    tokens = [*answer.prompt, *answer.tokens]
    before = [0.0] * (len(answer.prompt) - 1)
    count = len(answer.tokens)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=tokens[1:], dtype=TensorDtype.INT64),
            "weights": TensorData(data=before + [1.0] * count),
            "advantages": TensorData(data=before + [advantage] * count),
            "logprobs": TensorData(data=before + answer.logprobs),
        },
    )


def iterate(
    client: TrainingClient,
    tokenizer: Any,
    iteration: int,
    args: argparse.Namespace,
    counted: Counter[str],
) -> tuple[list[Answer], dict[str, float]]:
    """Save, sample, score, learn. Returns the answers and the pass's metrics."""
    things = random.Random(f"{args.seed}/{iteration}").sample(THINGS, args.prompts)
    sampler = client.save_weights_and_get_sampling_client()
    seed = args.seed * 1_000_000 + iteration * 1_000
    groups = sample_answers(sampler, tokenizer, things, args.group, seed)
    for answers in groups:
        counted["prefill"] += len(answers[0].prompt)
        counted["cached_prefill"] += len(answers[0].prompt) * (len(answers) - 1)
        counted["sample"] += sum(len(answer.tokens) for answer in answers)
    answers = [answer for group in groups for answer in group]
    datums = datums_of(groups)
    if not datums:
        # Every group is unanimous: there is nothing to learn, and no gradient to step on.
        return answers, {}
    passed = client.forward_backward(datums, loss_fn=args.loss)
    stepped = client.optim_step(
        AdamParams(
            learning_rate=args.learning_rate, beta2=0.95, weight_decay=0.0, grad_clip_norm=1.0
        )
    )
    metrics = {**passed.result().metrics, **stepped.result().metrics}
    counted["train"] += sum(len(datum.model_input.to_ints()) for datum in datums)
    return answers, metrics


def learn(client: TrainingClient, args: argparse.Namespace, counted: Counter[str]) -> list[float]:
    """The mean reward of every iteration."""
    tokenizer = client.get_tokenizer()
    rewards: list[float] = []
    columns = ("iteration", "reward", "grad norm", "tokens/answer", "seconds", "an answer")
    with live_table(*columns) as row:
        for iteration in range(1, args.iterations + 1):
            started = time.monotonic()
            answers, metrics = iterate(client, tokenizer, iteration, args, counted)
            rewards.append(sum(answer.reward for answer in answers) / len(answers))
            length = sum(len(answer.tokens) for answer in answers) / len(answers)
            row(
                str(iteration),
                f"{rewards[-1]:.3f}",
                f"{metrics.get('actor/grad_norm', 0.0):.2f}",
                f"{length:.1f}",
                f"{time.monotonic() - started:.1f}",
                repr(answers[0].text[:40]),
            )
    return rewards


# --- what every recipe shows ---------------------------------------------------------------------


@contextmanager
def live_table(*columns: str) -> Iterator[Any]:
    """Yields a function that adds a row: to a table that grows, or line by line into a file."""

    def print_row(*cells: str) -> None:
        pairs = zip(columns, cells, strict=True)
        print("  ".join(f"{name} {cell:>6}" for name, cell in pairs), flush=True)

    if not console.is_terminal:
        yield print_row
        return
    table = Table(*columns)
    with Live(table, console=console, auto_refresh=False) as live:

        def add_row(*cells: str) -> None:
            table.add_row(*cells)
            live.refresh()

        yield add_row


def billed(session: str) -> dict[str, Any]:
    """The session's row of `gristmill usage`, or {} where there is no Gristmill to ask."""
    gristmill = shutil.which("gristmill")
    if gristmill is None:
        return {}
    command = [gristmill, "usage", "--group-by", "session", "--output", "json"]
    answer = subprocess.run(command, capture_output=True, check=False, text=True)
    rows = json.loads(answer.stdout)["rows"] if answer.returncode == 0 else []
    return next((row for row in rows if row["session_name"] == session), {})


def show_bill(session: str, counted: Counter[str], timeout_s: float = 20.0) -> None:
    """What was counted here beside what the ledger holds, once it has heard of all of it."""
    deadline = time.monotonic() + timeout_s
    row = billed(session)
    while any(row.get(kind) != n for kind, n in counted.items()) and time.monotonic() < deadline:
        time.sleep(0.5)
        row = billed(session)
    table = Table("tokens", "counted here", "in the ledger", title=f"Bill of {session}")
    for kind in ("train", "prefill", "cached_prefill", "sample"):
        table.add_row(kind, f"{counted[kind]:,}", f"{row[kind]:,}" if row else "not readable here")
    table.add_section()
    table.add_row("cost", "", str(row.get("cost") or row.get("cost_reason") or "not readable here"))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="base model id; the first one listed by default")
    parser.add_argument("--loss", choices=LOSSES, default=LOSSES[0])
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=4, help="prompts in an iteration")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA adapter")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, default=Path("rl.png"), help="where the curve goes")
    parser.add_argument("--summary", type=Path, help="write rewards and token counts as JSON")
    args = parser.parse_args()

    service = ServiceClient(role_arn=ROLE_ARN, session_name_prefix="rl")
    model = args.model or service.list_base_models()[0]
    counted: Counter[str] = Counter(train=0, prefill=0, cached_prefill=0, sample=0)
    with service.create_lora_training_client(model, rank=args.rank, alpha=2 * args.rank) as client:
        session = client.training_session_name
        console.print(f"Session [bold]{session}[/bold] trains {model} with {args.loss}")
        rewards = learn(client, args, counted)
        package = client.save_weights_for_sampler(description="rl").result().model_package_arn
    count = min(5, len(rewards))
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    console.print(f"Mean reward of {count} iterations: first {first:.3f}, last {last:.3f}")
    console.print(f"Weights saved as {package}")
    show_bill(session, counted)
    plot(rewards, args)
    if args.summary:
        summary = {
            "session": session, "tokens": counted, "model_package": package, "rewards": rewards,
        }  # fmt: skip
        args.summary.write_text(json.dumps(summary, indent=2))


def plot(rewards: list[float], args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="iteration", ylabel="mean reward", title=f"RL, {args.loss}", ylim=(0, 1))
    figure.savefig(args.png, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    console.print(f"Curve in {args.png}")


if __name__ == "__main__":
    main()
