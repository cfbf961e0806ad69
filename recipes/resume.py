"""Stop and go on: save the state, open a new session from it, and get the very same losses.

    eval "$(gristmill env)"
    python recipes/resume.py

One session trains to the end. Half way it saves its state (weights, Adam's moments, step count). A second
session starts from that state and trains the second half again: its losses equal the first's to the last
bit. A third starts from the weights alone, to show what the optimizer's state is worth.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
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

ROLE_ARN = os.environ.get("SAGEMAKER_ROLE_ARN", "arn:aws:iam::000000000000:role/researcher")
LORA = {"rank": 8, "alpha": 16}
console = Console(soft_wrap=True)


def zen(tokenizer: Any) -> list[Datum]:
    """The Zen of Python, one datum a line: it ships with every Python, lightly encrypted."""
    command = [sys.executable, "-c", "import this"]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    rows = [tokenizer.encode(line) for line in text.splitlines() if line]
    return [
        Datum(
            model_input=ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData(data=row[1:], dtype=TensorDtype.INT64),
                "weights": TensorData(data=[1.0] * (len(row) - 1)),
            },
        )
        for row in rows
        if len(row) > 1
    ]


def train(
    client: TrainingClient,
    batches: list[list[Datum]],
    row: Any,
    label: str,
    counted: Counter[str],
) -> list[float]:
    """One step for each batch; the loss before each step."""
    losses = []
    for number, batch in enumerate(batches, 1):
        passed = client.forward_backward(batch, loss_fn="cross_entropy")
        stepped = client.optim_step(AdamParams(learning_rate=5e-4, weight_decay=0.0))
        losses.append(passed.result().metrics["actor/pg_loss"])
        stepped.result()
        tokens = sum(len(datum.model_input.to_ints()) for datum in batch)
        counted["train"] += tokens
        row(label, str(number), f"{losses[-1]:.6f}", str(tokens))
    return losses


def run(service: ServiceClient, model: str, steps: int, batch: int) -> dict[str, Any]:
    sessions: dict[str, Counter[str]] = {}
    losses: dict[str, list[float]] = {}
    with live_table("session", "step", "loss", "tokens") as row:
        with service.create_lora_training_client(model, **LORA) as client:
            datums = zen(client.get_tokenizer())
            starts = [(index * batch) % (len(datums) - batch + 1) for index in range(2 * steps)]
            batches = [datums[start : start + batch] for start in starts]
            counted = sessions[client.training_session_name] = Counter(train=0)
            losses["first half"] = train(client, batches[:steps], row, "first half", counted)
            saved = client.save_state(description="half way").result().model_package_arn
            losses["uninterrupted"] = train(client, batches[steps:], row, "uninterrupted", counted)
        for label, resume in (
            ("resumed", service.create_training_client_from_state_with_optimizer),
            ("weights alone", service.create_training_client_from_state),
        ):
            with resume(saved, **LORA) as client:
                counted = sessions[client.training_session_name] = Counter(train=0)
                losses[label] = train(client, batches[steps:], row, label, counted)
    return {"state": saved, "losses": losses, "sessions": sessions}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="base model id; the first one listed by default")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps in each half")
    parser.add_argument("--batch", type=int, default=4, help="lines in a step")
    parser.add_argument("--png", type=Path, default=Path("resume.png"), help="where the curve goes")
    parser.add_argument("--summary", type=Path, help="write losses and token counts as JSON")
    args = parser.parse_args()

    service = ServiceClient(role_arn=ROLE_ARN, session_name_prefix="resume")
    summary = run(service, args.model or service.list_base_models()[0], args.steps, args.batch)
    losses = summary["losses"]
    for session, counted in summary["sessions"].items():
        show_bill(session, counted)
    plot(losses, args.png)
    if args.summary:
        args.summary.write_text(json.dumps(summary, indent=2))
    same = losses["resumed"] == losses["uninterrupted"]
    console.print(f"Resumed losses equal the uninterrupted ones to the last bit: {same}")
    return 0 if same else 1


def plot(losses: dict[str, list[float]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    half = len(losses["first half"])
    axes.plot(range(1, half + 1), losses["first half"], "k", label="first half")
    for label, style in (("uninterrupted", "-"), ("resumed", "--"), ("weights alone", ":")):
        axes.plot(range(half + 1, half + 1 + len(losses[label])), losses[label], style, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss", title="Resume")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    console.print(f"Curve in {path}")


if __name__ == "__main__":
    sys.exit(main())
