"""A seeded campaign of kill -9 against the processes of one Gristmill, while a client trains.

The plan is a pure function of its seed. A kill is said to land inside an operation only when the
client was still waiting for that operation's result both just before and just after the signal.
"""

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import sagemaker.train.training_session as sdk

from gristmill_testing.sdk_loop import batch

PARTS = ("worker", "meter", "ledger", "gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When to kill what. `delay` is a share of the time that a step of this run usually takes."""

    step: int
    part: str
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A kill that was carried out, and the operations that the client was waiting for."""

    step: int
    part: str
    pid: int
    in_flight: list[str]


@dataclass(slots=True)
class Run:
    """What one run left behind: a loss and a digest of all log-probabilities for each step."""

    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    tokens: int = 0
    landed: list[Landed] = field(default_factory=list)

    def kills_of(self) -> Counter[str]:
        return Counter(kill.part for kill in self.landed)

    def kills_inside(self) -> Counter[str]:
        return Counter(kill.part for kill in self.landed if kill.in_flight)

    def log(self) -> str:
        return "\n".join(json.dumps(asdict(kill)) for kill in self.landed)


def plan(seed: int, steps: int, each: int) -> list[Kill]:
    """`each` kills of every part, spread over distinct steps, never in the first or last two."""
    rng = random.Random(seed)
    parts = list(PARTS) * each
    rng.shuffle(parts)
    at = sorted(rng.sample(range(2, steps - 2), k=len(parts)))
    return [
        Kill(step=step, part=part, delay=rng.uniform(0.05, 0.6))
        for step, part in zip(at, parts, strict=True)
    ]


def rows_of(step: int, datums: int, length: int) -> list[list[int]]:
    """The batch of one step: the same for every run."""
    rng = random.Random(1000 + step)
    return [rng.choices(range(5, 60), k=length) for _ in range(datums)]


def train(
    client: sdk.TrainingClient,
    steps: int,
    kills: list[Kill],
    kill: Callable[[str], int],
    *,
    datums: int,
    length: int,
) -> Run:
    """Run `steps` pipelined steps, carrying out the kills; the SDK's own retries do the rest.

    A forward at the end shows what the last step made of the weights.
    """
    run, by_step, usual_s = Run(), {planned.step: planned for planned in kills}, 0.1
    with ThreadPoolExecutor(max_workers=2) as pool:
        for step in range(steps):
            started = time.monotonic()
            rows = rows_of(step, datums, length)
            passed = client.forward_backward(batch(rows))
            stepped = client.optim_step(sdk.AdamParams(learning_rate=1e-3))
            waiting = {
                "forward_backward": pool.submit(passed.result),
                "optim_step": pool.submit(stepped.result),
            }
            planned = by_step.get(step)
            if planned is not None:
                time.sleep(planned.delay * usual_s)  # the moment of the kill, not a synchronisation
                run.landed.append(_strike(planned, waiting, kill))
            result = waiting["forward_backward"].result()
            waiting["optim_step"].result()
            if planned is None:
                usual_s = time.monotonic() - started
            run.losses.append(result.metrics["actor/pg_loss"])
            run.digests.append(digest(result.loss_fn_outputs))
            run.tokens += sum(map(len, rows))
    last = rows_of(steps, datums, length)
    run.digests.append(digest(client.forward(batch(last)).result().loss_fn_outputs))
    run.tokens += sum(map(len, last))
    return run


def _strike(planned: Kill, waiting: dict[str, Future[Any]], kill: Callable[[str], int]) -> Landed:
    before = {name for name, future in waiting.items() if not future.done()}
    pid = kill(planned.part)
    in_flight = sorted(name for name in before if not waiting[name].done())
    return Landed(step=planned.step, part=planned.part, pid=pid, in_flight=in_flight)


def digest(outputs: list[dict[str, Any]] | None) -> str:
    values = [output["logprobs"]["data"] for output in outputs or []]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
