"""AdamW against worked vectors and torch's own."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill_contracts.errors import OperationFailedError
from gristmill_testing.local_runner import Client, datum, make_runner, step
from gristmill_worker import optimizer
from gristmill_worker.base_model import BaseModel
from gristmill_worker.optimizer import Buffers, Spares, Stepped, adamw, clip_scale


def run(
    weights: list[float], gradients: list[list[float]], a_size: int, **changes: float
) -> Tensor:
    p = torch.tensor(weights, dtype=torch.float64)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for number, gradient in enumerate(gradients, start=1):
        stepped = adamw(
            weights=p, gradient=torch.tensor(gradient, dtype=torch.float64), m=m, v=v,
            step=number, a_size=a_size, settings=step(**changes),
        )  # fmt: skip
        p, m, v = stepped.weights, stepped.m, stepped.v
    return p


def test_two_steps_of_one_weight() -> None:
    settings = {"rate": 0.1, "eps": 1e-12, "weight_decay": 0.01}
    assert float(run([1.0], [[0.5]], 1, **settings)) == pytest.approx(0.899, abs=1e-10)
    assert float(run([1.0], [[0.5], [-0.25]], 1, **settings)) == pytest.approx(
        0.8712640552, abs=1e-10
    )


def test_moments_of_the_two_steps() -> None:
    p = torch.ones(1, dtype=torch.float64)
    m = v = torch.zeros_like(p)
    for number, gradient in enumerate((0.5, -0.25), start=1):
        stepped = adamw(
            weights=p, gradient=torch.full_like(p, gradient), m=m, v=v, step=number, a_size=1,
            settings=step(rate=0.1, eps=1e-12, weight_decay=0.01),
        )  # fmt: skip
        p, m, v = stepped.weights, stepped.m, stepped.v
    assert float(m) == pytest.approx(0.02, abs=1e-12)
    assert float(v) == pytest.approx(0.015, abs=1e-12)


def test_the_norm_is_told_as_it_was_before_clipping() -> None:
    """g = [3, 4] with a bound of 1: the first step's m is a tenth of [0.5999999, 0.79999983]."""
    stepped = adamw(
        weights=torch.zeros(2), gradient=torch.tensor([3.0, 4.0]), m=torch.zeros(2),
        v=torch.zeros(2), step=1, a_size=2, settings=step(grad_clip_norm=1.0),
    )  # fmt: skip
    assert stepped.grad_norm == pytest.approx(5.0)
    assert (10 * stepped.m).tolist() == pytest.approx([0.59999990, 0.79999983], abs=1e-7)


def test_clipping_shows_the_small_constant() -> None:
    scale = clip_scale(5.0, 1.0)
    assert torch.tensor([3 * scale, 4 * scale]).tolist() == pytest.approx(
        [0.59999990, 0.79999983], abs=2e-8
    )
    assert clip_scale(5.0, 0.0) == 1.0
    assert clip_scale(0.5, 1.0) == 1.0


@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_like_torch_over_many_steps(clip: float) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(12, generator=generator, dtype=torch.float64)
    gradients = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.03, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_([theirs], clip)
        optimizer.step()
    ours = run(
        start.tolist(), gradients.tolist(), 12, rate=0.03, weight_decay=0.1, grad_clip_norm=clip
    )
    assert torch.allclose(ours, theirs.detach(), atol=1e-12)


def test_lora_plus_moves_only_b_faster() -> None:
    gradient = [[1.0, 1.0, 1.0]]
    slow = run([1.0, 1.0, 1.0], gradient, 2, rate=0.01, weight_decay=0.1)
    fast = run([1.0, 1.0, 1.0], gradient, 2, rate=0.01, weight_decay=0.1, lora_plus_lr_ratio=16.0)
    assert fast[:2].tolist() == slow[:2].tolist()
    assert 1 - float(fast[2]) == pytest.approx(16 * (1 - float(slow[2])), rel=1e-9)


