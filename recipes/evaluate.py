"""Evaluate a checkpoint two ways: by sampling tokens, and by the OpenAI-shaped call.

    eval "$(gristmill env)"
    python recipes/evaluate.py --model-package ARN     # as recipes/rl.py printed it

Asks the questions of recipes/rl.py (answer with one lowercase word) of the base model and of the
checkpoint. Sampling by tokens is the SDK's `sample`; the OpenAI-shaped call is `SampleTrainingSession`
of boto3, which takes a chat body and answers one, the model's own chat template applied on the server.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import matplotlib
from rich.console import Console
from rich.live import Live
from rich.table import Table
from sagemaker.train.training_session import (
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
)

THINGS = ["an insect", "a tree", "a language", "a planet", "a tool", "a river"]
STOP = ["\n", ".", ",", ":", "!"]
ROLE_ARN = os.environ.get("SAGEMAKER_ROLE_ARN", "arn:aws:iam::000000000000:role/researcher")
console = Console(soft_wrap=True)


def question(thing: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Name {thing}. Answer with one lowercase word."}]


def reward_of(text: str) -> float:
    """Half for brevity (1 / words), half for being all lowercase letters. In [0, 1]."""
    # The text of sampled tokens still holds what stopped it.
    text = re.split(f"[{''.join(STOP)}]", text.strip(), maxsplit=1)[0]
    words = text.split()
    if not words:
        return 0.0
    return 0.5 / len(words) + 0.5 * (text.isalpha() and text.islower())


@dataclass(frozen=True, slots=True)
class Policy:
    """A base model or a checkpoint in a session of its own, and the tokens that asking it took."""

    label: str
    sampler: SamplingClient
    package: str | None
    counted: Counter[str] = field(
        default_factory=lambda: Counter(train=0, prefill=0, cached_prefill=0, sample=0)
    )

    def by_tokens(self, thing: str, samples: int, seed: int) -> list[str]:
        """`samples` answers, as token ids that the client encodes and decodes itself."""
        tokenizer = self.sampler.get_tokenizer()
        prompt = tokenizer.apply_chat_template(
            question(thing), add_generation_prompt=True, return_dict=False
        )
        sequences = (
            self.sampler.sample(
                ModelInput.from_ints(prompt),
                num_samples=samples,
                sampling_params=SamplingParams(
                    max_tokens=512, temperature=1.0, stop=STOP, seed=seed
                ),
            )
            .result()
            .sequences
        )
        self._count(len(prompt), samples, sum(len(sequence.tokens) for sequence in sequences))
        return [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in sequences]

    def by_chat(self, runtime: Any, thing: str, samples: int, seed: int) -> list[str]:
        """`samples` answers to one OpenAI chat body; its `usage` tells their tokens."""
        body = {
            "messages": question(thing), "n": samples, "max_tokens": 512, "temperature": 1.0,
            "stop": STOP, "seed": seed,
        }  # fmt: skip
        answer = runtime.sample_training_session(
            trainingSessionName=self.sampler.training_session_name,
            contentType="application/json",
            accept="application/json",
            body=json.dumps(body).encode(),
            **({"modelPackageArn": self.package} if self.package else {}),
        )
        chat = json.loads(answer["body"].read())
        usage = chat["usage"]
        self._count(usage["prompt_tokens"], samples, usage["completion_tokens"])
        return [choice["message"]["content"] for choice in chat["choices"]]

    def _count(self, prompt: int, samples: int, sampled: int) -> None:
        self.counted["prefill"] += prompt
        self.counted["cached_prefill"] += prompt * (samples - 1)
        self.counted["sample"] += sampled


def evaluate(policy: Policy, args: argparse.Namespace, row: Any) -> dict[str, list[float]]:
    """Mean reward of every question, both ways."""
    runtime = boto3.client(
        "sagemakertrainingsessionruntime",
        region_name=os.environ["AWS_REGION"],
        endpoint_url=os.environ["SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT"],
    )
    rewards: dict[str, list[float]] = {"tokens": [], "chat": []}
    for seed, thing in enumerate(THINGS, args.seed):
        texts = {
            "tokens": policy.by_tokens(thing, args.samples, seed),
            "chat": policy.by_chat(runtime, thing, args.samples, seed),
        }
        for way, answers in texts.items():
            rewards[way].append(sum(map(reward_of, answers)) / len(answers))
            row(policy.label, thing, way, f"{rewards[way][-1]:.3f}", repr(answers[0][:40]))
    return rewards


def evaluate_all(
    service: ServiceClient, sources: dict[str, dict[str, str]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    found = []
    with live_table("policy", "question", "way", "reward", "an answer") as row:
        for label, source in sources.items():
            with service.create_sampling_client(**source) as sampler:
                policy = Policy(label, sampler, source.get("model_package_arn"))
                rewards = evaluate(policy, args, row)
                session = sampler.training_session_name
            found.append(
                {"policy": label, "session": session, "tokens": policy.counted, "rewards": rewards}
            )
    return found


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
    parser.add_argument("--model-package", help="checkpoint to compare with the base model")
    parser.add_argument("--samples", type=int, default=4, help="answers to each question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, default=Path("evaluate.png"), help="the chart")
    parser.add_argument("--summary", type=Path, help="write rewards and token counts as JSON")
    args = parser.parse_args()

    service = ServiceClient(role_arn=ROLE_ARN, session_name_prefix="evaluate")
    sources = {"base": {"base_model": args.model or service.list_base_models()[0]}}
    if args.model_package:
        sources["checkpoint"] = {"model_package_arn": args.model_package}
    found = evaluate_all(service, sources, args)
    for policy in found:
        for way, rewards in policy["rewards"].items():
            mean = sum(rewards) / len(rewards)
            console.print(f"{policy['policy']}, by {way}: mean reward {mean:.3f}")
        show_bill(policy["session"], policy["tokens"])
    plot(found, args.png)
    if args.summary:
        args.summary.write_text(json.dumps(found, indent=2))


def plot(found: list[dict[str, Any]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    means = {
        f"{policy['policy']}\nby {way}": sum(rewards) / len(rewards)
        for policy in found
        for way, rewards in policy["rewards"].items()
    }
    axes.bar(list(means), list(means.values()))
    axes.set(ylabel="mean reward", title="Evaluation", ylim=(0, 1))
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    console.print(f"Chart in {path}")


if __name__ == "__main__":
    main()
