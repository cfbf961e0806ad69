"""Log-probabilities of prompts."""

import math

import pytest

from gristmill_contracts.errors import OperationFailedError
from gristmill_contracts.operations import (
    ComputeLogprobs,
    ComputeLogprobsResult,
    SaveResult,
    tensor,
)
from gristmill_testing.local_runner import Client, datum, ref


def test_prompt_logprobs_and_top_k(client: Client) -> None:
    tokens = [5, 9, 300, 7, 11]
    result = client.sample(
        prompt=tokens, include_prompt_logprobs=True, topk_prompt_logprobs=3, num_samples=2
    )
    assert result.prompt_tokens == 5
    assert result.prompt_logprobs is not None
    found = result.prompt_logprobs.tolist()
    assert math.isnan(found[0])
    expected = client.score([datum(tokens[:-1], tokens[1:])])[0]
    assert found[1:] == pytest.approx(expected, abs=1e-5)
    best = result.topk_prompt_logprobs
    assert best is not None
    assert best[0] == []
    assert [len(rows) for rows in best] == [0, 3, 3, 3, 3]
    for position, rows in enumerate(best[1:], start=1):
        values = [value for _, value in rows]
        assert values == sorted(values, reverse=True)
        assert values[0] >= found[position] - 1e-6
    assert client.sample().prompt_logprobs is None


def test_compute_logprobs_equals_forward(client: Client) -> None:
    """On the base model; a checkpoint of the trained session scores otherwise."""
    tokens = [5, 9, 300, 7]
    op = ComputeLogprobs(prompt=tensor("int64", tokens), topk=2, adapter=None)
    result = client.run(op)
    assert isinstance(result, ComputeLogprobsResult)
    found = result.logprobs.tolist()
    expected = client.score([datum(tokens[:-1], tokens[1:])])[0]
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx(expected, abs=1e-5)
    assert result.topk is not None
    assert len(result.topk) == 4

    saved = trained_weights(client)
    adapted = client.run(ComputeLogprobs(prompt=op.prompt, topk=0, adapter=ref(saved)))
    assert isinstance(adapted, ComputeLogprobsResult)
    assert adapted.topk is None
    expected = client.score([datum(tokens[:-1], tokens[1:])])[0]
    assert adapted.logprobs.tolist()[1:] == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(found[1:], expected, strict=True)) > 0.1


def test_one_token_of_prompt_scores_nothing(client: Client) -> None:
    result = client.run(ComputeLogprobs(prompt=tensor("int64", [5]), topk=2, adapter=None))
    assert isinstance(result, ComputeLogprobsResult)
    assert len(result.logprobs.tolist()) == 1
    assert result.topk == [[]]


@pytest.mark.parametrize("value", [float("nan"), 1e30], ids=["nan", "overflow"])
def test_scores_that_are_not_numbers_are_an_error_that_names_the_checkpoint(
    client: Client, value: float
) -> None:
    client.session.adapter.weights.fill_(value)
    adapter = ref(client.save_weights())
    words = f"checkpoint {adapter.name} gives log-probabilities that are not finite"
    with pytest.raises(OperationFailedError, match=words):
        client.run(ComputeLogprobs(prompt=tensor("int64", [5, 6, 7]), topk=2, adapter=adapter))
    with pytest.raises(OperationFailedError, match=words):
        client.sample(include_prompt_logprobs=True, adapter=adapter)
    assert client.sample(include_prompt_logprobs=True).prompt_logprobs is not None


def trained_weights(client: Client) -> SaveResult:
    for _ in range(3):
        client.train([datum(list(range(5, 25))), datum([9, 8, 7])])
        client.step()
    return client.save_weights()
