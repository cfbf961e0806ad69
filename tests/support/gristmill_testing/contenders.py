"""Our engine as a benchmark's side: a worker process that trains, or the engine's runner that samples."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gristmill_contracts.http import Execute, Executed
from gristmill_contracts.operations import ForwardBackward, SampleResult
from gristmill_testing.bare_worker import BareWorker, running_worker
from gristmill_testing.local_runner import Client, datum, load, make_runner, ref, sample, step
from gristmill_testing.peak_memory import peak_rss_bytes
from gristmill_testing.peers import ALPHA, RANK, RATE, Batch
from gristmill_testing.processor import cpu_s

LOWEST_ID = 100
"""Of random prompts: control tokens lie below."""


def random_batch(vocabulary: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Speed does not depend on what the ids are."""
    maker = random.Random(seed)
    return [maker.choices(range(LOWEST_ID, vocabulary), k=length) for length in lengths]


class Trainer:
    """A worker process of its own, behind its unix socket: encoding, HTTP and its own checks included."""

    def __init__(self, worker: BareWorker) -> None:
        self._worker = worker

    def cpu_s(self) -> float:
        return cpu_s(self._worker.pid)

    def peak_gb(self) -> float:
        return peak_rss_bytes(self._worker.pid) / 1e9

    def train(self, batch: Batch) -> int:
        """forward_backward and optim_step, over a new connection: the worker closes one that was idle for
        as long as a slow peer's turn takes."""
        self._worker.hang_up()
        op = ForwardBackward(
            loss="cross_entropy", loss_config={}, datums=[datum(row) for row in batch]
        )
        self._worker.execute(op)
        self._worker.execute(step(RATE, beta2=0.999))
        return sum(map(len, batch))


@contextmanager
def running_trainer(
    folder: Path, model: Path, *, dtype: str, threads: int, compile_cache: Path | None = None
) -> Iterator[Trainer]:
    """One session is open. `compile_cache`: where compiled kernels lie, and the headers that torch compiles once
    for all of them, which it keeps below TMPDIR; None = where torch puts them."""
    folder.mkdir(parents=True, exist_ok=True)
    environment: dict[str, str] = {}
    if compile_cache is not None:
        scratch = compile_cache / "tmp"
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(compile_cache / "kernels"),
            "TMPDIR": str(scratch),
        }
    with running_worker(
        folder, model, dtype=dtype, threads=threads, environment=environment
    ) as worker:
        worker.open(rank=RANK, alpha=ALPHA)
        yield Trainer(worker)
        worker.hang_up()
        worker.close()


def first_step_s(
    folder: Path, model: Path, batch: Batch, *, dtype: str, threads: int, compile_cache: Path
) -> tuple[float, float]:
    """Seconds from the start of a worker process to the end of its first step, and of that step alone."""
    started = time.perf_counter()
    with running_trainer(
        folder, model, dtype=dtype, threads=threads, compile_cache=compile_cache
    ) as trainer:
        ready = time.perf_counter()
        trainer.train(batch)
        ended = time.perf_counter()
    return ended - started, ended - ready


class Sampler:
    """The engine's own runner in this process, with a saved adapter; requests share its batch."""

    cpu_s = staticmethod(time.process_time)

    def __init__(self, model: Path, folder: Path, dtype: torch.dtype, *, invariant: bool) -> None:
        base = load(model, dtype)
        base.invariant = invariant
        self.client = Client(
            make_runner(base, folder), "session", str(folder / "state"), rank=RANK, alpha=ALPHA
        )
        self.client.open()
        self.adapter = ref(self.client.save_weights())
        self.requests = 0

    def sample(self, prompts: Batch, samples: int, new_tokens: int, seed: int) -> int:
        """Tokens that were sampled. Raises AssertionError when a request failed."""
        answers: list[Executed] = []
        runner = self.client.runner
        for number, prompt in enumerate(prompts):
            self.requests += 1
            op = sample(
                prompt, num_samples=samples, max_tokens=new_tokens, seed=seed + number,
                adapter=self.adapter,
            )  # fmt: skip
            call = Execute(index=0, op_id=f"session/log/{self.requests}", operation=op)
            runner.begin("session", call, answers.append)
        while runner.sampler.busy:
            runner.sampler.turn()
        tokens = 0
        for answer in answers:
            assert isinstance(answer.result, SampleResult), answer.error
            tokens += sum(row.tokens.size for row in answer.result.sequences)
        return tokens

    def prompt_tokens_run(self, prompts: Batch, samples: int) -> int:
        """Tokens of prompts that the model was run on for these requests: counted at the model's own door."""
        base: Any = self.client.runner.base
        names = [name for name in dir(base) if name.startswith("prefill")]
        counted = inside = 0

        def counting(work: Any) -> Any:
            def run(tokens: torch.Tensor, *rest: Any, **named: Any) -> Any:
                nonlocal counted, inside
                counted += 0 if inside else tokens.numel()
                inside += 1
                try:
                    return work(tokens, *rest, **named)
                finally:
                    inside -= 1

            return run

        for name in names:
            setattr(base, name, counting(getattr(base, name)))
        try:
            self.sample(prompts, samples, new_tokens=1, seed=1)
        finally:
            for name in names:
                delattr(base, name)
        return counted
