"""The worker's runner in this process, and short ways to write operations for it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gristmill_contracts.errors import error_from
from gristmill_contracts.http import Execute, Executed, OpenedSession, OpenSession, Snapshotted
from gristmill_contracts.ids import TenantName
from gristmill_contracts.operations import (
    CheckpointRef,
    Datum,
    Forward,
    ForwardBackward,
    ForwardResult,
    LoadState,
    LossName,
    Operation,
    OptimStep,
    Result,
    Sample,
    SampleResult,
    SamplingParams,
    SaveResult,
    SaveState,
    SaveWeights,
    TrainOperation,
    tensor,
)
from gristmill_worker.base_model import BaseModel
from gristmill_worker.checkpoints import Checkpoints
from gristmill_worker.counters import WorkerMetrics
from gristmill_worker.disk import Disk, HostDisk
from gristmill_worker.fingerprint import fingerprint
from gristmill_worker.loading import PathChoice, load_base_model
from gristmill_worker.runner import Runner
from gristmill_worker.session import Session

BUDGET = 2048


def load(folder: Path, dtype: torch.dtype = torch.float32, path: PathChoice = "auto") -> BaseModel:
    return load_base_model(folder, dtype=dtype, device=torch.device("cpu"), path=path)


def make_runner(
    base: BaseModel, artifacts: Path, *, disk: Disk | None = None, budget: int = BUDGET
) -> Runner:
    """A runner as the engine makes it; `disk` replaces the host's for snapshots."""
    artifacts.mkdir(parents=True, exist_ok=True)
    return Runner(
        base=base,
        disk=disk or HostDisk(),
        checkpoints=Checkpoints(HostDisk(), base, artifacts, cached_max=4),
        metrics=WorkerMetrics(),
        fingerprint=fingerprint(base, budget),
        boot_id="boot",
        token_budget=budget,
        snapshots_kept=2,
    )


@dataclasses.dataclass(slots=True)
class Client:
    """One session of a runner, with the client's count of its train operations."""

    runner: Runner
    uid: str
    state_dir: str
    rank: int = 8
    alpha: int = 16
    seed: int = 0
    applied: int = 0
    samples: int = 0

    def open(self, applied_max: int | None = None) -> OpenedSession:
        request = OpenSession(
            tenant=TenantName("acme"), rank=self.rank, alpha=self.alpha, seed=self.seed,
            state_dir=self.state_dir, applied_max=applied_max,
        )  # fmt: skip
        opened = self.runner.open(self.uid, request)
        self.applied = opened.applied
        return opened

    @property
    def session(self) -> Session:
        return self.runner.sessions[self.uid]

    def executed(self, operation: Operation, **options: Any) -> Executed:
        trains = isinstance(operation, TrainOperation)
        self.applied += trains
        self.samples += not trains
        index = self.applied if trains else 0
        number = index or self.samples
        op_id = f"{self.uid}/{'train' if trains else 'log'}/{number}"
        call = Execute(index=index, op_id=op_id, operation=operation, **options)
        return self.runner.execute(self.uid, call)

    def run(self, operation: Operation, **options: Any) -> Result:
        """The result. Raises the operation's error."""
        executed = self.executed(operation, **options)
        if executed.error is not None:
            raise error_from(executed.error.code, executed.error.message)
        assert executed.result is not None
        return executed.result

    def train(self, datums: Sequence[Datum], loss: LossName = "cross_entropy") -> ForwardResult:
        result = self.run(ForwardBackward(loss=loss, loss_config={}, datums=list(datums)))
        assert isinstance(result, ForwardResult)
        return result

    def score(self, datums: Sequence[Datum], loss: LossName = "cross_entropy") -> list[list[float]]:
        """Log-probabilities of each datum's targets."""
        result = self.run(Forward(loss=loss, loss_config={}, datums=list(datums)))
        assert isinstance(result, ForwardResult)
        return logprobs(result)

    def step(self, rate: float = 1e-2, **changes: Any) -> dict[str, float]:
        result: Any = self.run(step(rate, **changes))
        metrics: dict[str, float] = result.metrics
        return metrics

    def snapshot(self) -> Snapshotted:
        """Waits until it is durable. Raises what the writing raised."""
        return self.runner.snapshot(self.uid).result()

    def save_weights(self, *, merge: bool = False) -> SaveResult:
        result = self.run(SaveWeights(location="acme/bucket", merge=merge, description=""))
        assert isinstance(result, SaveResult)
        return result

    def save_state(self) -> SaveResult:
        result = self.run(SaveState(location="acme/bucket", description=""))
        assert isinstance(result, SaveResult)
        return result

    def load_state(self, saved: SaveResult, *, with_optimizer: bool = True) -> Result:
        return self.run(LoadState(checkpoint=ref(saved), with_optimizer=with_optimizer))

    def sample(self, **options: Any) -> SampleResult:
        result = self.run(sample(**options))
        assert isinstance(result, SampleResult)
        return result


def ref(saved: SaveResult) -> CheckpointRef:
    return CheckpointRef(
        id=saved.checkpoint_id, path=saved.path, name=f"arn:checkpoint/{saved.checkpoint_id}"
    )


def logprobs(result: ForwardResult) -> list[list[float]]:
    return [[float(x) for x in output["logprobs"].tolist()] for output in result.outputs]


def datum(
    tokens: Sequence[int],
    targets: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    **inputs: Sequence[float],
) -> Datum:
    """Targets default to the next token (the last one to the first), weights to 1 for cross-entropy."""
    tokens = list(tokens)
    given: dict[str, Sequence[float]] = dict(inputs)
    if weights is not None or "advantages" not in given:
        given["weights"] = weights if weights is not None else [1.0] * len(tokens)
    floats = {key: tensor("float32", [float(x) for x in value]) for key, value in given.items()}
    aims = list(targets) if targets is not None else [*tokens[1:], *tokens[:1]]
    return Datum(tensor("int64", tokens), {"target_tokens": tensor("int64", aims), **floats})


def step(rate: float = 1e-2, **changes: Any) -> OptimStep:
    values: dict[str, Any] = {
        "learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
        "grad_clip_norm": 0.0, "lora_plus_lr_ratio": 1.0, **changes,
    }  # fmt: skip
    return OptimStep(**values)


def sample(
    prompt: Sequence[int] | None = (5, 6, 7, 8),
    *,
    num_samples: int = 1,
    max_tokens: int = 8,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    seed: int = 1,
    stop: list[str] | None = None,
    **fields: Any,
) -> Sample:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        stop=stop,
    )  # fmt: skip
    values: dict[str, Any] = {
        "messages": None, "include_prompt_logprobs": False, "topk_prompt_logprobs": 0,
        "include_text": False, "adapter": None, **fields,
    }  # fmt: skip
    tokens = None if prompt is None else tensor("int64", list(prompt))
    return Sample(prompt=tokens, num_samples=num_samples, params=params, **values)
