"""Tokens a second of our worker against plain transformers + PEFT, on one model, in one run.

    PYTHONPATH=tests/support python benchmarks/engine_vs_peft.py MODEL_FOLDER [--alternations 5]

MODEL_FOLDER is a prepared base model (`gristmill models add` prints it), SmolLM2-135M as a rule.
Two measures: forward_backward + optim_step on SHAPE random tokens, and sampling. The two sides take
turns, so that a busy machine hurts them alike; what counts is the ratio of their medians (>= 0.95).
Ours is a real worker process behind its unix socket: encoding, HTTP and its own checks included.
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from gristmill_contracts.operations import (
    Datum,
    ForwardBackward,
    OptimStep,
    Sample,
    SampleResult,
    SamplingParams,
    tensor,
)
from gristmill_testing.bare_worker import BareWorker, running_worker

RANK, ALPHA = 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGET_RATIO = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What both sides are given. Token ids are random: speed does not depend on them."""

    rows: int
    length: int
    samples: int
    new_tokens: int
    vocabulary: int

    def batch(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [rng.choices(range(100, self.vocabulary), k=self.length) for _ in range(self.rows)]

    @property
    def prompt(self) -> list[int]:
        return self.batch(0)[0][:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One piece of work by one side. Processor time is what a busy machine distorts least."""

    tokens: int
    wall_s: float
    cpu_s: float


@dataclass(slots=True)
class Measure:
    """The turns of both sides."""

    name: str
    ours: list[Turn] = field(default_factory=list)
    peft: list[Turn] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        ours, peft = ([turn.tokens / turn.wall_s for turn in side] for side in self.sides)
        return statistics.median(ours) / statistics.median(peft)

    @property
    def sides(self) -> tuple[list[Turn], list[Turn]]:
        return self.ours, self.peft

    def rows(self) -> list[str]:
        by_wall = [[turn.tokens / turn.wall_s for turn in side] for side in self.sides]
        by_cpu = [[turn.tokens / turn.cpu_s for turn in side] for side in self.sides]
        return [
            _row(f"{self.name}, tokens/s", *by_wall),
            _row("  ... per processor second", *by_cpu),
        ]


def _row(name: str, ours: list[float], peft: list[float]) -> str:
    cells = [
        f"{statistics.median(side):9.1f} [{min(side):.1f}..{max(side):.1f}]"
        for side in (ours, peft)
    ]
    ratio = statistics.median(ours) / statistics.median(peft)
    return f"{name:<42} {cells[0]:<28} {cells[1]:<28} {ratio:.3f}"


class Ours:
    """A worker process; one session."""

    def __init__(self, worker: BareWorker, load: Load) -> None:
        self._worker, self._load = worker, load

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._worker.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def train(self, seed: int) -> int:
        datums = [
            Datum(
                tensor("int64", row),
                {
                    "target_tokens": tensor("int64", [*row[1:], row[0]]),
                    "weights": tensor("float32", [1.0] * len(row)),
                },
            )
            for row in self._load.batch(seed)
        ]
        self._worker.execute(ForwardBackward(loss="cross_entropy", loss_config={}, datums=datums))
        self._worker.execute(
            OptimStep(
                learning_rate=1e-4,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.0,
                grad_clip_norm=0.0,
                lora_plus_lr_ratio=1.0,
            )
        )
        return self._load.rows * self._load.length

    def sample(self, seed: int) -> int:
        params = SamplingParams(
            max_tokens=self._load.new_tokens,
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            seed=seed,
            stop=None,
        )
        result = self._worker.execute(
            Sample(
                prompt=tensor("int64", self._load.prompt),
                messages=None,
                num_samples=self._load.samples,
                params=params,
                include_prompt_logprobs=False,
                topk_prompt_logprobs=0,
                include_text=False,
                adapter=None,
            )
        )
        assert isinstance(result, SampleResult)
        return sum(sequence.tokens.size for sequence in result.sequences)


class Peft:
    """transformers + PEFT as its users write them: no padding here, since all rows are equally long."""

    def __init__(self, model: Any, load: Load) -> None:
        self._model, self._load = model, load
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0)

    def cpu_s(self) -> float:
        return time.process_time()

    def train(self, seed: int) -> int:
        tokens = torch.tensor(self._load.batch(seed))
        targets = torch.roll(tokens, -1, dims=1)
        logits = self._model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), reduction="sum"
        )
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return tokens.numel()

    def sample(self, seed: int) -> int:
        torch.manual_seed(seed)
        prompt = torch.tensor([self._load.prompt])
        with torch.no_grad():
            out = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                top_k=0,
                num_return_sequences=self._load.samples,
                max_new_tokens=self._load.new_tokens,
                pad_token_id=0,
            )
        # Rows that ended early are padded with id 0, which is no end token of theirs.
        return int((out[:, prompt.shape[1] :] != 0).sum())


def peft_model(folder: Path, dtype: torch.dtype) -> Any:
    """The base in `dtype`, the adapter in fp32, as PEFT makes it."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, bias="none"
    )
    return get_peft_model(base, config, autocast_adapter_dtype=True)


def one_turn(side: Ours | Peft, work: Callable[[int], int], seed: int) -> Turn:
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), side.cpu_s()
    tokens = work(seed)
    return Turn(tokens=tokens, wall_s=time.perf_counter() - wall_s, cpu_s=side.cpu_s() - cpu_s)


def measure(ours: Ours, peft: Peft, alternations: int) -> list[Measure]:
    """One warm-up of everything, then turn and turn about; who begins changes with each turn."""
    training, sampling = Measure("forward_backward + optim_step"), Measure("sampling")
    for measured, our_work, peft_work in (
        (training, ours.train, peft.train),
        (sampling, ours.sample, peft.sample),
    ):
        our_work(1)
        peft_work(1)
        for turn in range(alternations):
            order: list[tuple[list[Turn], Ours | Peft, Callable[[int], int]]]
            order = [(measured.ours, ours, our_work), (measured.peft, peft, peft_work)]
            for turns, side, work in order if turn % 2 == 0 else reversed(order):
                turns.append(one_turn(side, work, seed=2 + turn))
    return [training, sampling]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the prepared base model")
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    model = peft_model(given.model, getattr(torch, given.dtype))
    load = Load(
        rows=given.rows,
        length=given.length,
        samples=given.samples,
        new_tokens=given.new_tokens,
        vocabulary=model.config.vocab_size,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        running_worker(
            Path(folder), given.model, dtype=given.dtype, threads=given.threads
        ) as worker,
    ):
        worker.open(rank=RANK, alpha=ALPHA)
        print(f"fingerprint of the worker: {worker.status().fingerprint}")
        measures = measure(Ours(worker, load), Peft(model, load), given.alternations)
        worker.close()
    print(f"{'median [min..max]':<42} {'Gristmill worker':<28} {'transformers + PEFT':<28} ratio")
    for measured in measures:
        print(*measured.rows(), sep="\n")
    slow = [measured.name for measured in measures if measured.ratio < TARGET_RATIO]
    print(f"target ratio {TARGET_RATIO}: " + (f"MISSED by {', '.join(slow)}" if slow else "met"))


if __name__ == "__main__":
    main()
