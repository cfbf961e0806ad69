"""The engine's speed and memory against its floors, its peers beside it in the same run, on one model.

    PYTHONPATH=tests/support python benchmarks/engine_vs_peft.py [MODEL_FOLDER] [--rows train decode-1] [--quick]

MODEL_FOLDER is a prepared base model (`gristmill models add` prints it); without one, random weights in the
shape of SmolLM2-135M: speed does not depend on what they are. The sides of a row take turns, so that a busy
machine hurts them alike; what counts is the ratio of their medians. Training is a worker process behind its
socket, encoding and its own checks included; sampling is the engine's runner in this process.

The decode phase is what 64 new tokens take more than 1 takes, for us and for the peer.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from gristmill_testing import engine_bounds as named
from gristmill_testing.adapters_together import adapters_together
from gristmill_testing.contenders import Sampler, first_step_s, random_batch, running_trainer
from gristmill_testing.local_runner import load
from gristmill_testing.peers import RANK, Batch, Peft, Trl, has_trl
from gristmill_testing.products import (
    Products,
    Shape,
    instructions,
    machine_facts,
    measure_products,
)
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_testing.turns import OURS, Play, Turn, take_turns, timed
from gristmill_testing.verdicts import (
    MEASURED_HEADING,
    Found,
    Verdict,
    as_json,
    judge,
    measured_lines,
    verdict_table,
)
from gristmill_worker.fast.model import FastModel

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
EQUAL = [256] * 4
RAGGED = [
    32, 47, 62, 77, 92, 107, 122, 137, 109, 128, 143, 158, 173, 148, 177, 256,
]  # fmt: skip
"""16 sequences of 32 to 256, 1,968 tokens."""
PROMPT, NEW = 128, 64
PACKAGES = ("torch", "transformers", "peft", "trl")


class Bench:
    """One run: what its rows have in common. Peers are loaded when a row needs them, and kept."""

    def __init__(self, model: Path, scratch: Path, given: argparse.Namespace) -> None:
        self.model, self.scratch, self.given = model, scratch, given
        self.shape = Shape.of(AutoConfig.from_pretrained(model))
        self.turns = 1 if given.quick else given.turns
        self.products: Products | None = None
        self._kept: dict[tuple[Any, ...], Any] = {}

    def peft(self, dtype: torch.dtype, attention: str = "sdpa", *, compiled: bool = False) -> Peft:
        key = (Peft, dtype, attention, compiled)
        if key not in self._kept:
            self._kept[key] = Peft(self.model, dtype, attention, compiled=compiled)
        kept: Peft = self._kept[key]
        return kept

    def sampler(self, *, invariant: bool = False) -> Sampler:
        key = (Sampler, invariant)
        if key not in self._kept:
            folder = self.scratch / f"sampler-{invariant}"
            self._kept[key] = Sampler(self.model, folder, torch.bfloat16, invariant=invariant)
        kept: Sampler = self._kept[key]
        return kept

    def batch(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        return random_batch(self.shape.vocabulary, lengths, seed)

    def folder(self) -> Path:
        """A new one; short, for sockets lie in it."""
        return Path(tempfile.mkdtemp(dir=self.scratch))


Row = Callable[[Bench], Found]


def training(
    bench: Bench, row: str, lengths: Sequence[int], dtype: str, peers: dict[str, Any]
) -> Found:
    """`peers`: name -> (who, its work on a batch). Ours is a worker process of this row's own."""

    def play(side: Any, work: Callable[[Batch], int], seed: int) -> tuple[Turn, ...]:
        return (timed(partial(work, bench.batch(lengths, seed)), side.cpu_s),)

    with running_trainer(
        bench.folder(), bench.model, dtype=dtype, threads=bench.given.threads
    ) as ours:
        sides: dict[str, Play] = {OURS: partial(play, ours, ours.train)}
        sides |= {name: partial(play, side, work) for name, (side, work) in peers.items()}
        [measure] = take_turns([named.TRAINING], sides, bench.turns)
        found = Found(row=row, measures=[measure], figures={named.PEAK_RSS: ours.peak_gb()})
    if bench.products is not None and len(set(lengths)) == 1:
        flops = sum(lengths) * bench.shape.training_flops(lengths[0], RANK)
        took = statistics.median(turn.wall_s for turn in measure.sides[OURS])
        # Before the row and behind it: a floor taken in a busy moment would be no floor.
        bench.products = bench.products.faster(measure_products(bench.shape, turns=bench.turns))
        found.figures[named.TIMES_FLOOR] = took / bench.products.floor_s(flops, dtype)
    return found


