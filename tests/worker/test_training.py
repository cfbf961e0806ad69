"""forward and forward_backward: what they sum, what they leave alone, and how they fail."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill_contracts.errors import (
    GristmillError,
    InvalidRequestError,
    OperationFailedError,
    OutOfMemoryError,
)
from gristmill_contracts.operations import Datum, Forward, ForwardBackward, tensor
from gristmill_testing.local_runner import Client, datum, load, logprobs, make_runner
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_worker import lora
from gristmill_worker.base_model import BaseModel
from gristmill_worker.batch import plan
from gristmill_worker.loading import PathChoice
from gristmill_worker.runner import Runner

A = [datum([5, 6, 7, 8, 9]), datum([100, 200, 300])]
B = [datum([9, 8, 7, 6]), datum([42])]


def gradient_of(client: Client, *calls: list[Datum]) -> Tensor:
    for call in calls:
        client.train(call)
    gradient = client.session.gradient.clone()
    client.session.clear_gradient()
    return gradient


def test_two_calls_add_up_to_one(client: Client) -> None:
    apart, together = gradient_of(client, A, B), gradient_of(client, A + B)
    assert torch.allclose(apart, together, atol=1e-5, rtol=1e-4)
    assert float(apart.norm()) > 1


def test_the_loss_is_a_sum_and_never_a_mean(client: Client) -> None:
    """Two datums of (2, 1) tokens with negative log-likelihoods [1, 1] and [4]: 6, in one call or two."""
    first, second = datum([5, 6]), datum([7])
    nll = [[-p for p in row] for row in client.score([first, second])]
    scaled = [
        datum([5, 6], weights=[1 / nll[0][0], 1 / nll[0][1]]),
        datum([7], weights=[4 / nll[1][0]]),
    ]
    together = client.train(scaled).metrics["loss_sum"]
    apart = [client.train([one]).metrics["loss_sum"] for one in scaled]
    assert together == pytest.approx(6, abs=1e-5)
    assert sum(apart) == pytest.approx(6, abs=1e-5)


def test_forward_changes_nothing(client: Client) -> None:
    client.train(A)
    before = {name: value.clone() for name, value in client.session.buffers().items()}
    client.score(B)
    assert all(torch.equal(v, before[n]) for n, v in client.session.buffers().items())
    assert client.session.counters.accumulated == 1


def test_forward_twice_is_bitwise_equal_and_equals_forward_backward(client: Client) -> None:
    once, twice = client.score(A + B), client.score(A + B)
    assert once == twice == logprobs(client.train(A + B))


def test_identical_datums_in_one_call_get_identical_logprobs(client: Client) -> None:
    client.train(A)
    client.step()
    same = [7, 8, 9, 10, 11, 12, 13]
    found = client.score([datum(same), *A, datum(same), *B, datum([1, 2]), datum(same)])
    assert found[0] == found[3] == found[-1]


def test_a_datum_scores_the_same_alone_and_in_company(client: Client) -> None:
    client.train(A)
    client.step()
    probe = datum(list(range(20, 60)))
    alone = client.score([probe])[0]
    for company in ([probe, *A], [*A, probe, *B], [datum(list(range(40))), probe]):
        together = client.score(company)[company.index(probe)]
        assert together == pytest.approx(alone, abs=1e-5)


def test_changing_one_datum_leaves_the_others_bitwise_alone(client: Client) -> None:
    first = client.score([datum([5, 6, 7, 8]), *A])
    second = client.score([datum([9, 9, 9, 9]), *A])
    assert first[1:] == second[1:]
    assert first[0] != second[0]


def test_packed_and_unpacked_runs_agree(llama_dir: Path, client: Client, tmp_path: Path) -> None:
    """Models whose attention we cannot replace run equal lengths together instead."""
    plain = load(llama_dir)
    plain.packed = False
    other = Client(make_runner(plain, tmp_path / "b"), "u", str(tmp_path / "c"))
    other.open()
    mixed = [*A, *B, datum([3, 4, 5])]
    assert torch.allclose(gradient_of(client, mixed), gradient_of(other, mixed), atol=1e-5)


def test_metrics_and_outputs_of_reinforcement_learning(client: Client) -> None:
    probe = [5, 6, 7, 8]
    q = client.score([datum(probe)])[0]
    on_policy = datum(probe, logprobs=q, advantages=[1.0, -2.0, 0.5, 3.0])
    result = client.train([on_policy], "importance_sampling")
    assert result.metrics["loss_sum"] == pytest.approx(-2.5, rel=1e-5)
    assert result.metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert result.metrics["kl_q_p_mean"] == pytest.approx(0, abs=1e-5)
    assert result.metrics["clip_fraction"] == 0
    assert (result.metrics["datums"], result.metrics["tokens"]) == (1, 4)
    assert logprobs(result)[0] == pytest.approx(q, abs=1e-6)


def test_behaviour_logprobs_are_used_as_sent(client: Client) -> None:
    """q is not recomputed: with q = p - log 2 every ratio is 2."""
    probe = [5, 6, 7, 8]
    q = [p - math.log(2) for p in client.score([datum(probe)])[0]]
    result = client.train([datum(probe, logprobs=q, advantages=[1.0] * 4)], "importance_sampling")
    assert result.metrics["loss_sum"] == pytest.approx(-8, rel=1e-5)


def test_clip_thresholds_come_from_the_request(client: Client) -> None:
    probe = [5, 6, 7, 8]
    q = [p - math.log(2) for p in client.score([datum(probe)])[0]]
    data = [datum(probe, logprobs=q, advantages=[1.0] * 4)]
    for high, expected in ((1.2, -4.8), (1.5, -6.0), (3.0, -8.0)):
        op = ForwardBackward(loss="ppo", loss_config={"clip_high_threshold": high}, datums=data)
        assert client.run(op).metrics["loss_sum"] == pytest.approx(expected, rel=1e-5)  # type: ignore[union-attr]


def test_temperature_scales_the_logits(client: Client, plain_llama: Any) -> None:
    probe = [5, 6, 7, 8]
    with torch.no_grad():
        logits = plain_llama(input_ids=torch.tensor([probe])).logits[0]
    expected = torch.log_softmax(logits / 0.5, -1).gather(1, torch.tensor([[6], [7], [8], [5]]))
    heated = datum(probe, temperature=[0.5] * 4)
    assert client.score([heated])[0] == pytest.approx(expected[:, 0].tolist(), abs=1e-5)
    # The slope is that of the scaled logits: by finite differences along the gradient itself.
    gradient = gradient_of(client, [heated])
    slope = float(gradient.square().sum())
    losses = []
    for sign in (1, -1):
        client.session.adapter.weights += sign * 1e-4 / slope**0.5 * gradient
        client.session.adapter.sync()
        losses.append(client.train([heated]).metrics["loss_sum"])
        client.session.adapter.weights -= sign * 1e-4 / slope**0.5 * gradient
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(slope**0.5, rel=0.02)


def test_several_targets_a_token(client: Client) -> None:
    """[N, K] targets and weights: the same as K calls with one target each."""
    tokens = [5, 6, 7]
    wide = Datum(
        tensor("int64", tokens),
        {
            "target_tokens": tensor("int64", [6, 9, 7, 10, 5, 11], (3, 2)),
            "weights": tensor("float32", [0.7, 0.3, 0.6, 0.4, 0.5, 0.5], (3, 2)),
        },
    )
    result = client.train([wide])
    assert result.outputs[0]["logprobs"].shape == (3, 2)
    both = client.session.gradient.clone()
    client.session.clear_gradient()
    singles = [
        datum(tokens, [6, 7, 5], [0.7, 0.6, 0.5]), datum(tokens, [9, 10, 11], [0.3, 0.4, 0.5]),
    ]  # fmt: skip
    assert torch.allclose(both, gradient_of(client, singles), atol=1e-5)
    pairs = zip(*client.score(singles), strict=True)
    flat = result.outputs[0]["logprobs"].tolist()
    assert flat == pytest.approx([p for pair in pairs for p in pair], abs=1e-5)


def test_all_weights_zero_is_a_gradient_of_zero_that_may_be_stepped(client: Client) -> None:
    result = client.train([datum([5, 6, 7], weights=[0.0, 0, 0])])
    assert result.metrics["loss_sum"] == 0
    assert client.step()["grad_norm"] == 0


def test_negative_weights_push_away(client: Client) -> None:
    push = [datum([5, 6, 7], weights=[-1.0, -1, -1])]
    before = sum(client.score(push)[0])
    client.train(push)
    client.step()
    assert sum(client.score(push)[0]) < before


def test_token_zero_is_a_token_like_any_other(client: Client, plain_llama: Any) -> None:
    """The pad token has id 0 here, and is not masked."""
    tokens = [0, 5, 0, 6]
    with torch.no_grad():
        logits = plain_llama(
            input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, 4)
        ).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor([[5], [0], [6], [0]]))
    assert client.score([datum(tokens)])[0] == pytest.approx(expected[:, 0].tolist(), abs=1e-5)


def test_dropout_of_the_config_is_off(family_dir: object, tmp_path: Path) -> None:
    base = load(family_dir("gpt2"))  # type: ignore[operator]  # its config asks for dropout 0.1
    other = Client(make_runner(base, tmp_path / "a"), "u", str(tmp_path / "s"))
    other.open()
    assert logprobs(other.train(A)) == logprobs(other.train(A))


class FailingHidden:
    """Fails as torch does when the allocator has no memory, at the n-th forward pass."""

    def __init__(self, base: BaseModel, at: int, error: Exception) -> None:
        self.real, self.left, self.error = base.hidden_packed, at, error

    def __call__(self, *arguments: object) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.real(*arguments)  # type: ignore[arg-type]


NO_MEMORY = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    MemoryError("no detail"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["cpu", "python", "cuda"])
def test_out_of_memory_in_the_second_pass_leaves_the_gradient_unpolluted(
    llama: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    client = Client(make_runner(llama, tmp_path / "a", budget=16), "u", str(tmp_path / "s"))
    client.open()
    client.train(A)
    before = client.session.gradient.clone()
    three_passes = [datum(list(range(n, n + 16))) for n in (1, 2, 3)]
    with monkeypatch.context() as patched:
        patched.setattr(llama, "hidden_packed", FailingHidden(llama, 2, error))
        with pytest.raises(OutOfMemoryError, match="ran out of memory"):
            client.train(three_passes)
    assert torch.equal(client.session.gradient, before)
    assert client.session.counters.applied == 2  # the index is consumed
    assert client.session.counters.accumulated == 1
    client.train(three_passes)
    client.step()


def test_a_bug_in_an_operation_is_reported_and_changes_nothing(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "hidden_packed", FailingHidden(llama, 1, RuntimeError("bug")))
    with pytest.raises(GristmillError, match="RuntimeError: bug") as caught:
        client.train(A)
    assert caught.value.code == "internal"
    assert not bool(client.session.gradient.any())


def test_a_loss_that_is_not_finite_names_its_datum(client: Client) -> None:
    bad = datum([5, 6], logprobs=[-1.0, -1.0], advantages=[1.0, math.inf])
    fine = datum([5, 6, 7], logprobs=[-1.0] * 3, advantages=[1.0] * 3)
    with pytest.raises(OperationFailedError, match="datum 1: the loss is not finite"):
        client.train([fine, bad], "importance_sampling")
    assert not bool(client.session.gradient.any())
    hidden = datum(
        [5, 6], weights=[1.0, 0.0], logprobs=[-1.0, math.nan], advantages=[1.0, math.inf]
    )
    client.train([fine, hidden], "importance_sampling")
    assert bool(torch.isfinite(client.session.gradient).all())


def with_input(key: str, value: object) -> Datum:
    whole = datum([5, 6])
    return Datum(whole.tokens, {**whole.loss_inputs, key: value})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("bad", "loss", "message"),
    [
        (datum([5, 512]), "cross_entropy", "datum 1: tokens: token id 512 .* vocabulary of 512"),
        (datum([5, -1]), "cross_entropy", "token id -1"),
        (datum([5, 6], [7, 600]), "cross_entropy", "target_tokens: token id 600"),
        (datum(list(range(1, 512)) * 3), "cross_entropy", "1533 tokens do not fit .* 1024"),
        (datum([5, 6], weights=[1.0]), "cross_entropy", r"weights has shape \(1,\), not \(2,\)"),
        (datum([5, 6], weights=[1.0, math.nan]), "cross_entropy", "weights holds a value"),
        (datum([5, 6]), "ppo", "datum 1: ppo needs advantages, logprobs"),
        (with_input("mask", tensor("float32", [1.0, 1.0])), "cross_entropy", "unknown loss input"),
        (with_input("weights", tensor("int64", [1, 1])), "cross_entropy", "weights is int64"),
        (
            with_input("temperature", tensor("float32", [1.0, 0.0])),
            "cross_entropy",
            "temperature must",
        ),
        (datum([]), "cross_entropy", "datum 1: tokens have shape"),
    ],
)
def test_a_datum_that_cannot_run_is_named(
    client: Client, bad: Datum, loss: str, message: str
) -> None:
    fine = datum([5, 6], weights=[1.0, 1], logprobs=[-1.0, -1], advantages=[1.0, 1])
    with pytest.raises(InvalidRequestError, match=message):
        client.train([fine, bad], loss)  # type: ignore[arg-type]
    assert not bool(client.session.gradient.any())


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("cross_entropy", {"clip_low_threshold": 0.8}),
        ("ppo", {"beta": 0.1}),
        ("ppo", {"clip_low_threshold": 1.3, "clip_high_threshold": 1.2}),
        ("cispo", {"clip_high_threshold": math.nan}),
    ],
)
def test_loss_config_that_makes_no_sense_is_refused(
    client: Client, loss: str, config: dict[str, float]
) -> None:
    data = [datum([5, 6], logprobs=[-1.0, -1], advantages=[1.0, 1], weights=[1.0, 1])]
    with pytest.raises(InvalidRequestError):
        client.run(Forward(loss=loss, loss_config=config, datums=data))  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [True, False])
def test_the_plan_holds_every_datum_once_within_the_budget(packed: bool) -> None:
    lengths = [5, 9, 5, 100, 1, 9, 5, 33, 1, 2]
    parts = plan(lengths, 20, packed=packed)
    assert sorted(i for part in parts for i in part.order) == list(range(len(lengths)))
    for part in parts:
        held = [lengths[i] for i in part.order]
        assert sum(held) <= 20 or len(held) == 1
        assert packed or len(set(held)) == 1
        runs = [run.length for run in part.runs for _ in range(run.segments)]
        assert runs == held + ([part.filler] if part.filler else [])
        assert not packed or sum(runs) >= 16
    assert parts == plan(lengths, 20, packed=packed)


def test_the_token_budget_changes_passes_and_not_results(
    llama: BaseModel, runner: Runner, client: Client, tmp_path: Path
) -> None:
    small = Client(make_runner(llama, tmp_path / "b", budget=16), "u", str(tmp_path / "s2"))
    small.open()
    data = [*A, *B, datum(list(range(30, 70)))]
    assert torch.allclose(gradient_of(client, data), gradient_of(small, data), atol=1e-5)


def test_bf16_training_makes_the_progress_of_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small steps on a bf16 base: at least 97 % of the fp32 drop. Rounding W x first loses a part of it."""
    folder = build_tiny_llama(tmp_path / "m", seed=3, hidden_size=128, intermediate_size=256)
    data = [datum([(7 * i * n + n) % 500 + 5 for i in range(64)]) for n in range(1, 9)]

    def drop(dtype: torch.dtype, path: PathChoice) -> float:
        other = Client(
            make_runner(load(folder, dtype, path), tmp_path / "a"), "u", str(tmp_path / "s")
        )
        other.open()
        losses = []
        for _ in range(25):
            losses.append(other.train(data).metrics["loss_sum"])
            other.step(3e-5)
        return losses[0] - losses[-1]

    exact = drop(torch.float32, "generic")
    ours = [drop(torch.bfloat16, path) for path in ("fast", "generic")]
    monkeypatch.setattr(lora, "_with_update", rounded_first)
    naive = drop(torch.bfloat16, "generic")
    assert all(0.97 * exact < each < 1.05 * exact for each in ours), (exact, ours, naive)
    assert naive < 0.9 * exact, (exact, ours, naive)


def rounded_first(x: Tensor, low: Tensor, b: Tensor, layer: lora.LoraLinear) -> Tensor:
    """round(W x) + B (A x), as an adapter beside a bf16 layer computes it."""
    return torch.mm(x, layer.matrix) + torch.mm(low, b.t())
