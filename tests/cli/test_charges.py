"""`explain`, `rerate` and `estimate` against a real ledger; what they show is what it says."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts import limits
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_testing.cli import Commands
from gristmill_testing.ledger import LedgerClient, make_event, running_ledger

WORDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[LedgerClient]:
    """A ledger with two charges of session s-1."""
    async with running_ledger(tmp_path / "ledger") as client:
        await client.register("s-1")
        events = [make_event(n, counts=Counts(train=1_000_000 * n), key="AKIA1") for n in (1, 2)]
        await client.post("s-1", events)
        await client.ledger.follower.catch_up()
        yield client


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of whole words."""
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
    }))  # fmt: skip
    return tmp_path


async def ok(commands: Commands, client: LedgerClient, *arguments: str) -> str:
    return await asyncio.to_thread(commands.ok, *arguments, "--ledger-url", client.url)


async def answer(commands: Commands, client: LedgerClient, *arguments: str) -> Any:
    return await asyncio.to_thread(commands.json, *arguments, "--ledger-url", client.url)


async def put(client: LedgerClient, micros: int, model: str = "*") -> None:
    prices = [Price(model=model, token_type=n, micros_per_mtok=micros) for n in TOKEN_TYPES]
    book = PriceBook(name="default", currency="USD", effective_from_us=1, prices=prices)
    status, _ = await client.call("PUT", "/v1/price-books/default", book)
    assert status == 200


async def test_explain_shows_a_charge_by_its_event(
    commands: Commands, ledger: LedgerClient
) -> None:
    event = make_event(2)
    text = await ok(commands, ledger, "explain", event.event_id)
    assert "acme row 2" in text
    assert "AKIA1" in text
    assert "0.600000  default  *   ever" in text
    assert text.splitlines()[-1].split() == ["cost:", "1.200000", "USD"]
    told = await answer(commands, ledger, "explain", event.event_id)
    assert told["charges"][0]["lines"][0]["amount_pico"] == 2 * 600_000 * 10**6


