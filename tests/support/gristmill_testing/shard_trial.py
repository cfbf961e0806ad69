"""One rank of a trial: our own decoder over sharded blocks, against the same decoder with all its weights.

    torchrun --nproc-per-node 2 -m gristmill_testing.shard_trial MODEL_FOLDER RESULT_FOLDER

Each rank runs its datums of every request on sharded blocks, and the whole request alone on whole ones, and
writes what it found to RESULT_FOLDER/rank-N.json.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from gristmill_contracts.operations import ForwardBackward
from gristmill_testing.local_runner import datum, step
from gristmill_worker import train
from gristmill_worker.adapter import fresh_weights, make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.fast.model import FastModel
from gristmill_worker.fast.sharded import ShardedBlocks, tensors_of
from gristmill_worker.fast.weights import Block
from gristmill_worker.loading import load_base_model
from gristmill_worker.optimizer import adamw
from gristmill_worker.sharding import Sharding
from gristmill_worker.team import Team, team_from_environment

RANK, ALPHA, BUDGET, STEPS = 8, 16, 24, 3
RAGGED: Final = [
    [1 + (7 * at + k) % 500 for k in range(length)]
    for at, length in enumerate((19, 3, 11, 2, 17, 23, 5))
]
"""Of two ranks with a budget of 24 tokens, one has a pass more than the other."""
SINGLE: Final = RAGGED[:1]
"""The other rank has nothing to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one rank saw. Differences are relative to the largest absolute value of what one process has."""

    held: int
    """Elements of the blocks that this rank keeps."""
    whole: int
    """Elements of all blocks."""
    gradients: list[float]
    updates: list[float]
    losses: list[float]
    gathered_after: bool
    """Whether a block was still whole when all was done."""


class Trainee:
    """An adapter and its moments over one base."""

    def __init__(self, base: BaseModel, team: Team) -> None:
        layout = base.layout(RANK)
        weights = fresh_weights(layout, 1)
        weights[layout.a_size :] = fresh_weights(layout, 2)[: layout.size - layout.a_size]
        self.base, self.team = base, team
        self.adapter = make_adapter(layout, ALPHA, weights, device=base.device, dtype=base.dtype)
        self.m, self.v = torch.zeros(layout.size), torch.zeros(layout.size)
        self.steps = 0

    def update(self, rows: list[list[int]]) -> tuple[Tensor, Tensor, float]:
        """Gradient and change of the weights by one request and one step, and the request's loss."""
        op = ForwardBackward(
            loss="cross_entropy", loss_config={}, datums=[datum(row) for row in rows]
        )
        result, gradient = train.forward_backward(self.base, self.adapter, op, BUDGET, self.team)
        self.steps += 1
        stepped = adamw(
            weights=self.adapter.weights, gradient=gradient, m=self.m, v=self.v, step=self.steps,
            a_size=self.adapter.layout.a_size, settings=step(1e-4),
        )  # fmt: skip
        change = stepped.weights - self.adapter.weights
        self.adapter.weights, self.m, self.v = stepped.weights, stepped.m, stepped.v
        self.adapter.sync()
        return gradient, change, result.metrics["loss_sum"]


def elements(block: Block) -> int:
    return sum(each.numel() for each in tensors_of(block).values() if each is not None)


def held_elements(
    shard: Any,
) -> int:  # Any: the parameters are torch's DTensors, which are not typed
    return sum(each.to_local().numel() for each in shard.parameters())


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    team = team_from_environment()
    team.join("gloo", start_s=300, timeout_s=300)
    cpu = torch.device("cpu")
    sharding = Sharding(team, cpu, "sharded", lambda: None)
    whole = load_base_model(given.model, dtype=torch.float32, device=cpu)
    shared = load_base_model(given.model, dtype=torch.float32, device=cpu, sharding=sharding)
    assert isinstance(whole, FastModel)
    assert isinstance(shared, FastModel)
    alone, together = Trainee(whole, Team()), Trainee(shared, team)
    gradients, updates, losses = [], [], []
    for rows in [RAGGED] * STEPS + [SINGLE]:
        gradient, change, loss = together.update(rows)
        expected_gradient, expected_change, expected_loss = alone.update(rows)
        gradients.append(relative(gradient, expected_gradient))
        updates.append(float((change - expected_change).abs().max()))
        losses.append(abs(loss / expected_loss - 1))
    blocks = shared.decoder.weights.blocks
    assert isinstance(blocks, ShardedBlocks)
    found = Found(
        held=sum(map(held_elements, blocks.shards)),
        whole=sum(map(elements, whole.decoder.weights.blocks)),
        gradients=gradients, updates=updates, losses=losses, gathered_after=blocks.held is not None,
    )  # fmt: skip
    (given.results / f"rank-{team.rank}.json").write_text(json.dumps(asdict(found)))
    dist.barrier()
    team.leave()


if __name__ == "__main__":
    main()
