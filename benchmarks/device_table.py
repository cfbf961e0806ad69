"""Tokens a second of our engine against transformers + PEFT on one device, in one process.

    PYTHONPATH=tests/support python benchmarks/device_table.py [--device cuda] [--model MODEL_FOLDER]

Part of `make test-gpu`. Without a model folder, random weights in the shape of SmolLM2-135M: speed does
not depend on what they are. The two sides take turns; printed are medians, their ratio, and what a
matrix product of the model's size reaches on the device. The engine runs in this process: no socket.
"""

import argparse
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

from gristmill_testing.device_checks import loaded
from gristmill_testing.local_runner import Client, datum, make_runner
from gristmill_testing.tiny_models import build_tiny_llama

RANK, ALPHA = 16, 32
PROMPT, NEW = 128, 64
SMOLLM2 = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(slots=True)
class Row:
    """One kind of work: tokens a second of both sides, turn by turn."""

    name: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def text(self) -> str:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return f"{self.name:<28} {ours:>12.0f} {theirs:>12.0f} {ours / theirs:>8.2f}"


class Peft:
    """transformers + PEFT as its users write them."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        config = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0, bias="none"
        )
        self.model: Any = get_peft_model(base, config, autocast_adapter_dtype=True)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
        self.device = device

    def train(self, batch: list[list[int]]) -> int:
        longest = max(map(len, batch))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
        tokens, mask = padded.to(self.device), mask.to(self.device)
        logits = self.model(input_ids=tokens, attention_mask=mask).logits
        targets = torch.roll(tokens, -1, dims=1).masked_fill(mask == 0, -100)
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        ).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(map(len, batch))

    def sample(self, prompt: list[int], count: int) -> int:
        tokens = torch.tensor([prompt], device=self.device)
        with torch.no_grad():
            out = self.model.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0,
                num_return_sequences=count, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
            )  # fmt: skip
        return int(out[:, len(prompt) :].numel())


def our_train(client: Client, batch: list[list[int]]) -> int:
    client.train([datum(row) for row in batch])
    client.step(1e-4)
    return sum(map(len, batch))


def our_sample(client: Client, prompt: list[int], count: int) -> int:
    result = client.sample(prompt=prompt, num_samples=count, max_tokens=NEW)
    return sum(sequence.tokens.size for sequence in result.sequences)


def timed(work: Callable[[], int], device: torch.device) -> float:
    started = time.perf_counter()
    tokens = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tokens / (time.perf_counter() - started)


def work_of(
    client: Client, peft: Peft, vocabulary: int
) -> dict[str, tuple[Callable[[], int], Callable[[], int]]]:
    maker = random.Random(0)

    def batch(*lengths: int) -> list[list[int]]:
        return [maker.choices(range(5, vocabulary), k=length) for length in lengths]

    prompt = batch(PROMPT)[0]
    batches = {
        "training 4x256": batch(*[256] * 4),
        "training ragged": batch(*[32 + 15 * at for at in range(16)]),
        "training 1x32": batch(32),
    }
    table: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {
        name: (lambda rows=rows: our_train(client, rows), lambda rows=rows: peft.train(rows))  # type: ignore[misc]
        for name, rows in batches.items()
    }
    for count in (1, 8, 32):
        table[f"sampling, {count} rows"] = (
            lambda count=count: our_sample(client, prompt, count),  # type: ignore[misc]
            lambda count=count: peft.sample(prompt, count),  # type: ignore[misc]
        )
    return table


def measure(
    client: Client, peft: Peft, vocabulary: int, turns: int, device: torch.device
) -> list[Row]:
    found = []
    for name, (ours, theirs) in work_of(client, peft, vocabulary).items():
        row = Row(name)
        timed(ours, device), timed(theirs, device)
        for _ in range(turns):
            row.ours.append(timed(ours, device))
            row.theirs.append(timed(theirs, device))
        found.append(row)
    return found


def product_speed(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """TFLOP/s of (size, size) by (size, size)."""
    left = torch.randn(size, size, device=device).to(dtype)
    timed(lambda: int((left @ left).shape[0]), device)
    rates = [timed(lambda: int((left @ left).shape[0]), device) for _ in range(5)]
    return statistics.median(rates) / size * 2 * size**3 / 1e12


def table(  # noqa: PLR0917
    folder: Path, scratch: Path, device: torch.device, dtype: torch.dtype, turns: int, gemm: int
) -> list[str]:
    base = loaded(folder, device, dtype, "auto")
    client = Client(
        make_runner(base, scratch / "a"), "u", str(scratch / "s"), rank=RANK, alpha=ALPHA
    )
    client.open()
    rows = measure(client, Peft(folder, device, dtype), base.facts.vocabulary_size, turns, device)
    return [
        f"fingerprint: {client.runner.fingerprint}",
        f"matrix product: {product_speed(device, dtype, gemm):.2f} TFLOP/s",
        f"{'tokens a second, medians':<28} {'engine':>12} {'PEFT':>12} {'ratio':>8}",
        *(row.text() for row in rows),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--model", type=Path, help="prepared base model; default: random weights")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--product", type=int, default=4096, help="size of the matrix product")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device on this machine")
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = given.model or build_tiny_llama(scratch / "m", **SMOLLM2)
        device, dtype = torch.device(given.device), getattr(torch, given.dtype)
        print(*table(folder, scratch, device, dtype, given.turns, gemm=given.product), sep="\n")


if __name__ == "__main__":
    main()