def test_a_step_in_blocks_is_that_of_the_whole_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(4)
    weights, gradient, m, v = (torch.randn(1000, generator=generator) for _ in range(4))

    def stepped() -> Stepped:
        return adamw(
            weights=weights, gradient=gradient, m=m, v=v.abs(), step=3, a_size=401,
            settings=step(weight_decay=0.1, grad_clip_norm=0.5, lora_plus_lr_ratio=4.0),
        )  # fmt: skip

    whole = stepped()
    monkeypatch.setattr(optimizer, "BLOCK", 96)
    assert all(
        torch.equal(getattr(stepped(), name), getattr(whole, name))
        for name in ("weights", "m", "v")
    )
    assert bool((whole.weights != weights).all())


def test_a_step_in_left_buffers_is_that_in_fresh_ones() -> None:
    generator = torch.Generator().manual_seed(5)
    start = [torch.randn(40, generator=generator) for _ in range(3)]
    gradients = torch.randn(4, 40, generator=generator)

    def walked(spares: Spares | None) -> list[Tensor]:
        weights, m, v = (each.abs() for each in start)
        for number, gradient in enumerate(gradients, start=1):
            held = Buffers(weights, m, v)
            before = [each.clone() for each in (weights, m, v)]
            stepped = adamw(
                weights=weights, gradient=gradient, m=m, v=v, step=number, a_size=20,
                settings=step(weight_decay=0.1), spares=spares,
            )  # fmt: skip
            assert all(map(torch.equal, (weights, m, v), before))
            weights, m, v = stepped.weights, stepped.m, stepped.v
            if spares is not None:
                spares.keep(held)
        return [weights, m, v]

    assert all(map(torch.equal, walked(Spares()), walked(None)))


def test_left_buffers_of_another_size_are_given_up() -> None:
    spares = Spares()
    left = Buffers(*(torch.ones(4) for _ in range(3)))
    spares.keep(left)
    assert spares.take(torch.zeros(4)) is left
    spares.keep(left)
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        found = spares.take(other)
        assert {each.shape for each in (found.weights, found.m, found.v)} == {other.shape}
        assert found.weights.dtype == other.dtype
    assert spares.take(torch.zeros(4)) is not left


def test_sessions_of_one_worker_share_no_buffer(llama: BaseModel, tmp_path: Path) -> None:
    """Each step ends in the buffers that the other session's step left."""
    runner = make_runner(llama, tmp_path / "a")
    clients = [Client(runner, uid, str(tmp_path / uid), seed=3) for uid in "ab"]
    for client in clients:
        client.open()
    for _ in range(3):
        for client in clients:
            client.train([datum([5, 6, 7])])
        for client in clients:
            client.step()
    first, second = (client.session for client in clients)
    assert first.checksum() == second.checksum()
    places = [value.data_ptr() for each in (first, second) for value in each.buffers().values()]
    assert len(set(places)) == len(places)


def test_a_step_that_fails_changes_nothing(client: Client) -> None:
    client.train([datum([5, 6, 7])])
    client.session.gradient[0] = math.inf
    before = {name: value.clone() for name, value in client.session.buffers().items()}
    with pytest.raises(OperationFailedError, match="norm is inf"):
        client.step()
    for name, value in client.session.buffers().items():
        assert torch.equal(value, before[name])
    assert client.session.counters.step == 0


def test_a_step_without_gradients_is_refused(client: Client) -> None:
    with pytest.raises(OperationFailedError, match="without a forward_backward"):
        client.step()
    client.train([datum([5, 6, 7])])
    client.step()
    with pytest.raises(OperationFailedError, match="without a forward_backward"):
        client.step()


def test_metrics_of_a_step(client: Client) -> None:
    client.train([datum([5, 6, 7]), datum([9, 8])])
    client.train([datum([1, 2, 3, 4])])
    norm = float(client.session.gradient.norm())
    before = client.session.adapter.weights.clone()
    metrics = client.step(grad_clip_norm=0.01)
    moved = float((client.session.adapter.weights - before).norm())
    assert metrics["grad_norm"] == pytest.approx(norm)
    assert metrics["update_norm"] == pytest.approx(moved, rel=1e-5)
    assert (metrics["step"], metrics["tokens"]) == (1, 9)


def test_moments_stay_float32() -> None:
    stepped: Stepped = adamw(
        weights=torch.zeros(2), gradient=torch.ones(2), m=torch.zeros(2), v=torch.zeros(2),
        step=1, a_size=1, settings=step(),
    )  # fmt: skip
    assert {stepped.weights.dtype, stepped.m.dtype, stepped.v.dtype} == {torch.float32}
