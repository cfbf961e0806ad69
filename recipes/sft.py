"""Supervised fine-tuning with the official SageMaker SDK: teach a small model to explain Python.

    eval "$(gristmill env)"
    python recipes/sft.py

The text is real: questions about functions of the standard library, answered by the first sentence
of their own documentation. Loss is taken on the answers alone; eight pairs are held out.
"""

import argparse
import importlib
import inspect
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
    ServiceClient,
    TensorData,
    TensorDtype,
    TrainingClient,
)

MODULES = [
    "bisect", "fnmatch", "functools", "glob", "heapq", "itertools", "json", "math", "os.path",
    "random", "re", "shutil", "statistics", "textwrap",
]  # fmt: skip
HELD_OUT = 8
ROLE_ARN = os.environ.get("SAGEMAKER_ROLE_ARN", "arn:aws:iam::000000000000:role/researcher")
console = Console(soft_wrap=True)


def questions_and_answers() -> list[tuple[str, str]]:
    """Pairs from the standard library's own documentation, in a fixed order."""
    pairs: dict[str, str] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for function in getattr(module, "__all__", sorted(vars(module))):
            text = inspect.getdoc(getattr(module, function)) or ""
            sentence = re.split(r"\.\s", " ".join(text.split("\n\n")[0].split()))[0]
            plain = 20 <= len(sentence) <= 120 and "->" not in sentence
            if plain and not function.startswith("_"):
                # A sentence that two names share stays with the first.
                pairs.setdefault(f"{sentence.rstrip('.')}.", f"What does {name}.{function} do?")
    return [(question, answer) for answer, question in pairs.items()]


def encode(tokenizer: Any, question: str, answer: str) -> Datum:
    """Next-token prediction over the whole chat, with weight 1 on the answer and its end token."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    reply = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = [*prompt, *reply]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(reply)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=tokens[1:], dtype=TensorDtype.INT64),
            "weights": TensorData(data=weights),
        },
    )


def tokens_in(datums: list[Datum]) -> int:
    return sum(len(datum.model_input.to_ints()) for datum in datums)


def loss_per_token(metrics: dict[str, float], datums: list[Datum]) -> float:
    """`actor/pg_loss` is the mean over datums of each datum's sum."""
    weighted = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in datums)
    return metrics["actor/pg_loss"] * len(datums) / weighted


def train(
    client: TrainingClient, datums: list[Datum], args: argparse.Namespace, counted: Counter[str]
) -> dict[str, list[float]]:
    held_out, training = datums[:HELD_OUT], datums[HELD_OUT:]
    curves: dict[str, list[float]] = {"loss": [], "held_out": []}

    def score() -> float:
        metrics = client.forward(held_out).result().metrics
        counted["train"] += tokens_in(held_out)
        return loss_per_token(metrics, held_out)

    curves["held_out"].append(score())
    order = random.Random(args.seed)
    with live_table("step", "loss", "grad norm", "tokens", "tokens/s") as row:
        for step in range(1, args.steps + 1):
            batch = order.sample(training, args.batch)
            started = time.monotonic()
            # Both calls return at once; the step is queued behind the pass.
            passed = client.forward_backward(batch, loss_fn="cross_entropy")
            stepped = client.optim_step(
                AdamParams(learning_rate=args.learning_rate, weight_decay=0.0, grad_clip_norm=1.0)
            )
            loss = loss_per_token(passed.result().metrics, batch)
            norm = stepped.result().metrics["actor/grad_norm"]
            tokens = tokens_in(batch)
            counted["train"] += tokens
            curves["loss"].append(loss)
            speed = tokens / (time.monotonic() - started)
            row(str(step), f"{loss:.3f}", f"{norm:.2f}", str(tokens), f"{speed:.0f}")
    curves["held_out"].append(score())
    return curves


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
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4, help="pairs in a step")
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA adapter")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, default=Path("sft.png"), help="where the curve goes")
    parser.add_argument("--summary", type=Path, help="write losses and token counts as JSON")
    args = parser.parse_args()

    service = ServiceClient(role_arn=ROLE_ARN, session_name_prefix="sft")
    model = args.model or service.list_base_models()[0]
    counted: Counter[str] = Counter(train=0, prefill=0, cached_prefill=0, sample=0)
    with service.create_lora_training_client(model, rank=args.rank, alpha=2 * args.rank) as client:
        session = client.training_session_name
        console.print(f"Session [bold]{session}[/bold] trains {model}")
        tokenizer = client.get_tokenizer()
        pairs = questions_and_answers()
        random.Random(0).shuffle(pairs)
        datums = [encode(tokenizer, *pair) for pair in pairs]
        curves = train(client, datums, args, counted)
        package = client.save_weights_for_sampler(description="sft").result().model_package_arn
    before, after = curves["held_out"]
    console.print(f"Held-out loss {before:.3f} -> {after:.3f}; weights saved as {package}")
    show_bill(session, counted)
    plot(curves, args.png)
    if args.summary:
        summary = {"session": session, "tokens": counted, "model_package": package, **curves}
        args.summary.write_text(json.dumps(summary, indent=2))


def plot(curves: dict[str, list[float]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    steps = len(curves["loss"])
    axes.plot(range(1, steps + 1), curves["loss"], label="training")
    axes.plot([1, steps], curves["held_out"], "o--", label="held out")
    axes.set(xlabel="optimizer step", ylabel="loss per answer token", title="SFT")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    console.print(f"Curve in {path}")


if __name__ == "__main__":
    main()
