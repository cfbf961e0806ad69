"""`gristmill estimate`: tokens and cost of a run before it starts, and what cannot be known of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from gristmill_cli.cluster.ledger import ledger_access
from gristmill_cli.cluster.ledger_json import Json, ask_json
from gristmill_cli.commands.usage import exact_decimal
from gristmill_cli.datasets import DatasetCount, count_dataset
from gristmill_cli.errors import CommandError
from gristmill_cli.local.instance import require_instance
from gristmill_cli.options import ClusterKeyFile, DataDir, LedgerUrl, find_layout
from gristmill_cli.output import Output, print_data, print_table, reports_errors
from gristmill_contracts import limits
from gristmill_contracts.units import div_ceil
from gristmill_contracts.usage import Counts

OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Format of the answer.")]
NEVER_KNOWN: Final = (
    "operations that are sent again after an error of the client's own are run, and billed, again"
)


@dataclass(slots=True, kw_only=True)
class Plan:
    """What a run would use. `at_most`: token types of which this is a bound, not a number."""

    counts: Counts = field(default_factory=Counts)
    at_most: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@reports_errors
def estimate(
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    model: Annotated[str, typer.Option(help="Base model, as sessions name it.")],
    price_book: Annotated[str, typer.Option(help="Price book; default the ledger's.")] = "",
    train: Annotated[int, typer.Option(min=0, help="Tokens to train on.")] = 0,
    prefill: Annotated[int, typer.Option(min=0, help="Prompt tokens to compute.")] = 0,
    cached_prefill: Annotated[int, typer.Option(min=0, help="Prompt tokens from the cache.")] = 0,
    sample: Annotated[int, typer.Option(min=0, help="Tokens to sample.")] = 0,
    dataset: Annotated[
        Path | None, typer.Option(help="JSON lines to train on: tokens, text or chat messages.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the model, or its tokenizer.json, for text.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often all of the data set is run.")] = 1,
    steps: Annotated[
        int, typer.Option(min=0, help="Steps, where batches are drawn from the data set.")
    ] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rows in a batch of a step.")] = 1,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts to sample from.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a prompt.")] = 0,
    group: Annotated[int, typer.Option(min=1, help="Answers to a prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of an answer.")] = 0,
    iterations: Annotated[int, typer.Option(min=1, help="How often the prompts are run.")] = 1,
    train_on_samples: Annotated[
        bool,
        typer.Option("--train-on-samples", help="Prompts and answers are trained on, as in RL."),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Estimate the tokens and the cost of a run before it starts."""
    plan = Plan(
        counts=Counts(train=train, prefill=prefill, cached_prefill=cached_prefill, sample=sample)
    )
    if dataset is not None:
        add_dataset(
            plan, count_dataset(dataset, tokenizer), epochs=epochs, steps=steps, batch=batch
        )
    if prompts and not (prompt_tokens or max_tokens):
        raise CommandError(
            f"{prompts} prompts without tokens use nothing: say how long with --prompt-tokens and --max-tokens"
        )
    if prompts:
        add_sampling(
            plan,
            prompts=prompts * iterations,
            prompt_tokens=prompt_tokens,
            group=group,
            max_tokens=max_tokens,
            train=train_on_samples,
        )
    check_plan(plan)
    url = ledger_url or require_instance(find_layout(data_dir)).ledger_url
    access = ledger_access(url, cluster_key_file)
    asked = {"model": model, "price_book": price_book}
    asked |= {name: str(getattr(plan.counts, name)) for name in Counts.__struct_fields__}
    answer = ask_json(access, "/v1/estimate", {name: text for name, text in asked.items() if text})
    answer |= {"at_most": plan.at_most, "notes": [*plan.notes, NEVER_KNOWN]}
    if output is Output.TABLE:
        _print(answer)
    else:
        print_data(answer, output)


def add_dataset(plan: Plan, found: DatasetCount, *, epochs: int, steps: int, batch: int) -> None:
    """Training on a data set: all of it `epochs` times, or batches drawn from it."""
    tokens = found.tokens * epochs
    if steps:
        tokens = div_ceil(found.tokens * steps * batch, found.rows)
        plan.notes.append(
            f"{steps} steps of {batch} rows drawn from {found.rows}: the mean; a row has up to "
            f"{found.longest} tokens"
        )
    plan.counts += Counts(train=tokens)
    if found.from_text:
        plan.notes.append(
            f"{found.from_text} of {found.rows} rows are text: what a program adds to it before it trains "
            "is not in it"
        )
    if found.has_messages:
        plan.notes.append("the marks that a chat template puts around messages are not counted")


def add_sampling(
    plan: Plan, *, prompts: int, prompt_tokens: int, group: int, max_tokens: int, train: bool
) -> None:
    """Sampling: a prompt is computed once for its group, each further answer hits the cache."""
    answers = prompts * group
    plan.counts += Counts(
        prefill=prompts * prompt_tokens,
        cached_prefill=prompts * (group - 1) * prompt_tokens,
        sample=answers * max_tokens,
    )
    plan.at_most.append("sample")
    plan.notes.append("an answer may end before max_tokens: what is not sampled is not billed")
    if train:
        plan.counts += Counts(train=answers * (prompt_tokens + max_tokens))
        plan.at_most.append("train")


def check_plan(plan: Plan) -> None:
    """Raise CommandError for a run of nothing, or of more than there are numbers for."""
    if plan.counts.total == 0:
        raise CommandError(
            "there is nothing to estimate: name a --dataset, --prompts, or numbers of tokens"
        )
    for name in Counts.__struct_fields__:
        if getattr(plan.counts, name) > limits.QUANTITY_MAX:
            raise CommandError(
                f"{getattr(plan.counts, name)} {name} tokens are more than a ledger holds"
            )


def _print(answer: Json) -> None:
    rows = []
    for line in answer["lines"]:
        if not line["tokens"]:
            continue
        bound = "at most " if line["token_type"] in answer["at_most"] else ""
        price = line["price"]
        per_million = "none" if price is None else exact_decimal(price["micros_per_mtok"] * 10**6)
        amount = line["amount_pico"]
        cost = "unknown" if amount is None else exact_decimal(amount)
        rows.append([line["token_type"], f"{bound}{line['tokens']:,}", per_million, cost])
    total = "unknown" if answer["amount"] is None else answer["amount"]
    rows.append(["total", f"{answer['total']:,}", "", total])
    cost = f"COST {answer['currency']}"
    print_table(
        ["TOKEN_TYPE", "TOKENS", "PRICE/1M", cost], rows, numbers=["TOKENS", "PRICE/1M", cost]
    )
    typer.echo(f"prices: book {answer['price_book']}, {answer['model']}, as of {answer['at']}")
    if answer["reason"]:
        typer.echo(f"note: {answer['reason']}", err=True)
    for note in answer["notes"]:
        typer.echo(f"note: {note}", err=True)
