"""One process against two ranks, each with the whole base, and two that each hold a part of every layer.

    PYTHONPATH=tests/support python benchmarks/ranks.py MODEL_FOLDER [--turns 5] [--dtype float32]

MODEL_FOLDER is a prepared Llama-shaped base model. The three take turns at the same requests over gloo, one
thread a rank, each in processes of its own that torchrun started. On one machine the ranks share its cores:
what two ranks cost shows in the processor time of both, and what they gain in the clock only where each has
a core to itself. At the end their adapters are compared with the one process's. Where a whole base is packed for
oneDNN (large models on a CPU), a sharded one is not, and differs by what the kernels differ by as well.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import safetensors.torch

from gristmill_contracts.operations import (
    Datum,
    ForwardBackward,
    OptimStepResult,
    SaveResult,
    SaveWeights,
)
from gristmill_testing.bare_worker import BareWorker
from gristmill_testing.local_runner import datum, sample, step
from gristmill_testing.peak_memory import peak_rss_bytes
from gristmill_testing.processor import cpu_s
from gristmill_testing.worker_team import TeamProcesses
from gristmill_worker.peft_files import WEIGHTS_FILE

RANK, ALPHA, RATE = 16, 32, 1e-4
VARIANTS: Final = ((1, "replicated"), (2, "replicated"), (2, "sharded"))
"""How many ranks, and what each holds of the base."""
HEAD: Final = (
    "| ranks | base | step, s | tokens/s | processor s of all ranks | peak MB of a rank "
    "| 16 new tokens, s | weights differ by |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(slots=True, kw_only=True)
class Contender:
    """One team, and what its turns took."""

    team: TeamProcesses
    session: BareWorker
    steps: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    saved: Path | None = None

    def take_turn(self, datums: list[Datum]) -> None:
        """forward_backward and optim_step, timed; then a sample, timed by itself."""
        used, began = self.used(), time.perf_counter()
        self.session.execute(ForwardBackward(loss="cross_entropy", loss_config={}, datums=datums))
        stepped = self.session.execute(step(RATE))
        assert isinstance(stepped, OptimStepResult)
        self.steps.append(time.perf_counter() - began)
        self.processor.append(self.used() - used)
        began = time.perf_counter()
        self.session.execute(sample(max_tokens=16))
        self.samples.append(time.perf_counter() - began)

    def used(self) -> float:
        return sum(cpu_s(self.team.worker_pid(rank)) for rank in self.team.agents)

    def save(self) -> None:
        saved = self.session.execute(SaveWeights(location="b/ranks", merge=False, description=""))
        assert isinstance(saved, SaveResult)
        self.saved = self.team.folder / "artifacts" / saved.path / WEIGHTS_FILE

    def peak_mb(self) -> float:
        peaks = [peak_rss_bytes(self.team.worker_pid(rank)) for rank in self.team.agents]
        return max(peaks) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--datums", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args()
    datums = make_datums(given.datums, given.length)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, ExitStack() as ending:
        contenders = [
            start(
                TeamProcesses(
                    Path(folder) / f"{ranks}-{base}",
                    given.folder,
                    world=ranks,
                    base_weights=base,
                    dtype=given.dtype,
                ),
                ending,
            )
            for ranks, base in VARIANTS
        ]
        for contender in contenders * (given.turns + 1):  # the first turn of each warms up
            contender.take_turn(datums)
        for contender in contenders:
            contender.save()
        print(
            f"{given.datums} x {given.length} tokens, {given.dtype}, rank {RANK}, gloo, 1 thread a rank"
        )
        print(HEAD)
        for contender in contenders:
            print(row(contender, contenders[0], given.datums * given.length))


def make_datums(count: int, length: int) -> list[Datum]:
    rng = random.Random(0)
    return [datum(rng.choices(range(5, 500), k=length)) for _ in range(count)]


def start(team: TeamProcesses, ending: ExitStack) -> Contender:
    team.folder.mkdir()
    ending.callback(team.end)
    for rank in range(team.world):
        team.start(rank)
    session = team.session()
    session.open(rank=RANK, alpha=ALPHA)
    return Contender(team=team, session=session)


def row(contender: Contender, first: Contender, tokens: int) -> str:
    taken = after_the_first(contender.steps)
    assert contender.saved is not None
    assert first.saved is not None
    return (
        f"| {contender.team.world} | {contender.team.base_weights} | {taken:.3f} | {tokens / taken:.0f} "
        f"| {after_the_first(contender.processor):.3f} | {contender.peak_mb():.0f} "
        f"| {after_the_first(contender.samples):.3f} | {largest_difference(contender.saved, first.saved):.1e} |"
    )


def after_the_first(turns: Sequence[float]) -> float:
    return statistics.median(turns[1:])


def largest_difference(found: Path, expected: Path) -> float:
    """Of any element of two adapters' files."""
    ours, theirs = (safetensors.torch.load_file(path) for path in (found, expected))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


if __name__ == "__main__":
    main()
