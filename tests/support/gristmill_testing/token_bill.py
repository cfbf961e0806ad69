"""A client that keeps its own count of tokens, from what it sent and what it got back alone.

It never reads a usage field: those are what it is compared with.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gristmill_testing.raw_wire import (
    RawSession,
    compute_logprobs,
    datum,
    forward,
    forward_backward,
    optimizer_step,
    refusal,
    sample,
)

TOKEN_IDS = range(5, 60)


@dataclass(slots=True)
class Bill:
    """Tokens in the four disjoint types, as the client counts them."""

    prefill: int = 0
    cached_prefill: int = 0
    sample: int = 0
    train: int = 0

    def as_dict(self) -> dict[str, int]:
        return {
            "prefill": self.prefill,
            "cached_prefill": self.cached_prefill,
            "sample": self.sample,
            "train": self.train,
        }


@dataclass(slots=True)
class MixedClient:
    """Runs operations drawn from a seeded generator on one session, and keeps their bill."""

    session: RawSession
    random: random.Random
    chat_tokens: Callable[[list[dict[str, str]]], int]
    """Tokens of a rendered chat, by the model's own tokenizer on the client's side."""
    bill: Bill = field(default_factory=Bill)
    ran: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    packages: dict[str, str] = field(default_factory=dict)
    has_gradient: bool = False

    def run(self, operations: int) -> None:
        """Every kind at least twice, the rest at random."""
        kinds = [self.passes] * 3 + [self.scores, self.steps, self.samples, self.reads, self.chats]
        rare = [
            self.saves_weights,
            self.saves_state,
            self.loads_state,
            self.binds,
            self.refused,
            self.fails,
        ]
        plan = [*kinds * 2, *rare * 2]
        plan += self.random.choices([*kinds * 3, *rare], k=operations - len(plan))
        self.random.shuffle(plan)
        for act in [self.saves_state, self.saves_weights, *plan][:operations]:
            act()
            self.ran[act.__name__] += 1

    # --- training ----------------------------------------------------------------------------

    def passes(self) -> None:
        rows = self._rows()
        self._trained(
            self.session.run(forward_backward(*map(datum, rows))), rows, "forwardBackward"
        )
        self.has_gradient = True

    def scores(self) -> None:
        rows = self._rows()
        self._trained(self.session.run(forward(*map(datum, rows))), rows, "forward")

    def steps(self) -> None:
        if not self.has_gradient:
            self.passes()
        assert self.session.run(optimizer_step())["status"] == "Completed"
        self.has_gradient = False

    def saves_weights(self) -> None:
        answer = self.session.run({"saveWeights": {}})
        self.packages["weights"] = answer["operationResult"]["saveWeights"]["modelPackageArn"]

    def saves_state(self) -> None:
        answer = self.session.run({"saveState": {}})
        self.packages["state"] = answer["operationResult"]["saveState"]["modelPackageArn"]

    def loads_state(self) -> None:
        config = {
            "modelPackageArn": self.packages["state"],
            "loadOptimizer": self.random.random() < 0.5,
        }
        assert self.session.run({"loadState": config})["status"] == "Completed"
        self._consume_gradients()

    def refused(self) -> None:
        """Refused at submit: no token may be counted, and its number is closed."""
        refusal(lambda: self.session.submit(forward_backward(datum([7, 10**7]))))
        assert self.session.run(optimizer_step())["status"] == "Skipped"
        self._consume_gradients()

    def fails(self) -> None:
        """Accepted, and fails when it runs: no token may be counted."""
        if self.has_gradient:
            self.steps()
        assert self.session.run(optimizer_step())["status"] in {"Failed", "Skipped"}

    # --- sampling ----------------------------------------------------------------------------

    def samples(self) -> None:
        prompt, count = self._row(), self.random.randint(1, 4)
        config = sample(
            prompt,
            samples=count,
            max_tokens=self.random.randint(1, 12),
            seed=self.random.randint(0, 999),
        )
        if self.random.random() < 0.3:
            config["sample"]["includePromptLogprobs"] = True
        sequences = self.session.run_sampling(config)["operationResult"]["sample"]["sequences"]
        decoded = [len(sequence["tokens"]) for sequence in sequences]
        self.bill.prefill += len(prompt)
        self.bill.cached_prefill += len(prompt) * (count - 1)
        self.bill.sample += sum(decoded)
        usage = [
            (sequence["tokenUsage"]["prefill"], sequence["tokenUsage"]["decode"])
            for sequence in sequences
        ]
        self._expect(
            "sample", usage, list(zip([len(prompt)] + [0] * (count - 1), decoded, strict=True))
        )

    def reads(self) -> None:
        prompt = self._row()
        answer = self.session.run_sampling(compute_logprobs(prompt))
        assert len(answer["operationResult"]["computeLogprobs"]["logprobs"]) == len(prompt)
        self.bill.prefill += len(prompt)

    def binds(self) -> None:
        config = {"loadWeightsForSampling": {"modelPackageArn": self.packages["weights"]}}
        assert self.session.run_sampling(config)["status"] == "Completed"

    def chats(self) -> None:
        messages = [
            {"role": "user", "content": " ".join("abc" for _ in range(self.random.randint(1, 5)))}
        ]
        limit = self.random.randint(1, 12)
        body = {"messages": messages, "max_tokens": limit, "seed": 1, "logprobs": True}
        answer = self.session.chat(body)
        prompt = self.chat_tokens(messages)
        # The answer's text hides how many tokens it has; each has a log-probability.
        sampled = len(answer["choices"][0]["logprobs"]["content"])
        self.bill.prefill += prompt
        self.bill.sample += sampled
        usage = answer["usage"]
        self._expect(
            "chat", (usage["prompt_tokens"], usage["completion_tokens"]), (prompt, sampled)
        )

    # --- shared ------------------------------------------------------------------------------

    def _consume_gradients(self) -> None:
        """Whatever was left un-stepped before, or came with a loaded state, is stepped away."""
        self.passes()
        self.steps()

    def _row(self) -> list[int]:
        return self.random.choices(TOKEN_IDS, k=self.random.randint(2, 24))

    def _rows(self) -> list[list[int]]:
        return [self._row() for _ in range(self.random.randint(1, 4))]

    def _trained(self, answer: dict[str, Any], rows: list[list[int]], key: str) -> None:
        count = sum(len(row) for row in rows)
        assert answer["status"] == "Completed", answer
        self.bill.train += count
        self._expect(key, answer["tokenUsage"]["trainingTokens"], count)
        self._expect(key, answer["operationResult"][key]["tokenUsage"]["trainingTokens"], count)

    def _expect(self, what: str, said: object, counted: object) -> None:
        if said != counted:
            self.mismatches.append(f"{what}: the wire says {said}, the client counted {counted}")