def training_equal(bench: Bench, row: str, dtype: str) -> Found:
    torch_dtype = getattr(torch, dtype)
    with ExitStack() as stack:
        peft, eager = bench.peft(torch_dtype), bench.peft(torch_dtype, "eager")
        peers: dict[str, Any] = {
            named.PEFT: (peft, peft.train), named.EAGER: (eager, eager.train),
        }  # fmt: skip
        if bench.given.compile_peer:
            quick = bench.peft(torch_dtype, compiled=True)
            peers[named.COMPILED] = (quick, quick.train)
        if has_trl():
            trl = Trl(bench.model, torch_dtype, bench.batch(EQUAL, 1), bench.folder())
            stack.callback(trl.close)
            peers[named.TRL] = (trl, trl.train)
        found = training(bench, row, EQUAL, dtype, peers)
    if not has_trl():
        found.notes.append("TRL is not installed: pip install trl")
    return found


def training_ragged(bench: Bench) -> Found:
    peft = bench.peft(torch.bfloat16)
    peers = {
        named.PACKED: (peft, peft.train_packed), named.PADDED: (peft, peft.train_padded),
    }  # fmt: skip
    return training(bench, "training ragged bf16", RAGGED, "bfloat16", peers)


def training_small(bench: Bench) -> Found:
    peft = bench.peft(torch.bfloat16)
    peers = {named.PEFT: (peft, peft.train)}
    return training(bench, "request of 1x32 tokens", [32], "bfloat16", peers)


def decoding(bench: Bench, row: str, requests: int, samples: int, sides: dict[str, Any]) -> Found:
    """`sides`: name -> whoever samples. Prompts are new in each run, so that no cache holds them."""
    new_tokens = 8 if bench.given.quick else NEW

    def play(side: Any, seed: int) -> tuple[Turn, ...]:
        def run(tokens: int, prompts: Batch) -> Turn:
            return timed(lambda: int(side.sample(prompts, samples, tokens, seed)), side.cpu_s)

        lengths = [PROMPT] * requests
        whole = run(new_tokens, bench.batch(lengths, 2 * seed))
        first = run(1, bench.batch(lengths, 2 * seed + 1))
        return whole - first, whole

    plays = {name: partial(play, side) for name, side in sides.items()}
    measures = take_turns([named.DECODING, named.END_TO_END], plays, bench.turns)
    return Found(row=row, measures=measures)


def decode(bench: Bench, requests: int) -> Found:
    sides = {OURS: bench.sampler(), named.PEFT: bench.peft(torch.bfloat16)}
    return decoding(bench, f"decode B={requests}", requests, 1, sides)


def shared_prompt(bench: Bench) -> Found:
    sides = {OURS: bench.sampler(), named.PEFT: bench.peft(torch.bfloat16)}
    found = decoding(bench, "32 samples of one prompt", 1, 32, sides)
    ran = bench.sampler().prompt_tokens_run(bench.batch([PROMPT], 0), 32)
    found.figures[named.PROMPT_RUNS] = ran / PROMPT
    return found


def invariant_cost(bench: Bench) -> Found:
    """What equal bits in any batch cost: our usual mode over our batch-invariant one."""
    sides = {"usual": bench.sampler(), "batch-invariant": bench.sampler(invariant=True)}
    found = Found(row="batch-invariant sampling")
    for requests, samples in ((1, 1), (8, 1), (32, 1), (1, 32)):
        shape = f"{requests} requests of {samples}"
        for measure in decoding(bench, found.row, requests, samples, sides).measures:
            measure.name = f"{measure.name}, {shape}"
            found.measures.append(measure)
    return found


def eight_adapters(bench: Bench) -> Found:
    base = load(bench.model, torch.bfloat16, "fast")
    assert isinstance(base, FastModel)
    measures = [
        adapters_together(base, named.eight_adapters(length), length, bench.turns)
        for length in (8, named.ADAPTERS_LENGTH, 128)
    ]
    return Found(row="8 adapters", measures=measures)


