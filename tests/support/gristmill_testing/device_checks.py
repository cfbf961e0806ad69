"""What must hold on any device, as functions of it: run on the CPU by tests/worker, on CUDA by tests/gpu."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill_contracts.operations import Datum, ForwardBackward
from gristmill_testing.local_runner import Client, datum, make_runner
from gristmill_worker import train
from gristmill_worker.adapter import Adapter, fresh_weights, make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.devices import prepare_device
from gristmill_worker.loading import PathChoice, load_base_model
from gristmill_worker.team import Team

BUDGET = 2048
CPU = torch.device("cpu")
LENGTHS = (700, 64, 64, 31, 5)
"""Longer and shorter than what the fast path's products take, equal ones, and an odd one."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward_backward gave, on the host."""

    logprobs: Tensor
    gradient: Tensor
    loss: float


def loaded(folder: Path, device: torch.device, dtype: torch.dtype, path: PathChoice) -> BaseModel:
    """As the worker loads it."""
    prepare_device(device)
    return load_base_model(folder, dtype=dtype, device=device, path=path)


def adapter_of(base: BaseModel, rank: int = 8) -> Adapter:
    """B is not zero: else the gradient of A is."""
    layout = base.layout(rank)
    weights = fresh_weights(layout, 1)
    maker = torch.Generator().manual_seed(2)
    weights[layout.a_size :] = 0.05 * torch.randn(layout.size - layout.a_size, generator=maker)
    return make_adapter(layout, 2 * rank, weights, device=base.device, dtype=base.dtype)


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[Datum]:
    return [datum([3 + (17 * at + 5 * j) % 500 for j in range(n)]) for at, n in enumerate(lengths)]


def one_pass(base: BaseModel, adapter: Adapter, datums: list[Datum]) -> Pass:
    op = ForwardBackward(loss="cross_entropy", loss_config={}, datums=datums)
    result, scratch = train.forward_backward(base, adapter, op, BUDGET, Team())
    logprobs = [torch.tensor(each["logprobs"].tolist()) for each in result.outputs]
    return Pass(torch.cat(logprobs), scratch.cpu(), result.metrics["loss_sum"])


def three_runs(base: BaseModel) -> list[Pass]:
    """The same request three times, with other work between."""
    adapter, found = adapter_of(base), []
    for _ in range(3):
        found.append(one_pass(base, adapter, rows()))
        one_pass(base, adapter, rows((9, 40)))
    return found


def bitwise(passes: list[Pass]) -> bool:
    first = passes[0]
    return all(
        torch.equal(each.gradient, first.gradient) and torch.equal(each.logprobs, first.logprobs)
        for each in passes
    )


def relative(found: Tensor, expected: Tensor) -> float:
    """max |d| / max |expected|."""
    return float((found - expected).abs().max() / expected.abs().max())


def sampled_against_scored(base: BaseModel, folder: Path) -> Tensor:
    """|d| of the logprobs that sampling told and those that a forward gives the same tokens."""
    client = Client(make_runner(base, folder / "a"), "u", str(folder / "s"))
    client.open()
    prompt = [5, 6, 7, 8, 9]
    differences = []
    for sequence in client.sample(prompt=prompt, num_samples=8, max_tokens=48).sequences:
        tokens = [*prompt, *sequence.tokens.tolist()]
        scored: Any = client.score([datum(tokens[:-1], tokens[1:])])[0][len(prompt) - 1 :]
        differences.append(torch.tensor(sequence.logprobs.tolist()) - torch.tensor(scored))
    return torch.cat(differences).abs()
