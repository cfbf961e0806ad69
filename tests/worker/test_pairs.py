"""dpo through the engine: pairs of datums, whose loss couples tokens."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill_contracts.errors import InvalidRequestError, OperationFailedError
from gristmill_contracts.operations import Datum, Forward, ForwardBackward, ForwardResult
from gristmill_testing.local_runner import Client, datum, logprobs, make_runner
from gristmill_worker.base_model import BaseModel

CHOSEN, REJECTED = [5, 6, 7, 8, 9], [5, 6, 30, 31]
PROMPTED = [0.0, 1.0, 1.0, 1.0, 1.0]
SETTINGS = {"beta": 0.1}


def pair(chosen: list[int], rejected: list[int], shift: float = 0.0) -> list[Datum]:
    """References of -6 a token, the chosen one's lower by `shift`."""
    return [
        datum(tokens, weights=PROMPTED[: len(tokens)], ref_log_prob=[-6.0 - lower] * len(tokens))
        for tokens, lower in ((chosen, shift), (rejected, 0.0))
    ]


def run(
    client: Client, datums: list[Datum], *, backward: bool = True, **config: float
) -> ForwardResult:
    kind = ForwardBackward if backward else Forward
    settings = {**SETTINGS, **config}
    result = client.run(kind(loss="dpo", loss_config=settings, datums=datums))
    assert isinstance(result, ForwardResult)
    return result


def gradient_of(client: Client, *calls: tuple[list[Datum], dict[str, float]]) -> Tensor:
    for datums, config in calls:
        run(client, datums, **config)
    gradient = client.session.gradient.clone()
    client.session.clear_gradient()
    return gradient


def test_a_pair_has_the_loss_of_its_margin(client: Client) -> None:
    """Ragged, with a prompt of weight 0: worked from the log-probabilities that come back."""
    result = run(client, pair(CHOSEN, REJECTED, 0.5))
    chosen, rejected = logprobs(result)
    reward = sum(chosen[1:]) + 4 * 6.5 - sum(rejected[1:]) - 3 * 6
    assert result.metrics["margin_mean"] == pytest.approx(0.1 * reward, rel=1e-5)
    expected = math.log1p(math.exp(-0.1 * reward))
    assert result.metrics["loss_sum"] == pytest.approx(expected, rel=1e-5)
    assert (result.metrics["datums"], result.metrics["tokens"]) == (2, 9)


def test_its_gradient_is_that_of_the_loss(client: Client) -> None:
    """By finite differences along the gradient itself."""
    data = [*pair(CHOSEN, REJECTED), *pair([40, 41, 42], [40, 50], 1.0)]
    client.train([datum([1, 2, 3])])
    client.step()
    gradient = gradient_of(client, (data, {}))
    norm = float(gradient.norm())
    assert norm > 1e-3
    losses = []
    for sign in (1, -1):
        client.session.adapter.weights += sign * 1e-2 / norm * gradient
        client.session.adapter.sync()
        losses.append(run(client, data, backward=False).metrics["loss_sum"])
        client.session.adapter.weights -= sign * 1e-2 / norm * gradient
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(norm, rel=0.05)


def test_forward_gives_the_same_and_changes_nothing(client: Client) -> None:
    data = pair(CHOSEN, REJECTED)
    scored = run(client, data, backward=False)
    assert not bool(client.session.gradient.any())
    assert client.session.counters.accumulated == 0
    trained = run(client, data)
    assert trained.metrics == scored.metrics
    assert logprobs(trained) == logprobs(scored)
    assert client.session.counters.tokens == 9


def test_training_on_pairs_prefers_the_chosen_ones(client: Client) -> None:
    data = [*pair(CHOSEN, REJECTED), *pair([40, 41, 42], [40, 50])]
    first = run(client, data)
    for _ in range(4):
        client.step(1e-3)
        last = run(client, data)
    assert last.metrics["loss_sum"] < first.metrics["loss_sum"]
    assert last.metrics["margin_mean"] > first.metrics["margin_mean"]


def test_pairs_sent_in_several_requests_add_up_when_their_number_is_told(client: Client) -> None:
    first, second = pair(CHOSEN, REJECTED), pair([40, 41, 42], [40, 50], 1.0)
    together = gradient_of(client, ([*first, *second], {}))
    apart = gradient_of(client, (first, {"pairs": 2.0}), (second, {"pairs": 2.0}))
    assert torch.allclose(apart, together, atol=1e-6, rtol=1e-4)
    alone = gradient_of(client, (first, {}), (second, {}))
    assert torch.allclose(alone, 2 * together, atol=1e-6, rtol=1e-4)


def test_a_mean_over_pairs_does_not_depend_on_the_token_budget(
    llama: BaseModel, client: Client, tmp_path: Path
) -> None:
    """Members of a pair may lie in different passes."""
    small = Client(make_runner(llama, tmp_path / "b", budget=16), "u", str(tmp_path / "s2"))
    small.open()
    data = [*pair(list(range(5, 10)), [7, 8]), *pair(CHOSEN, REJECTED), *pair([3, 4], CHOSEN, 2.0)]
    found, reference = gradient_of(small, (data, {})), gradient_of(client, (data, {}))
    assert torch.allclose(found, reference, atol=1e-6, rtol=1e-4)


def test_a_pair_that_is_not_finite_is_named_and_leaves_nothing(client: Client) -> None:
    broken = pair(CHOSEN, REJECTED)
    bad = datum(REJECTED, weights=[1.0] * 4, ref_log_prob=[-1.0, math.nan, -1.0, -1.0])
    with pytest.raises(OperationFailedError, match="datums 2 and 3: the pair's loss is not finite"):
        run(client, [*broken, broken[0], bad])
    assert not bool(client.session.gradient.any())


@pytest.mark.parametrize(
    ("datums", "config", "message"),
    [
        (pair(CHOSEN, REJECTED)[:1], SETTINGS, "dpo has 1 datums; send pairs"),
        ([datum(CHOSEN), datum(REJECTED)], SETTINGS, "datum 0: dpo needs ref_log_prob"),
        (pair(CHOSEN, REJECTED), {}, "dpo needs beta"),
        (pair(CHOSEN, REJECTED), {"beta": -0.1}, "beta is -0.1"),
        (pair(CHOSEN, REJECTED), {"beta": math.nan}, "beta is nan"),
        (pair(CHOSEN, REJECTED), {"beta": 101.0}, "beta is 101.0"),
        (pair(CHOSEN, REJECTED), {"beta": 0.1, "pairs": 0.0}, "pairs is 0.0"),
        (pair(CHOSEN, REJECTED), {"beta": 0.1, "clip_low_threshold": 1.0}, "does not take"),
    ],
)
def test_pairs_that_cannot_run_are_refused(
    client: Client, datums: list[Datum], config: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        client.run(ForwardBackward(loss="dpo", loss_config=config, datums=datums))
    assert client.session.counters.accumulated == 0
