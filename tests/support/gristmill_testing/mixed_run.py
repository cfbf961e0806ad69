"""Everything at once under kill -9: training, sampling, scoring, saves and loads, with its own bill."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import sagemaker.train.training_session as sdk

from gristmill_testing.crash_campaign import Kill, rows_of
from gristmill_testing.sdk_loop import batch
from gristmill_testing.token_bill import Bill

PROMPT = [7, 11, 13]
SAMPLES = 2
SAVE_WEIGHTS_EVERY, SAVE_STATE_EVERY = 4, 6


@dataclass(slots=True)
class MixedRun:
    """One session. `seen` is all that came back, in the order it was asked for."""

    client: sdk.TrainingClient
    sampler: sdk.SamplingClient
    bill: Bill = field(default_factory=Bill)
    seen: list[Any] = field(default_factory=list)
    landed: list[str] = field(default_factory=list)

    def turn(self, step: int) -> None:
        """A pass, an optimizer step, a sample and a score in flight together; now and then a save."""
        rows, scored = rows_of(step, datums=6, length=20), [*PROMPT, 8 + step]
        passed = self.client.forward_backward(batch(rows))
        stepped = self.client.optim_step(sdk.AdamParams(learning_rate=1e-3))
        params = {"max_tokens": 512, "seed": step, "temperature": 0.7}
        sampled = self.sampler.sample(PROMPT, num_samples=SAMPLES, sampling_params=params)
        scores = self.sampler.compute_logprobs(scored)
        sequences = [sequence.tokens for sequence in sampled.result().sequences]
        stepped.result()
        self.seen += [passed.result().metrics["actor/pg_loss"], sequences, scores.result()]
        if step % SAVE_WEIGHTS_EVERY == SAVE_WEIGHTS_EVERY - 1:
            self.sampler = self.client.save_weights_and_get_sampling_client()
        if step % SAVE_STATE_EVERY == SAVE_STATE_EVERY - 1:
            state = self.client.save_state().result().model_package_arn
            self.client.load_state_with_optimizer(str(state)).result()
        self.bill.train += sum(map(len, rows))
        self.bill.prefill += len(PROMPT) + len(scored)
        self.bill.cached_prefill += len(PROMPT) * (SAMPLES - 1)
        self.bill.sample += sum(map(len, sequences))


def run_mixed(
    client: sdk.TrainingClient, steps: int, kills: list[Kill], kill: Callable[[str], int]
) -> MixedRun:
    """`steps` turns, each with at most one kill somewhere in it."""
    run = MixedRun(client, client.create_sampling_client())
    by_step, usual_s = {planned.step: planned for planned in kills}, 0.1
    with ThreadPoolExecutor(max_workers=1) as pool:
        for step in range(steps):
            started = time.monotonic()
            turn = pool.submit(run.turn, step)
            planned = by_step.get(step)
            if planned is not None:
                time.sleep(planned.delay * usual_s)  # the moment of the kill, not a synchronisation
                kill(planned.part)
                run.landed += [] if turn.done() else [planned.part]
            turn.result()
            if planned is None:
                usual_s = time.monotonic() - started
    return run