def first_step(bench: Bench) -> Found:
    """Each turn begins with an empty folder for compiled kernels, and starts a second process on the full one."""
    taken: dict[str, list[float]] = {
        name: [] for kind in (named.COLD, named.WARM) for name in (kind, f"{kind}, the step alone")
    }
    for turn in range(bench.turns):
        cache = bench.scratch / f"kernels-{turn}"
        for kind in (named.COLD, named.WARM):
            whole, alone = first_step_s(
                bench.folder(), bench.model, bench.batch(EQUAL, turn), dtype="bfloat16",
                threads=bench.given.threads, compile_cache=cache,
            )  # fmt: skip
            taken[kind].append(whole)
            taken[f"{kind}, the step alone"].append(alone)
        shutil.rmtree(cache, ignore_errors=True)
    return Found(
        row="first step",
        figures={name: statistics.median(seconds) for name, seconds in taken.items()},
    )


ROWS: dict[str, Row] = {
    "train": lambda bench: training_equal(bench, "training 4x256 bf16", "bfloat16"),
    "ragged": training_ragged,
    "fp32": lambda bench: training_equal(bench, "training 4x256 fp32", "float32"),
    "small": training_small,
    "decode-1": lambda bench: decode(bench, 1),
    "decode-8": lambda bench: decode(bench, 8),
    "decode-32": lambda bench: decode(bench, 32),
    "shared": shared_prompt,
    "adapters": eight_adapters,
    "start": first_step,
    "invariant": invariant_cost,
}


def facts(bench: Bench) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return machine_facts(bench.products) | {
        "threads": bench.given.threads, "turns": bench.turns, "model": str(bench.given.model or "random"),
        "weights": bench.shape.weights, "versions": versions,
        "mflop_a_token": round(bench.shape.training_flops(EQUAL[0], RANK) / 1e6, 1),
    }  # fmt: skip


def heading(bench: Bench, told: dict[str, Any]) -> list[str]:
    assert bench.products is not None
    flops = sum(EQUAL) * bench.shape.training_flops(EQUAL[0], RANK)
    floors = [bench.products.floor_s(flops, dtype) for dtype in ("bfloat16", "float32")]
    return [
        f"{told['processor']}, {' '.join(told['instructions'])}, {told['cores']} cores, "
        f"{told['threads']} threads, load {told['load']}",
        ", ".join(f"{name} {each}" for name, each in told["versions"].items()),
        f"matrix products of the model's shapes: bf16 {told['gemm_bf16_gflops']} GFLOP/s, "
        f"fp32 {told['gemm_fp32_gflops']}, ratio {told['gemm_bf16_over_fp32']}",
        f"{told['mflop_a_token']} MFLOP a token: the GEMM floor of 4x256 is {floors[0]:.2f} s in bf16, "
        f"{floors[1]:.2f} s in fp32",
    ]


def run(bench: Bench, say: Callable[[str], None]) -> tuple[dict[str, Any], list[Verdict]]:
    """Everything asked for, told as it is found. Returns the JSON and the verdicts."""
    bench.products = measure_products(bench.shape, turns=bench.turns)
    told = facts(bench)
    for line in heading(bench, told):
        say(line)
    say(MEASURED_HEADING)
    found: list[Found] = []
    for name in bench.given.rows:
        load = os.getloadavg()[0]
        each = ROWS[name](bench)
        each.load = load
        found.append(each)
        for line in (*measured_lines(each), f"  load of the machine before: {load:.1f}"):
            say(line)
    told = facts(bench) | {"load": told["load"]}
    say(f"matrix products, bf16 over fp32, as judged: {told['gemm_bf16_over_fp32']}")
    by_row = {each.row: each for each in found}
    multiplies = any("bf16" in each for each in instructions())
    verdicts = [
        judge(bound, by_row[bound.row], bf16=multiplies, complete=not bench.given.quick)
        for bound in named.bounds(bench.products.ratio)
        if bound.row in by_row
    ]
    return as_json(told, found, verdicts), verdicts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="folder of a prepared base model")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--turns", type=int, default=5, help="of each side, after one to warm up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="one short turn; nothing is judged")
    parser.add_argument(
        "--compile-peer",
        action="store_true",
        help="PEFT + torch.compile too: 90 s before its first step",
    )
    parser.add_argument("--output", choices=["table", "json"], default="table")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = given.model or build_tiny_llama(scratch / "model", **SMOLLM2)
        wants_json = given.output == "json"
        bench = Bench(model, scratch, given)
        found, verdicts = run(
            bench, say=(lambda _: None) if wants_json else partial(print, flush=True)
        )
    if wants_json:
        print(json.dumps(found, indent=2))
        return
    print(*verdict_table(verdicts), sep="\n")
    missed = [f"{each.bound.row} ({each.bound.what})" for each in verdicts if each.missed]
    print("floors: " + (f"MISSED by {', '.join(missed)}" if missed else "none missed"))


if __name__ == "__main__":
    main()
