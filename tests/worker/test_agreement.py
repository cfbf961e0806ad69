"""What must agree with what: ranks, places in a batch, sampler and trainer, runs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill_contracts.operations import Datum, ForwardResult, SampledSequence
from gristmill_testing.local_runner import Client, datum, load, logprobs, make_runner, ref
from gristmill_testing.tiny_models import VOCABULARY
from gristmill_worker.base_model import BaseModel
from gristmill_worker.loading import PathChoice
from gristmill_worker.train import HEAD_ROWS

PROBE = list(range(20, 60))
PATHS: list[PathChoice] = ["fast", "generic"]


def opened(base: BaseModel, tmp_path: Path, uid: str = "u", **changes: int) -> Client:
    client = Client(make_runner(base, tmp_path / uid), uid, str(tmp_path / f"{uid}-state"))
    client.rank, client.alpha = changes.get("rank", 8), changes.get("alpha", 16)
    client.open()
    return client


def trained(client: Client, turns: int = 3) -> Client:
    for _ in range(turns):
        client.train([datum(list(range(5, 25))), datum([9, 8, 7])])
        client.step()
    return client


# --- ranks ---------------------------------------------------------------------------------------


def first_losses(base: BaseModel, tmp_path: Path, rank: int) -> list[float]:
    """Of five steps with alpha 32, whatever the rank."""
    client = opened(base, tmp_path, f"rank-{rank}", rank=rank, alpha=32)
    data = [datum([(7 * i * n + n) % 500 + 5 for i in range(40)]) for n in range(1, 5)]
    losses = []
    for _ in range(5):
        losses.append(client.train(data).metrics["loss_sum"])
        client.step(1e-3)
    return losses


def test_the_first_steps_cost_the_same_at_every_rank(llama: BaseModel, tmp_path: Path) -> None:
    """Losses of steps 1 to 5 within 1 % across ranks 4 to 64, while they fall by more than that."""
    curves = {rank: first_losses(llama, tmp_path, rank) for rank in (4, 8, 16, 32, 64)}
    for step in range(5):
        losses = [curve[step] for curve in curves.values()]
        assert max(losses) <= 1.01 * min(losses), (step, losses)
    for rank, curve in curves.items():
        assert curve[4] < 0.97 * curve[0], (rank, curve)


# --- places --------------------------------------------------------------------------------------


def companies() -> list[list[Datum]]:
    """The probe in every kind of batch: first, in the middle, last, beside its likes, over budget."""
    probe, short, long = datum(PROBE), datum([9, 8, 7]), datum(list(range(100, 190)))
    other = datum(list(range(61, 101)))
    return [
        [probe],
        [probe, short],
        [short, probe],
        [long, short, probe, short],
        [other, other, probe, other],
        [long] * 30 + [probe],
        [probe, *[short] * 9],
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_datum_scores_the_same_alone_in_a_batch_and_at_any_place(
    llama_dir: Path, tmp_path: Path, path: PathChoice, dtype: torch.dtype
) -> None:
    """float32: mean difference below 1e-5, none above 1e-3; bfloat16: mean below 0.06."""
    client = trained(opened(load(llama_dir, dtype, path), tmp_path))
    probe = datum(PROBE)
    found = []
    for company in companies():
        at = next(i for i, each in enumerate(company) if each.tokens == probe.tokens)
        found.append(torch.tensor(client.score(company)[at], dtype=torch.float64))
    for scores in found[1:]:
        away = (scores - found[0]).abs()
        if dtype == torch.float32:
            assert float(away.mean()) < 1e-5
            assert float(away.max()) < 1e-3
        else:
            assert float(away.mean()) < 0.06


# --- sampler and trainer -------------------------------------------------------------------------


def differences(client: Client, prompt: list[int], sequence: SampledSequence) -> Tensor:
    """q - p of each sampled token: the sampler's own log-probability less forward's."""
    whole = [*prompt, *(int(token) for token in sequence.tokens.tolist())]
    trainer = client.score([datum(whole[:-1], whole[1:])])[0][len(prompt) - 1 :]
    return torch.tensor(sequence.logprobs.tolist()) - torch.tensor(trainer)


@pytest.mark.parametrize("path", PATHS)
def test_sampler_and_trainer_agree_at_every_depth(
    llama_dir: Path, tmp_path: Path, path: PathChoice
) -> None:
    """By buckets of 32 tokens: a fault of long contexts hides in a mean over all."""
    client = trained(opened(load(llama_dir, path=path), tmp_path))
    adapter = ref(client.save_weights())
    prompt = list(range(30, 38))
    result = client.sample(
        prompt=prompt, num_samples=4, max_tokens=128, temperature=0.3, adapter=adapter
    )
    found = [differences(client, prompt, sequence) for sequence in result.sequences]
    assert max(len(each) for each in found) > 32
    for start in range(0, 128, 32):
        bucket = torch.cat([each[start : start + 32] for each in found]).double()
        if bucket.numel():
            assert float(bucket.abs().mean()) < 1e-5, start
            assert float(bucket.abs().max()) < 1e-3, start
            assert abs(float(bucket.mean())) < 1e-5, start


# --- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_two_runs_are_bitwise_equal(llama_dir: Path, tmp_path: Path, path: PathChoice) -> None:
    """Each with a base that was loaded anew: log-probabilities, metrics, gradient and weights."""
    results: list[list[ForwardResult]] = []
    buffers: list[dict[str, Tensor]] = []
    for run in ("first", "second"):
        client = opened(load(llama_dir, path=path), tmp_path, run)
        trained(client)
        rows = [datum(PROBE), datum([3, 4]), datum(PROBE[:9])]
        results.append([client.train(rows), client.train(rows[:1])])
        buffers.append(client.session.buffers())
    assert results[0] == results[1]
    for name, value in buffers[0].items():
        assert torch.equal(value, buffers[1][name]), name
    assert bool(buffers[0]["gradient"].any())


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def test_no_pass_holds_tokens_times_vocabulary(client: Client) -> None:
    """Logits exist for 256 rows at a time, there and back."""
    count = 4 * HEAD_ROWS
    rows = [datum(list(range(5, 69))) for _ in range(count // 64)]
    with Largest() as largest:
        result = client.train(rows)
    assert sum(len(each) for each in logprobs(result)) == count
    assert HEAD_ROWS * VOCABULARY <= largest.elements < count * VOCABULARY
