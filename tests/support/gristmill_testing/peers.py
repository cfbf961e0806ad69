"""What a user would run instead: transformers + PEFT and TRL's SFTTrainer, unmodified, for benchmarks."""

import importlib
import importlib.util
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

RANK, ALPHA = 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATE = 1e-4
IGNORED = -100
EPOCH_STEPS = 32
"""Steps of TRL between two beginnings of its data set."""

Batch = Sequence[Sequence[int]]


def lora_config() -> Any:
    return LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, bias="none"
    )


class Peft:
    """transformers + PEFT as its users write it: the base in `dtype`, the adapter in float32."""

    cpu_s = staticmethod(time.process_time)

    def __init__(
        self, folder: Path, dtype: torch.dtype, attention: str = "sdpa", *, compiled: bool = False
    ) -> None:
        base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention
        )
        self.model: Any = get_peft_model(base, lora_config(), autocast_adapter_dtype=True)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.forward: Any = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)

    def train(self, batch: Batch) -> int:
        """Rows of one length, which need neither padding nor mask."""
        tokens = torch.tensor(batch)
        return self._step({"input_ids": tokens}, torch.roll(tokens, -1, dims=1), batch)

    def train_padded(self, batch: Batch) -> int:
        longest = max(map(len, batch))
        tokens, targets, mask = (
            torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])
            for rows, fill in (
                (batch, 0),
                (_targets(batch), IGNORED),
                ([[1] * len(row) for row in batch], 0),
            )
        )
        return self._step({"input_ids": tokens, "attention_mask": mask}, targets, batch)

    def train_packed(self, batch: Batch) -> int:
        """All rows one behind the other in a single row, with a 4-D mask that keeps them apart."""
        lengths = torch.tensor([len(row) for row in batch])
        owner = torch.repeat_interleave(torch.arange(len(batch)), lengths)
        seen = (owner[:, None] == owner[None, :]).tril()
        given = {
            "input_ids": torch.tensor([[token for row in batch for token in row]]),
            "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
            "attention_mask": seen[None, None],
        }
        targets = torch.tensor([[token for row in _targets(batch) for token in row]])
        return self._step(given, targets, batch)

    def _step(self, given: dict[str, torch.Tensor], targets: torch.Tensor, batch: Batch) -> int:
        self.model.train()
        logits = self.forward(**given).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        ).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(map(len, batch))

    def sample(self, prompts: Batch, samples: int, new_tokens: int, seed: int) -> int:
        """Prompts of one length. Counts the tokens until each row's end token, itself included."""
        self.model.eval()
        torch.manual_seed(seed)
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                num_return_sequences=samples,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        # Rows that ended early are padded with id 0, which is no end token of theirs.
        return int((out[:, tokens.shape[1] :] != 0).sum())


def _targets(batch: Batch) -> list[list[int]]:
    return [[*row[1:], row[0]] for row in batch]


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


class Trl:
    """TRL's SFTTrainer, its gradient checkpointing off. `step` lets it take one step and waits for its end.

    It runs in a thread of its own, since its loop is its own: a callback holds it between two steps.
    """

    cpu_s = staticmethod(time.process_time)

    def __init__(self, folder: Path, dtype: torch.dtype, batch: Batch, scratch: Path) -> None:
        self._tokens = sum(map(len, batch))
        self._gate = Gate()
        self._trainer = trl_trainer(folder, dtype, batch, scratch, self._gate)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._trainer.train()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the step
            self._gate.ended.put(error)

    def train(self, _batch: Batch) -> int:
        """The trainer reads its own data set: as many rows, as long. Raises what its thread raised."""
        if not self._thread.is_alive():
            self._thread.start()
        self._gate.go.put(True)
        error = self._gate.ended.get()
        if error is not None:
            raise error
        return self._tokens

    def close(self) -> None:
        if self._thread.is_alive():
            self._gate.go.put(False)
            self._thread.join()


class Gate(TrainerCallback):  # type: ignore[misc]
    """Holds a trainer before each step until it is told to go on (True) or to stop (False)."""

    def __init__(self) -> None:
        self.go: queue.Queue[bool] = queue.Queue()
        self.ended: queue.Queue[Exception | None] = queue.Queue()
        self._stopping = False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self._stopping:
            self._stopping = not self.go.get()

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self._stopping
        self.ended.put(None)


def trl_trainer(
    folder: Path, dtype: torch.dtype, batch: Batch, scratch: Path, gate: Gate
) -> Any:  # an SFTTrainer
    datasets, trl = importlib.import_module("datasets"), importlib.import_module("trl")
    config = trl.SFTConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=len(batch),
        gradient_checkpointing=False,
        learning_rate=RATE,
        max_steps=1_000_000,
        max_length=None,
        bf16=dtype == torch.bfloat16,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        args=config,
        train_dataset=datasets.Dataset.from_dict(
            {"input_ids": [list(row) for row in batch] * EPOCH_STEPS}
        ),
        processing_class=tokenizer,
        peft_config=lora_config(),
        callbacks=[gate],
    )
