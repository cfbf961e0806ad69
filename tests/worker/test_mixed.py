"""Adapters of several ranks in one training pass: each gets what it would get alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill_contracts.operations import Datum, ForwardBackward, ForwardResult, LossName, tensor
from gristmill_testing.local_runner import datum, load
from gristmill_testing.tiny_models import build_tiny_llama, build_tiny_qwen2
from gristmill_worker import train
from gristmill_worker.adapter import Adapter, fresh_weights, make_adapter
from gristmill_worker.fast.model import FastModel
from gristmill_worker.mixed import Job, forward_backward_mixed, passes
from gristmill_worker.team import Team


def fast(folder: Path, dtype: torch.dtype = torch.float32) -> FastModel:
    base = load(folder, dtype, "fast")
    assert isinstance(base, FastModel)
    return base


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FastModel:
    """qwen2 has biases."""
    folder = tmp_path_factory.mktemp("mixed") / "m"
    build = build_tiny_llama if request.param == "llama" else build_tiny_qwen2
    return fast(build(folder))


def adapter(base: FastModel, rank: int, alpha: int, seed: int) -> Adapter:
    """With a B that is not zero."""
    layout = base.layout(rank)
    weights = fresh_weights(layout, seed)
    noise = torch.Generator().manual_seed(seed + 100)
    weights[layout.a_size :] = 0.05 * torch.randn(layout.size - layout.a_size, generator=noise)
    return make_adapter(layout, alpha, weights, device=base.device, dtype=base.dtype)


def job(one: Adapter, *datums: Datum, loss: LossName = "cross_entropy") -> Job:
    return Job(adapter=one, op=ForwardBackward(loss=loss, loss_config={}, datums=list(datums)))


def several(base: FastModel) -> list[Job]:
    """Three adapters of three ranks, with lengths alike and not, other losses and wide targets."""
    sparse = Datum(
        tensor("int64", [5, 6, 7]),
        {
            "target_tokens": tensor("int64", [6, 9, 8]),
            "target_rows": tensor("int64", [0, 2, 2, 3]),
            "weights": tensor("float32", [0.7, 0.3, 1.0]),
        },
    )
    rl = datum([40, 41, 42], weights=[0.0, 1, 1], logprobs=[-6.0] * 3, advantages=[1.0, -1, 2])
    return [
        job(adapter(base, 4, 8, 1), datum(list(range(5, 25))), datum([7, 8, 9]), datum([3])),
        job(adapter(base, 16, 32, 2), rl, rl, loss="importance_sampling"),
        job(
            adapter(base, 2, 8, 3), datum(list(range(60, 80))), sparse, datum(list(range(100, 160)))
        ),
    ]


def alone(base: FastModel, one: Job) -> tuple[ForwardResult, Tensor]:
    return train.forward_backward(base, one.adapter, one.op, 4096, Team())


def far(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("budget", [4096, 32])
def test_each_adapter_gets_what_it_gets_alone(base: FastModel, budget: int) -> None:
    jobs = several(base)
    for one, (result, gradient) in zip(
        jobs, forward_backward_mixed(base, jobs, budget), strict=True
    ):
        expected, reference = alone(base, one)
        assert far(gradient, reference) <= 1e-5
        assert bool(reference.any())
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
        for mine, theirs in zip(result.outputs, expected.outputs, strict=True):
            flat = torch.tensor(theirs["logprobs"].tolist())
            assert far(torch.tensor(mine["logprobs"].tolist()), flat) <= 1e-5


def test_jobs_do_not_see_each_other(base: FastModel) -> None:
    """Another neighbour of the same size: the same bits."""
    first, second, third = several(base)
    other = job(second.adapter, datum([9, 9, 9]), datum([8, 8, 8]))
    before = forward_backward_mixed(base, [first, second, third], 4096)
    after = forward_backward_mixed(base, [first, other, third], 4096)
    assert torch.equal(before[0][1], after[0][1])
    assert torch.equal(before[2][1], after[2][1])
    assert before[0][0] == after[0][0]
    assert not torch.equal(before[1][1], after[1][1])


def test_layers_that_run_again_give_the_same_bits(base: FastModel) -> None:
    class KeepNothing:
        def layers(self, table: object, rank: int) -> int:
            assert rank == 16  # the highest
            return 0

    jobs = several(base)
    kept = forward_backward_mixed(base, jobs, 4096)
    base.keeper = KeepNothing()
    try:
        again = forward_backward_mixed(base, jobs, 4096)
    finally:
        base.keeper = None
    for (_, expected), (_, found) in zip(kept, again, strict=True):
        assert torch.equal(found, expected)


def test_in_bf16_they_differ_by_rounding_alone(tmp_path: Path) -> None:
    """As far from float32 as each alone, not further."""
    folder = build_tiny_llama(tmp_path / "m")
    exact, rough = fast(folder), fast(folder, torch.bfloat16)
    references = [alone(exact, one)[1] for one in several(exact)]
    jobs = several(rough)
    for one, reference, (_, gradient) in zip(
        jobs, references, forward_backward_mixed(rough, jobs, 4096), strict=True
    ):
        theirs = float((alone(rough, one)[1] - reference).norm() / reference.norm())
        assert float((gradient - reference).norm() / reference.norm()) <= 1.2 * theirs + 1e-3


def test_passes_hold_every_datum_once_within_the_budget() -> None:
    lengths = [[5, 9, 5], [30], [1, 2, 3, 60]]
    datums = [[datum([7] * length) for length in own] for own in lengths]
    found = list(passes(datums, 50))
    held = [(unit.job, index) for units in found for unit in units for index in unit.indices]
    assert sorted(held) == [(job, at) for job, own in enumerate(lengths) for at in range(len(own))]
    assert all(sum(unit.tokens for unit in units) <= 50 or len(units) == 1 for units in found)
    assert len(found) < sum(len(units) for units in found)
    assert found == list(passes(datums, 50))


def test_a_loss_of_two_passes_runs_on_its_own(base: FastModel) -> None:
    one = job(adapter(base, 4, 8, 1), datum([1, 2]), datum([3, 4]), loss="dpo")
    with pytest.raises(ValueError, match="dpo runs in two passes"):
        forward_backward_mixed(base, [one], 4096)