async def test_explain_lists_the_charges_of_a_session(
    commands: Commands, ledger: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_PAGE_MAX", 1000)
    text = await ok(commands, ledger, "explain", "s-1")
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [(row[0], row[2], row[5]) for row in rows] == [
        ("1", "log/1", "0.600000"),
        ("2", "log/2", "1.200000"),
    ]
    told = await answer(commands, ledger, "explain", "s-1")
    assert (told["total"], len(told["charges"])) == ("1.800000", 2)


async def test_explain_says_what_there_is_not(commands: Commands, ledger: LedgerClient) -> None:
    message = await asyncio.to_thread(
        commands.refused, "explain", "nobody", "--ledger-url", ledger.url
    )
    assert "there is no session 'nobody' with usage" in message


async def test_rerate_tells_first_and_then_does_it(
    commands: Commands, ledger: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RERATE_HOURS_MAX", 1)
    await put(ledger, 500_000)
    dry = await answer(commands, ledger, "rerate", "--reason", "x", "--dry-run")
    assert (dry["run"], dry["rows"], dry["differences"][0]["difference"]) == (None, 2, "-0.300000")
    assert (await answer(commands, ledger, "explain", "s-1"))["total"] == "1.800000"
    text = await ok(commands, ledger, "rerate", "--reason", "x", "--tenant", "acme")
    assert text.splitlines()[1].split() == ["acme", "USD", "-0.300000"]
    assert (await answer(commands, ledger, "explain", "s-1"))["total"] == "1.500000"
    assert (await answer(commands, ledger, "rerate", "--reason", "x"))["rows"] == 0


# --- estimates ------------------------------------------------------------------------------------


async def test_estimate_prices_numbers_of_tokens(commands: Commands, ledger: LedgerClient) -> None:
    """0.60, 0.10, 0.01 and 0.40 USD per 1,000,000: 1.2 + 0.1 + 0.01 + 0.2 = 1.51 USD."""
    told = await answer(
        commands, ledger, "estimate", "--model", "tiny", "--train", "2000000", "--prefill", "1000000",
        "--cached-prefill", "1000000", "--sample", "500000",
    )  # fmt: skip
    assert (told["amount"], told["total"], told["price_book"]) == ("1.510000", 4_500_000, "default")


async def test_estimate_counts_a_data_set_of_tokens(
    commands: Commands, ledger: LedgerClient, tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"tokens": [1, 2, 3]}\n\n{"input_ids": [1, 2, 3, 4, 5]}\n')
    asked = ("estimate", "--model", "tiny", "--dataset", str(file))
    assert (await answer(commands, ledger, *asked, "--epochs", "3"))["total"] == 3 * 8
    drawn = await answer(commands, ledger, *asked, "--steps", "5", "--batch", "2")
    assert drawn["total"] == 5 * 2 * 8 // 2
    assert "a row has up to 5 tokens" in drawn["notes"][0]


async def test_estimate_tokenizes_text_and_says_what_it_leaves_out(
    commands: Commands, ledger: LedgerClient, tmp_path: Path, tokenizer: Path
) -> None:
    file = tmp_path / "data.jsonl"
    rows = [
        {"text": "one two three two"},
        {"messages": [{"role": "user", "content": "one two"}, {"role": "a", "content": "three"}]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    asked = ("estimate", "--model", "tiny", "--dataset", str(file), "--tokenizer", str(tokenizer))
    told = await answer(commands, ledger, *asked)
    assert told["total"] == 3 + 2
    assert any("chat template" in note for note in told["notes"])


async def test_estimate_bounds_a_run_that_samples(commands: Commands, ledger: LedgerClient) -> None:
    told = await answer(
        commands, ledger, "estimate", "--model", "tiny", "--prompts", "4", "--prompt-tokens", "100",
        "--group", "8", "--max-tokens", "50", "--iterations", "10", "--train-on-samples",
    )  # fmt: skip
    tokens = {line["token_type"]: line["tokens"] for line in told["lines"]}
    assert tokens == {
        "prefill": 4 * 10 * 100,
        "cached_prefill": 4 * 10 * 7 * 100,
        "sample": 4 * 10 * 8 * 50,
        "train": 4 * 10 * 8 * 150,
    }
    assert told["at_most"] == ["sample", "train"]
    text = await ok(
        commands, ledger, "estimate", "--model", "tiny", "--prompts", "1", "--max-tokens", "5"
    )
    assert "at most 5" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no row"),
        ("[1]", "line 1 is no JSON object"),
        ('{"tokens": [1]}\n{', "line 2 is no JSON"),
        ('{"tokens": [1, "2"]}', "tokens is no list of token numbers"),
        ('{"tokens": [true]}', "tokens is no list of token numbers"),
        ('{"other": 1}', "has neither tokens"),
        ('{"text": 5}', "has neither tokens"),
        ('{"text": "a"}', "name the model's tokenizer"),
    ],
)
def test_a_data_set_that_cannot_be_counted_is_named(
    commands: Commands, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    told = commands.refused("estimate", "--model", "tiny", "--dataset", str(file))
    assert message in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to estimate"),
        (("--prompts", "5"), "--prompt-tokens and --max-tokens"),
        (("--dataset", "none.jsonl"), "cannot be read"),
        (("--train", str(2**63)), "more than a ledger holds"),
    ],
)
def test_an_estimate_of_nothing_is_refused(
    commands: Commands, arguments: tuple[str, ...], message: str
) -> None:
    assert message in commands.refused("estimate", "--model", "tiny", *arguments)


async def test_usage_can_be_asked_by_key_and_zone(commands: Commands, ledger: LedgerClient) -> None:
    text = await ok(
        commands, ledger, "usage", "--group-by", "key", "--bucket", "month", "--zone", "Asia/Tokyo"
    )
    assert text.splitlines()[1].split()[:2] == ["2025-11-01T00:00:00+09:00", "AKIA1"]
    told = await answer(commands, ledger, "usage", "--key", "another")
    assert told["rows"] == []
