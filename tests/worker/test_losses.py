"""The losses against worked vectors: value and dL/dp of four tokens, in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gristmill_contracts.operations import Forward
from gristmill_worker.head import Head
from gristmill_worker.losses import LOSSES
from gristmill_worker.losses.dpo import judge_pairs
from gristmill_worker.losses.terms import TokenTerms
from gristmill_worker.train import _score_rows

P = [-0.5, -1.0, -2.0, -0.2]
Q = [-0.7, -1.0, -1.5, -0.9]
ADVANTAGES = [1.0, -0.5, 2.0, -1.0]
NARROW = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def terms(name: str, config: dict[str, float], **changes: list[float]) -> TokenTerms:
    inputs = {"logprobs": Q, "advantages": ADVANTAGES, **changes}
    columns = {key: column(values) for key, values in inputs.items()}
    return LOSSES[name](column(P), columns, config)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "config", "weights", "value", "slope"),
    [
        ("cross_entropy", {}, [0.0, 1, 1, 0.5], 3.1, [0, -1, -1, -0.5]),
        ("importance_sampling", {}, None, 0.079289, [-1.221403, 0.5, -1.213061, 2.013753]),
        ("importance_sampling", {}, [0.0, 1, 1, 1], 1.300691, [0, 0.5, -1.213061, 2.013753]),
        ("ppo", {}, None, 0.100691, [0, 0.5, -1.213061, 2.013753]),
        ("ppo", NARROW, None, 0.200691, [0, 0.5, -1.213061, 2.013753]),
        ("cispo", {}, None, 3.06, [-1.2, 0.5, -1.6, 1.2]),
        ("cispo", NARROW, None, 3.43, [-1.1, 0.5, -1.8, 1.1]),
        ("dro", {"beta": 0.05}, None, 3.8195, [-0.99, 0.5, -2.025, 1.035]),
        # beta alone weighs the step away: m = 0 leaves out all of token 0, -p A + .025 * .2^2 = .501.
        ("dro", {"beta": 0.05}, [0.0, 1, 1, 1], 3.8195 - 0.501, [0, 0.5, -2.025, 1.035]),
        # The client's surrogate of C = sum p^2 is cross-entropy with w = -dC/dp.
        ("cross_entropy", {}, [1.0, 2, 4, 0.4], 0.5 + 2 + 8 + 0.08, [-1, -2, -4, -0.4]),
    ],
)
def test_value_and_slope(
    name: str,
    config: dict[str, float],
    weights: list[float] | None,
    value: float,
    slope: list[float],
) -> None:
    found = terms(name, config, **({} if weights is None else {"weights": weights}))
    assert float(found.value.sum()) == pytest.approx(value, abs=1e-6)
    assert found.coefficient[:, 0].tolist() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
@pytest.mark.parametrize("config", [{}, NARROW])
def test_the_slope_is_the_derivative_of_the_value(name: str, config: dict[str, float]) -> None:
    """Against autograd on the formulas, the clipped ratio of cispo held constant."""
    if name in ("importance_sampling", "dro"):
        config = {"beta": 0.3} if name == "dro" else {}
    p = column(P).requires_grad_()
    q, advantage = column(Q), column(ADVANTAGES)
    ratio = torch.exp(p - q)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    loss = {
        "importance_sampling": -(ratio * advantage),
        "ppo": -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage),
        "cispo": -(ratio.clamp(low, high).detach() * advantage * p),
        "dro": -(advantage * p - 0.15 * (p - q).square()),
    }[name].sum()
    (expected,) = torch.autograd.grad(loss, p)
    found = terms(name, config)
    assert torch.allclose(found.coefficient, expected, atol=1e-12)
    assert float(found.value.sum()) == pytest.approx(float(loss.detach()), abs=1e-12)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_weight_of_zero_hides_what_is_not_finite(name: str, broken: float) -> None:
    config = {"beta": 0.05} if name == "dro" else {}
    found = terms(
        name, config, weights=[0.0, 1, 1, 1], logprobs=[broken, *Q[1:]],
        advantages=[broken, *ADVANTAGES[1:]],
    )  # fmt: skip
    clean = terms(name, config, weights=[0.0, 1, 1, 1])
    assert torch.equal(found.value, clean.value)
    assert torch.equal(found.coefficient, clean.coefficient)
    assert found.sums["ratio"] == clean.sums["ratio"]


def test_preferences_of_one_pair() -> None:
    """Sums of -3 and -4 against references of -3.5 and -3.8, beta .1."""
    chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-4.0, -7.0])
    references = [torch.tensor([-1.5, -2.0]), torch.tensor([-3.8, math.nan])]
    weights = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])]
    found = judge_pairs([chosen, rejected], weights, references, {"beta": 0.1})
    assert found.metrics["loss_sum"] == pytest.approx(0.658760, abs=1e-6)
    # The weights of a cross-entropy are minus its slopes.
    slopes = [[-w for w in each.tolist()] for each in found.weights]
    assert slopes[0] == pytest.approx([-0.048251, -0.048251], abs=1e-6)
    assert slopes[1] == pytest.approx([0.048251, 0], abs=1e-6)
    assert found.metrics["margin_mean"] == pytest.approx(0.07)
    assert found.metrics["chosen_reward_mean"] == pytest.approx(0.05)
    assert found.metrics["rejected_reward_mean"] == pytest.approx(-0.02)
    assert found.metrics["pair_accuracy"] == 1


def test_preferences_have_the_slope_of_their_value() -> None:
    """Two pairs with weights of their own, against autograd; the mean is over pairs."""
    generator = torch.Generator().manual_seed(4)

    def draw(count: int) -> list[Tensor]:
        return [-torch.rand(size, generator=generator).double() for size in (3, 2, 4, 1)[:count]]

    p, w, ref = [each.requires_grad_() for each in draw(4)], draw(4), draw(4)
    sums = [(w_i * (p_i - r_i)).sum() for p_i, w_i, r_i in zip(p, w, ref, strict=True)]
    margins = torch.stack([sums[0] - sums[1], sums[2] - sums[3]]) * 0.7
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    expected = torch.autograd.grad(loss, p)
    found = judge_pairs([each.detach() for each in p], w, ref, {"beta": 0.7})
    assert found.metrics["loss_sum"] == pytest.approx(float(loss.detach()), abs=1e-12)
    for weight, slope in zip(found.weights, expected, strict=True):
        assert torch.allclose(-weight.double(), slope, atol=1e-7)


def test_cross_entropy_through_the_logits() -> None:
    """z = [2, 1, 0], target 1, w = 1.5: the head's own backward, with an identity as output layer."""
    head = Head(SimpleNamespace(weight=torch.eye(3)), scale=1.0, softcap=None)
    inputs = {"target_tokens": torch.tensor([[1]]), "weights": torch.tensor([[1.5]])}
    op = Forward(loss="cross_entropy", loss_config={}, datums=[])
    z = torch.tensor([[2.0, 1.0, 0.0]])
    _, found, gradient = _score_rows(head, z, inputs, op, wants_gradient=True)
    assert float(found.value) == pytest.approx(2.111409, abs=1e-6)
    assert gradient is not None
    assert gradient[0].tolist() == pytest.approx([0.997861, -1.132907, 0.135046], abs=1e-6)


