"""The batch of all samples: groups of every session and adapter join it between two decode steps.

`turn` does the next small piece, one block of a prompt or one step of all rows; the scheduler decides
which. Knows nothing of operations, metrics or sockets.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gristmill_contracts.operations import SampleResult
from gristmill_worker import scheduler
from gristmill_worker.base_model import BaseModel, Cache, Part
from gristmill_worker.chance import uniform
from gristmill_worker.choose import distribution, draw, pick
from gristmill_worker.groups import Group, Row, ending, result_of
from gristmill_worker.prefixes import Prefixes
from gristmill_worker.scheduler import Capacity, Need
from gristmill_worker.scoring import score_prompt


@dataclass(slots=True, kw_only=True)
class Cohort:
    """Rows of a group that began together: equally long, so that they share a cache."""

    group: Group
    cache: Cache
    rows: list[Row]
    newest: Tensor
    """(b,) the token that each got last."""


class Sampler:
    """`waiting` by session, oldest first; `first` is the group that begins next, or goes on beginning."""

    def __init__(
        self, base: BaseModel, capacity: Capacity, prefixes: Prefixes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.base = base
        self.capacity = capacity
        self.prefixes = prefixes
        self.clock = clock
        self.waiting: dict[str, deque[Group]] = {}
        self.first: Group | None = None
        self.cohorts: list[Cohort] = []
        self.blocks_since_step = 0
        self.last_session = ""
        self.torn = False
        """Whether a step has moved the caches on, so that it cannot be run again."""

    @property
    def busy(self) -> bool:
        return bool(self.cohorts or self.waiting) or self.first is not None

    @property
    def count(self) -> int:
        """Groups that wait."""
        return sum(map(len, list(self.waiting.values())))

    def add(self, group: Group) -> None:
        self.waiting.setdefault(group.uid, deque()).append(group)

    def drop(self, uid: str | None, error: Exception) -> None:
        """End the groups of a session (None: all) with this error."""
        for name in [name for name in self.waiting if uid in (None, name)]:
            for group in self.waiting.pop(name):
                self._finish(group, error)
        for group in self._running():
            if uid in (None, group.uid):
                self._finish(group, error)

    def _running(self) -> list[Group]:
        """Oldest first, each once."""
        found = [cohort.group for cohort in self.cohorts]
        found += [self.first] if self.first is not None else []
        return list({id(group): group for group in found}.values())

    # --- one turn --------------------------------------------------------------------------------

    @torch.inference_mode()
    def turn(self) -> None:
        """One block of a prompt, or one decode step. Errors end groups, never the engine."""
        first = self._first()
        fit = 0 if first is None else scheduler.rows_to_begin(_need(first), self._capacity())
        rows = sum(len(cohort.rows) for cohort in self.cohorts)
        if scheduler.prefills_now(
            waits=fit > 0, rows=rows, blocks_since_step=self.blocks_since_step
        ):
            assert first is not None
            self.blocks_since_step += 1
            self._guarded([first], lambda: self._advance(first, fit))
        elif self.cohorts:
            self.blocks_since_step = 0
            stepping = {id(cohort.group): cohort.group for cohort in self.cohorts}
            self._guarded(list(stepping.values()), self._step)

    def _first(self) -> Group | None:
        if self.first is None:
            uid = scheduler.next_session(self.waiting, self.last_session)
            if uid is not None:
                queue = self.waiting[uid]
                self.first, self.last_session = queue.popleft(), uid
                if not queue:
                    del self.waiting[uid]
        return self.first

    def _capacity(self) -> Capacity:
        """What is held now."""
        running = self._running()
        grow = sum(len(cohort.rows) * cohort.group.length_max for cohort in self.cohorts)
        prompts = sum(len(group.prompt) for group in running if group.cache is not None)
        return replace(
            self.capacity,
            rows=sum(len(cohort.rows) for cohort in self.cohorts),
            positions=prompts + grow,
            adapters=frozenset(
                group.owner.adapter
                for group in running
                if group.owner.adapter and (group.cache is not None or group.begun)
            ),
        )

    def _guarded(self, groups: Sequence[Group], work: Callable[[], None]) -> None:
        """Seconds are shared by rows. What fails ends the newest group where the others can go on."""
        began, self.torn = self.clock(), False
        shares = [max(1, sum(len(c.rows) for c in self.cohorts if c.group is g)) for g in groups]
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            failed = groups[-1:] if self.base.retries and not self.torn else groups
            for group in failed:
                self._finish(group, error)
            return
        finally:
            spent = self.clock() - began
            for group, share in zip(groups, shares, strict=True):
                group.seconds += spent * share / sum(shares)
        for group in groups:
            if group.ended and not group.over:
                self._finish(group, None)

    def _finish(self, group: Group, error: Exception | None) -> None:
        """Take the group out and give its answer, once."""
        if group.over:
            return
        group.over = True
        for cohort in [each for each in self.cohorts if each.group is group]:
            cohort.cache.release()
            self.cohorts.remove(cohort)
        if self.first is group:
            self.first = None
        answer: SampleResult | Exception
        try:
            answer = error or result_of(self.base, group)
        except Exception as raised:  # noqa: BLE001 - whoever waits gets it
            answer = raised
        group.done(answer, group.seconds)

    # --- prompts ---------------------------------------------------------------------------------

    def _advance(self, group: Group, fit: int) -> None:
        """Run the next block of the prompt; behind the last one, begin as many rows as fit."""
        if group.logits is None:
            self._prefill(group)
        if group.logits is not None:
            self._begin(group, fit)

    def _prefill(self, group: Group) -> None:
        base, prompt = self.base, group.prompt
        if group.cache is None:
            group.cache = base.new_cache(len(prompt))
            if not group.scores_prompt:  # which needs the hidden states of every token
                group.keys = self.prefixes.keys(group.owner, prompt)
                group.ran = group.cached = self.prefixes.fill(group.keys, group.cache)  # type: ignore[arg-type]
        end = len(prompt) if base.block is None else min(len(prompt), group.ran + base.block)
        tokens = torch.tensor(prompt[group.ran : end], device=base.device)
        with base.selected(group.adapter):
            hidden = base.prefill(tokens, group.cache)
        group.ran = end
        if group.keys:
            self.prefixes.keep(group.keys, group.cache)  # type: ignore[arg-type]
        if group.scores_prompt:
            group.hidden.append(hidden)
        if end == len(prompt):
            group.logits = base.logits(hidden[-1:])
            self._score(group)

    def _score(self, group: Group) -> None:
        if group.scores_prompt:
            tokens = torch.tensor(group.prompt, device=self.base.device)
            states, topk = torch.cat(group.hidden), group.op.topk_prompt_logprobs
            group.prompt_logprobs = score_prompt(self.base, states, tokens, topk)
            group.hidden = []

    def _begin(self, group: Group, fit: int) -> None:
        assert group.cache is not None
        assert group.logits is not None
        rows = group.rows[group.begun : group.begun + fit]
        group.begun += len(rows)
        last = group.begun == len(group.rows)
        cache = self.base.begin(group.cache if last else group.cache.copy(), len(rows))
        if last:
            self.first, group.cache = None, cache
        newest = torch.zeros(len(rows), dtype=torch.int64, device=self.base.device)
        cohort = Cohort(group=group, cache=cache, rows=rows, newest=newest)
        self.cohorts.append(cohort)
        self._extend([cohort], group.logits.expand(len(rows), -1))

    # --- steps -----------------------------------------------------------------------------------

    def _step(self) -> None:
        parts = [
            Part(adapter=cohort.group.adapter, tokens=cohort.newest, cache=cohort.cache)
            for cohort in self.cohorts
        ]
        hidden = self.base.decode(parts)
        self.torn = True
        self._extend(list(self.cohorts), self.base.logits(hidden))

    def _extend(self, cohorts: Sequence[Cohort], logits: Tensor) -> None:
        """Give each row its next token; those that ended, and groups that nobody reads, leave."""
        asked = [(cohort.group, row) for cohort in cohorts for row in cohort.rows]
        ids = choose(logits, asked)
        chosen = score(logits, ids, asked)
        for (group, row), token, logprob in zip(asked, ids.tolist(), chosen, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.ended = ending(self.base, group, row)
        start = 0
        for cohort in cohorts:
            newest = ids[start : start + len(cohort.rows)]
            start += len(cohort.rows)
            self._keep_going(cohort, newest)

    def _keep_going(self, cohort: Cohort, newest: Tensor) -> None:
        group = cohort.group
        try:
            read = group.watch is None or group.watch(len(group.prompt), group.cached, cohort.rows)
        except Exception as error:  # noqa: BLE001 - this reader's alone
            self._finish(group, error)
            return
        kept = [index for index, row in enumerate(cohort.rows) if row.ended is None]
        if len(kept) < len(cohort.rows):
            at = torch.tensor(kept, dtype=torch.int64, device=self.base.device)
            cohort.cache.select(at)
            newest = newest[at]
            cohort.rows = [cohort.rows[index] for index in kept]
        cohort.newest = newest
        if not kept:
            cohort.cache.release()
            self.cohorts.remove(cohort)
        if not read:
            self._finish(group, None)


def _need(group: Group) -> Need:
    return Need(
        rows=len(group.rows) - group.begun,
        prompt=0 if group.cache is not None else len(group.prompt),
        each=group.length_max,
        adapter=group.owner.adapter,
    )


def choose(logits: Tensor, asked: Sequence[tuple[Group, Row]]) -> Tensor:
    """(B, V) -> (B,) ids. Rows that are drawn alike are drawn together."""
    alike: dict[tuple[float, int, float], list[int]] = {}
    for index, (group, _) in enumerate(asked):
        params = group.op.params
        alike.setdefault((params.temperature, params.top_k, params.top_p), []).append(index)
    if len(alike) == 1:
        return _choose(logits, asked)
    ids = torch.empty(len(asked), dtype=torch.int64, device=logits.device)
    for members in alike.values():
        at = torch.tensor(members, device=logits.device)
        ids[at] = _choose(logits[at], [asked[index] for index in members])
    return ids


def _choose(logits: Tensor, asked: Sequence[tuple[Group, Row]]) -> Tensor:
    params = asked[0][0].op.params
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    numbers = [uniform(g.op.params.seed, row.sample, len(row.tokens)) for g, row in asked]
    draws = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    if params.top_k == -1 and params.top_p >= 1.0:
        return draw(logits, params.temperature, draws)
    return pick(distribution(logits, params.temperature, params.top_k, params.top_p), draws)


def score(logits: Tensor, ids: Tensor, asked: Sequence[tuple[Group, Row]]) -> list[float]:
    """Log-probabilities of the chosen tokens: the model's own, or those of what they were drawn from."""
    raw = logits.gather(1, ids[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
    found: list[float] = raw.tolist()
    for index, (group, _) in enumerate(asked):
        params = group.op.params
        # The greedy choice has no distribution: its own log-probability says more than 0.
        if params.logprobs == "processed" and params.temperature > 0:
            weights = distribution(
                logits[index : index + 1], params.temperature, params.top_k, params.top_p
            )
            found[index] = float(weights[0, ids[index]].log())
    return found
