"""Two hundred mixed operations: what a client counts is what everybody says, to the token."""

import random

import pytest
from transformers import AutoTokenizer

from gristmill_testing.books import Books
from gristmill_testing.instance import RunningGristmill
from gristmill_testing.raw_wire import Clients, create_session, wait_until
from gristmill_testing.token_bill import MixedClient

pytestmark = pytest.mark.e2e

OPERATIONS = 200


def test_a_client_and_the_ledger_count_the_same_tokens(
    clients: Clients, instance: RunningGristmill, books: Books
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(instance.model_path)

    def chat_tokens(messages: list[dict[str, str]]) -> int:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return len(tokenizer.encode(rendered, add_special_tokens=False))

    session = create_session(clients, instance.model)
    client = MixedClient(session=session, random=random.Random(20261), chat_tokens=chat_tokens)
    client.run(OPERATIONS)
    assert client.ran.total() == OPERATIONS
    assert client.mismatches == []
    bill = client.bill.as_dict()
    described = {
        "PrefillTokenCount": bill["prefill"],
        "SampleTokenCount": bill["sample"],
        "TrainingTokenCount": bill["train"],
    }
    wait_until(
        lambda: session.describe()["BillableTokenUsage"] == described,
        f"Describe to say {described}",
        20,
    )
    books.expect(session.name, bill)
    books.expect_no_difference(session.name)
    session.stop()
    books.expect(session.name, bill)
    books.expect_no_difference(session.name)
