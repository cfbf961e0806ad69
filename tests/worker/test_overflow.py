"""Gradients that no optimizer step could ever take: they are refused, and the session goes on."""

import math

import msgspec
import pytest
import torch

from gristmill_contracts.errors import OperationFailedError
from gristmill_contracts.operations import ForwardBackward
from gristmill_testing.local_runner import Client, datum
from gristmill_worker.optimizer import fit_for_a_step

FINE = [datum([5, 6, 7, 8, 9]), datum([100, 200, 300])]


@pytest.mark.parametrize(
    ("values", "fit"),
    [
        ([1.0, -2.0], True),
        ([3e38, 3e38], False),  # their norm is infinite, and so would be every step's
        ([1.0, math.inf], False),
        ([math.nan, 1.0], False),
    ],
)
def test_a_gradient_is_taken_where_a_step_could_take_it(values: list[float], fit: bool) -> None:
    assert fit_for_a_step(torch.tensor(values)) == fit


def test_a_gradient_that_no_step_could_take_does_not_block_the_session(client: Client) -> None:
    """Accumulated, it would fail every step from then on."""
    huge = datum([5, 6, 7], logprobs=[-5.0] * 3, advantages=[1e30] * 3)
    with pytest.raises(OperationFailedError, match="norm is not; nothing was accumulated"):
        client.train([huge], "importance_sampling")
    assert not bool(client.session.gradient.any())
    client.train(FINE)
    assert client.step()["update_norm"] > 0


def test_a_sum_of_gradients_that_no_step_could_take_is_not_made(client: Client) -> None:
    client.train(FINE)
    client.session.gradient.fill_(1e16)  # which a step takes, and with as much again does not
    before = client.session.gradient.clone()
    counters = msgspec.structs.replace(client.session.counters)
    more = ForwardBackward(loss="cross_entropy", loss_config={}, datums=FINE)
    with pytest.raises(OperationFailedError, match="accumulated gradient would not be finite"):
        client.session.accumulate(more, torch.full_like(before, 1e18))
    assert torch.equal(client.session.gradient, before)
    assert client.session.counters == counters
    client.step()