@pytest.mark.parametrize(("scale", "softcap"), [(0.5, None), (1.0, 2.0), (3.0, 1.5)])
def test_scaled_and_capped_heads_have_the_right_slope(scale: float, softcap: float | None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 4)
    head = Head(SimpleNamespace(weight=weight), scale=scale, softcap=softcap)
    inputs = {"target_tokens": torch.tensor([[1], [6]]), "weights": torch.tensor([[1.5], [-0.5]])}
    op = Forward(loss="cross_entropy", loss_config={}, datums=[])
    hidden = torch.randn(2, 4, requires_grad=True)
    z = scale * hidden @ weight.t()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    p = torch.log_softmax(z, -1).gather(1, inputs["target_tokens"])
    (expected,) = torch.autograd.grad(-(inputs["weights"] * p).sum(), hidden)
    with torch.no_grad():
        _, _, gradient = _score_rows(head, hidden, inputs, op, wants_gradient=True)
    assert gradient is not None
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_statistics_count_only_tokens_with_a_weight() -> None:
    found = terms("ppo", {}, weights=[1.0, 0, 1, 1], ref_log_prob=[-0.5, 0, -2.5, -0.2])
    assert found.count is not None
    assert int(found.count) == 3
    assert float(found.sums["kl_q_p"]) == pytest.approx(-0.2 + 0.5 - 0.7)
    assert float(found.sums["kl_p_ref"]) == pytest.approx(0.5)
    assert float(found.sums["clip"]) == 1.0
    assert float(found.sums["ratio"]) == pytest.approx(1.221403 + 0.606531 + 2.013753, abs=1e-5)


def test_the_reference_changes_no_gradient() -> None:
    plain, with_reference = terms("ppo", {}), terms("ppo", {}, ref_log_prob=[-9.0, -8, -7, -6])
    assert torch.equal(plain.coefficient, with_reference.coefficient)
    assert torch.equal(plain.value, with_reference.value)
