"""Several targets a token, each token with as many as it has: the same as the dense form."""

import math

import pytest
import torch
from torch import Tensor

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import Datum, Forward, ForwardBackward, ForwardResult, tensor
from gristmill_testing.local_runner import Client, datum
from gristmill_worker.targets import width_of

TOKENS = [5, 6, 7, 8]
ROWS = [[(6, 0.7), (9, 0.3)], [], [(8, 1.0)], [(5, 0.25), (9, 0.5), (5, 0.25)]]


def sparse(rows: list[list[tuple[int, float]]], tokens: list[int] | None = None) -> Datum:
    entries = [entry for row in rows for entry in row]
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    return Datum(
        tensor("int64", tokens or TOKENS),
        {
            "target_tokens": tensor("int64", [token for token, _ in entries]),
            "target_rows": tensor("int64", starts),
            "weights": tensor("float32", [weight for _, weight in entries]),
        },
    )


def filled(rows: list[list[tuple[int, float]]], width: int) -> Datum:
    wide = [[*row, *[(0, 0.0)] * (width - len(row))] for row in rows]
    flat = [entry for row in wide for entry in row]
    return Datum(
        tensor("int64", TOKENS),
        {
            "target_tokens": tensor("int64", [token for token, _ in flat], (4, width)),
            "weights": tensor("float32", [weight for _, weight in flat], (4, width)),
        },
    )


def train(client: Client, *datums: Datum) -> tuple[ForwardResult, Tensor]:
    result = client.train(datums)
    gradient = client.session.gradient.clone()
    client.session.clear_gradient()
    return result, gradient


def test_sparse_targets_give_what_dense_ones_give(client: Client) -> None:
    client.train([datum([1, 2, 3])])
    client.step()
    wide, expected = train(client, filled(ROWS, 3))
    thin, found = train(client, sparse(ROWS))
    assert torch.equal(found, expected)
    assert thin.metrics == wide.metrics
    dense = wide.outputs[0]["logprobs"].tolist()
    own = thin.outputs[0]["logprobs"]
    assert own.shape == (6,)
    assert own.tolist() == [dense[at] for at in (0, 1, 6, 9, 10, 11)]


def test_soft_targets_have_the_gradient_of_their_cross_entropy(client: Client) -> None:
    """Against one datum for each target: sums add up, whichever form they come in."""
    _, found = train(client, sparse(ROWS))
    singles = [
        datum(TOKENS, [6, 0, 8, 5], [0.7, 0, 1.0, 0.25]),
        datum(TOKENS, [9, 0, 0, 9], [0.3, 0, 0, 0.5]),
        datum(TOKENS, [0, 0, 0, 5], [0, 0, 0, 0.25]),
    ]
    _, expected = train(client, *singles)
    assert torch.allclose(found, expected, atol=1e-5)
    assert bool(expected.any())


def test_forms_may_be_mixed_in_one_request(client: Client) -> None:
    short = sparse([[(9, 1.0)], [(4, 0.5), (3, 0.5)]], [11, 12])
    plain, wide = datum([20, 21, 22]), filled(ROWS, 3)
    result, found = train(client, sparse(ROWS), plain, short, wide)
    shapes = [output["logprobs"].shape for output in result.outputs]
    assert shapes == [(6,), (3,), (3,), (4, 3)]
    parts = [train(client, each)[1] for each in (sparse(ROWS), plain, short, wide)]
    assert torch.allclose(found, torch.stack(parts).sum(0), atol=1e-5)


def test_the_widest_token_tells_how_much_room_is_needed() -> None:
    assert width_of(sparse(ROWS)) == 3
    assert width_of(sparse([[], [(6, 1.0)], [], []])) == 1
    assert width_of(filled(ROWS, 5)) == 5
    assert width_of(datum(TOKENS)) == 1


def changed(key: str, value: list[int] | list[float]) -> Datum:
    whole = sparse(ROWS)
    dtype = whole.loss_inputs[key].dtype
    return Datum(whole.tokens, {**whole.loss_inputs, key: tensor(dtype, value)})


MANY = limits.TARGETS_PER_TOKEN_MAX + 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (changed("target_rows", [0, 2, 2, 3]), r"target_rows has shape \(4,\), not \(5,\)"),
        (changed("target_rows", [0, 2, 2, 3, 5]), "from 0 to the number of targets, 6"),
        (changed("target_rows", [1, 2, 2, 3, 6]), "target_rows must rise from 0"),
        (changed("target_rows", [0, 3, 2, 3, 6]), "target_rows must rise from 0"),
        (changed("weights", [1.0] * 5), r"weights has shape \(5,\), not \(6,\)"),
        (changed("weights", [1.0] * 5 + [math.inf]), "weights holds a value that is not finite"),
        (changed("target_tokens", [6, 9, 8, 5, 9, 512]), "target_tokens: token id 512"),
        (sparse([[(1, 1.0)] * MANY, [], [], []]), f"a token has {MANY} targets"),
        (filled(ROWS, MANY), f"a token has {MANY} targets"),
    ],
)
def test_sparse_targets_that_make_no_sense_are_refused(
    client: Client, bad: Datum, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        client.train([datum([5, 6]), bad])
    assert client.session.counters.accumulated == 0


def test_other_losses_take_one_target_a_token(client: Client) -> None:
    whole = sparse(ROWS)
    inputs = {**whole.loss_inputs}
    inputs |= {key: tensor("float32", [0.5] * 4) for key in ("advantages", "logprobs")}
    op = ForwardBackward(loss="ppo", loss_config={}, datums=[Datum(whole.tokens, inputs)])
    with pytest.raises(InvalidRequestError, match="datum 0: ppo takes one target a token"):
        client.run(op)


def test_scoring_alone_takes_them_too(client: Client) -> None:
    result = client.run(Forward(loss="cross_entropy", loss_config={}, datums=[sparse(ROWS)]))
    assert isinstance(result, ForwardResult)
    assert result.outputs[0]["logprobs"].shape == (6,)
