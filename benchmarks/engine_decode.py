"""Sampled tokens a second of our engine against plain transformers + PEFT, on one model, in one run.

    PYTHONPATH=tests/support python benchmarks/engine_decode.py MODEL_FOLDER [--alternations 5]

MODEL_FOLDER is a prepared base model (`gristmill models add` prints it), SmolLM2-135M as a rule. Rows:
B requests of one sample each, all with prompts of their own, in one batch; then SAMPLES samples of one
prompt, for which the peer repeats the prompt as its users do. Both sides hold an adapter of rank 16, run
in this process and take turns; prompts are included. The last rows are our own batch-invariant mode
beside our usual one: what equal bits in any batch cost.
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

from gristmill_contracts.http import Execute, Executed
from gristmill_contracts.operations import SampleResult
from gristmill_testing.local_runner import Client, load, make_runner, ref, sample

RANK, ALPHA = 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FLOORS = {1: 1.3, 8: 1.8, 32: 3.0}
"""Times transformers + PEFT, by requests in a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What both sides are given. Token ids are random: speed does not depend on them."""

    requests: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    vocabulary: int

    @property
    def name(self) -> str:
        if self.samples > 1:
            return f"{self.samples} samples of one prompt"
        return f"decode B={self.requests}"

    def prompts(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        ids = range(100, self.vocabulary)
        return [rng.choices(ids, k=self.prompt_tokens) for _ in range(self.requests)]


@dataclass(slots=True)
class Measure:
    """Tokens a second of each turn of both sides."""

    name: str
    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.first) / statistics.median(self.second)

    def row(self) -> str:
        cells = [
            f"{statistics.median(side):8.1f} [{min(side):.1f}..{max(side):.1f}]"
            for side in (self.first, self.second)
        ]
        return f"{self.name:<34} {cells[0]:<28} {cells[1]:<28} {self.ratio:.2f}"


class Ours:
    """The engine's own runner, without its process."""

    def __init__(self, model: Path, folder: Path, dtype: torch.dtype, *, invariant: bool) -> None:
        base = load(model, dtype)
        base.invariant = invariant
        self.client = Client(
            make_runner(base, folder), "session", str(folder / "state"), rank=RANK, alpha=ALPHA
        )
        self.client.open()
        self.adapter = ref(self.client.save_weights())

    def run(self, given: Load, seed: int) -> int:
        answers: list[Executed] = []
        for number, prompt in enumerate(given.prompts(seed)):
            op = sample(
                prompt, num_samples=given.samples, max_tokens=given.new_tokens,
                seed=seed + number, adapter=self.adapter,
            )  # fmt: skip
            call = Execute(index=0, op_id=f"session/log/{number}", operation=op)
            self.client.runner.begin("session", call, answers.append)
        while self.client.runner.sampler.busy:
            self.client.runner.sampler.turn()
        results = [answer.result for answer in answers if isinstance(answer.result, SampleResult)]
        return sum(row.tokens.size for result in results for row in result.sequences)


class Peft:
    """transformers + PEFT as its users write them; all prompts are equally long, so that nothing is padded."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, bias="none"
        )
        self.model: Any = get_peft_model(base, config, autocast_adapter_dtype=True).eval()

    def run(self, given: Load, seed: int) -> int:
        torch.manual_seed(seed)
        prompts = torch.tensor(given.prompts(seed))
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                num_return_sequences=given.samples,
                max_new_tokens=given.new_tokens,
                pad_token_id=0,
            )
        # Rows that ended early are padded with id 0, which is no end token of theirs.
        return int((out[:, prompts.shape[1] :] != 0).sum())


def timed(work: Callable[[Load, int], int], given: Load, seed: int) -> float:
    gc.collect()
    began = time.perf_counter()
    tokens = work(given, seed)
    return tokens / (time.perf_counter() - began)


def measure(
    name: str, first: Callable[[Load, int], int], second: Callable[[Load, int], int],
    given: Load, alternations: int,
) -> Measure:  # fmt: skip
    """One warm-up of both, then turn and turn about; who begins changes with each turn."""
    measured = Measure(name)
    first(given, 1)
    second(given, 1)
    for turn in range(alternations):
        order = [(measured.first, first), (measured.second, second)]
        for found, work in order if turn % 2 == 0 else reversed(order):
            found.append(timed(work, given, 2 + turn))
    return measured


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the prepared base model")
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--samples", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(given.model, Path(folder) / "usual", dtype, invariant=False)
        alike = Ours(given.model, Path(folder) / "invariant", dtype, invariant=True)
        peft = Peft(given.model, dtype)
        print(f"{ours.client.runner.fingerprint}; load of the machine {os.getloadavg()[0]:.1f}")
        print(f"{'tokens/s, median [min..max]':<34} {'ours':<28} {'transformers + PEFT':<28} ratio")
        missed = []
        shapes = [(count, 1) for count in given.requests] + [(1, given.samples)]
        loads = [
            Load(
                requests=count, samples=samples, prompt_tokens=given.prompt_tokens,
                new_tokens=given.new_tokens, vocabulary=ours.client.runner.base.facts.vocabulary_size,
            )
            for count, samples in shapes
        ]  # fmt: skip
        for each in loads:
            found = measure(each.name, ours.run, peft.run, each, given.alternations)
            print(found.row(), flush=True)
            floor = FLOORS.get(each.requests) if each.samples == 1 else None
            missed += [each.name] if floor is not None and found.ratio < floor else []
        print(f"{'':<34} {'ours':<28} {'ours, batch-invariant':<28} ratio")
        for each in loads:
            found = measure(each.name, ours.run, alike.run, each, given.alternations)
            print(found.row(), flush=True)
    print("floors: " + (f"MISSED by {', '.join(missed)}" if missed else "met"))


if __name__ == "__main__":
    main()
