"""Temperature, top_k, top_p and the draw itself."""

import math

import pytest
import torch

from gristmill_worker.chance import uniform
from gristmill_worker.choose import BLOCK, distribution, draw, pick

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def logs(temperature: float, top_k: int, top_p: float) -> list[float]:
    kept = distribution(LOGITS, temperature, top_k, top_p)[0]
    return [math.log(value) for value in kept.tolist() if value > 0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, -1, 1.0, [-0.440190, -1.440190, -2.440190, -3.440190]),
        (0.5, -1, 1.0, [-0.145078, -2.145078, -4.145078, -6.145078]),
        (1.0, 2, 1.0, [-0.313262, -1.313262]),
        (1.0, -1, 0.9, [-0.407606, -1.407606, -2.407606]),
        (1.0, 99, 1.0, [-0.440190, -1.440190, -2.440190, -3.440190]),
        (1.0, -1, 1e-9, [0.0]),
        (1.0, 1, 0.5, [0.0]),
    ],
)
def test_worked_distributions(
    temperature: float, top_k: int, top_p: float, expected: list[float]
) -> None:
    assert logs(temperature, top_k, top_p) == pytest.approx(expected, abs=1e-6)


def test_top_p_works_on_what_top_k_left() -> None:
    """Of the two kept tokens the first holds .731: it alone crosses .7, though it had .644 before."""
    assert logs(1.0, 2, 0.7) == pytest.approx([0.0])


def test_among_equal_logits_top_k_keeps_the_lower_ids() -> None:
    kept = distribution(torch.zeros(1, 5), 1.0, 2, 1.0)[0]
    assert kept.tolist() == [0.5, 0.5, 0, 0, 0]


def test_a_draw_inverts_the_distribution() -> None:
    weights = torch.tensor([[0.2, 0.0, 0.5, 0.3]], dtype=torch.float64)
    draws = [0.0, 0.1999, 0.2001, 0.6999, 0.7001, 1 - 2**-53]
    chosen = [int(pick(weights, torch.tensor([u], dtype=torch.float64))) for u in draws]
    assert chosen == [0, 0, 2, 2, 3, 3]


def test_a_draw_never_takes_what_was_cut_off() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64).expand(3, -1)
    draws = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert pick(weights, draws).tolist() == [1, 1, 1]


@pytest.mark.parametrize("vocabulary", [4, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_the_fast_draw_takes_the_token_that_the_target_falls_into(
    vocabulary: int, temperature: float
) -> None:
    """Within float32's rounding of the weights, at a grid of targets with both ends."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(1, vocabulary, generator=generator)
    targets = [at / 500 for at in range(500)] + [1 - 2**-53]
    draws = torch.tensor(targets, dtype=torch.float64)
    cumulative = distribution(logits, temperature, -1, 1.0)[0].cumsum(0)
    found = draw(logits.expand(len(targets), -1), temperature, draws)
    for target, token in zip(targets, found.tolist(), strict=True):
        before = float(cumulative[token - 1]) if token else 0.0
        assert before - 1e-5 <= target <= float(cumulative[token]) + 1e-5


def test_the_fast_draw_never_takes_what_has_no_weight() -> None:
    """First, middle and last tokens without weight, over several blocks; a temperature that underflows."""
    logits = torch.full((3, 3 * BLOCK), -torch.inf)
    logits[:, BLOCK + 5] = 1.0
    draws = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, 1.0, draws).tolist() == [BLOCK + 5] * 3
    sharp = torch.tensor([[30.0, 29.0, 2.0]]).expand(3, -1)
    assert draw(sharp, 1e-40, draws).tolist() == [0, 0, 0]


def test_frequencies_follow_the_distribution() -> None:
    weights = distribution(LOGITS, 1.0, -1, 1.0).expand(4000, -1)
    draws = torch.tensor([uniform(7, i, 0) for i in range(4000)], dtype=torch.float64)
    counts = torch.bincount(pick(weights, draws), minlength=4) / 4000
    assert counts.tolist() == pytest.approx(weights[0].tolist(), abs=0.03)


def test_uniforms_differ_by_each_coordinate_and_never_change() -> None:
    values = {uniform(s, i, t) for s in (0, 1, 2**63 - 1) for i in range(20) for t in range(20)}
    assert len(values) == 1200
    assert all(0 <= value < 1 for value in values)
    # Recorded: a seed means the same tokens in every release.
    assert uniform(1, 2, 3) == 0.4175580595044027


@pytest.mark.parametrize("vocabulary", [4, BLOCK, BLOCK + 7])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_takes_some_token_and_its_neighbour_the_same_as_ever(
    vocabulary: int, value: float
) -> None:
    """An index out of range would fail the whole batch; on a GPU it would end the process."""
    fine = torch.linspace(-1, 1, vocabulary)
    logits = torch.stack([torch.full((vocabulary,), value), fine])
    numbers = torch.tensor([0.7, 0.7], dtype=torch.float64)
    kept = distribution(logits, 1.0, 3, 0.9)
    for broken, neighbour, alone in (
        (*draw(logits, 1.0, numbers).tolist(), draw(fine[None], 1.0, numbers[1:]).item()),
        (*pick(kept, numbers).tolist(), pick(kept[1:], numbers[1:]).item()),
    ):
        assert 0 <= broken < vocabulary
        assert neighbour == alone


def test_the_lowest_temperature_above_zero_is_the_argmax() -> None:
    """5e-324 is a float too, by which no logit can be divided."""
    assert distribution(LOGITS, 5e-324, 3, 0.9).tolist() == [[1, 0, 0, 0]]
    assert draw(LOGITS, 5e-324, torch.tensor([0.99])).tolist() == [0]
