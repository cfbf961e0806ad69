"""The batch of all samples: groups of every session and adapter join it between two decode steps.

`turn` does the next small piece, one block of a prompt or one step of all rows; the scheduler decides
which. Knows nothing of operations, metrics or sockets.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gristmill_contracts.operations import SampleResult
from gristmill_worker import scheduler
from gristmill_worker.base_model import BaseModel, Cache, Part
from gristmill_worker.drawing import choose, score
from gristmill_worker.groups import Group, Row, ending, result_of
from gristmill_worker.prefixes import Prefixes
from gristmill_worker.scheduler import Capacity, Need
from gristmill_worker.scoring import not_finite, score_prompt

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Cohort:
    """Rows of a group that began together: equally long, so that they share a cache."""

    group: Group
    cache: Cache
    rows: list[Row]
    newest: Tensor
    """(b,) the token that each got last."""


Holds = Callable[[Sequence[int], Sequence[int]], bool]
"""Whether whole prompts of these lengths, for adapters of these ranks, may run in one pass."""


class Sampler:
    """`waiting` by session, oldest first; `first` is the group that begins next, or goes on beginning."""

    def __init__(
        self, base: BaseModel, capacity: Capacity, prefixes: Prefixes,
        clock: Callable[[], float] = time.monotonic, holds: Holds = lambda _prompts, _ranks: True,
    ) -> None:  # fmt: skip
        self.base = base
        self.capacity = capacity
        self.prefixes = prefixes
        self.clock = clock
        self.holds = holds
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

    @torch.inference_mode()
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
        """One block of a prompt, several short prompts, or one decode step. Errors never end the engine."""
        first = self._first()
        fit = 0 if first is None else scheduler.rows_to_begin(_need(first), self._capacity())
        rows = sum(len(cohort.rows) for cohort in self.cohorts)
        if scheduler.prefills_now(
            waits=fit > 0, rows=rows, blocks_since_step=self.blocks_since_step
        ):
            assert first is not None
            together = self._together(first, fit)
            if len(together) > 1:
                self._begin_together(together)
                return
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
                self.first = self._next(uid)
        return self.first

    def _next(self, uid: str) -> Group:
        """Take a session's oldest group out of the line."""
        queue = self.waiting[uid]
        group, self.last_session = queue.popleft(), uid
        if not queue:
            del self.waiting[uid]
        return group

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
            _charge(groups, shares, self.clock() - began)
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

    def _together(self, first: Group, fit: int) -> list[Group]:
        """The first group, and those behind it in line whose whole prompts may run in the same pass."""
        found = [first]
        if not self._joins(first) or fit < len(first.rows):
            return found
        held, tokens_max = self._capacity(), self._tokens_together()
        while (uid := scheduler.next_session(self.waiting, self.last_session)) is not None:
            held = scheduler.with_begun(held, _need(found[-1]))
            wanted = [*found, self.waiting[uid][0]]
            if (
                not self._joins(wanted[-1])
                or scheduler.rows_to_begin(_need(wanted[-1]), held) < len(wanted[-1].rows)
                or sum(len(group.prompt) for group in wanted) > tokens_max
                or not self._holds(wanted)
            ):
                break
            found.append(self._next(uid))
        return found

    def _joins(self, group: Group) -> bool:
        """Whether its prompt is one block that has not run, and nothing but its last token is asked about."""
        base = self.base
        fresh = group.cache is None and not group.alone and not group.scores_prompt
        return base.joins and fresh and (base.block is None or len(group.prompt) <= base.block)

    def _tokens_together(self) -> int:
        return scheduler.tokens_together(
            rows=sum(len(cohort.rows) for cohort in self.cohorts),
            blocks_since_step=self.blocks_since_step,
            block=self.base.block or self.capacity.tokens_max,
            budget=self.capacity.tokens_max,
        )

    def _holds(self, groups: Sequence[Group]) -> bool:
        ranks = {id(each.adapter): each.adapter.rank for each in groups if each.adapter is not None}
        return self.holds([len(group.prompt) for group in groups], list(ranks.values()))

    def _begin_together(self, groups: list[Group]) -> None:
        """Run whole prompts in one pass, then begin all rows of each. Where the pass fails, each runs alone."""
        tokens = [len(group.prompt) for group in groups]
        self.blocks_since_step += math.ceil(sum(tokens) / (self.base.block or sum(tokens)))
        began = self.clock()
        try:
            self._prefill_together(groups)
        except Exception as error:  # noqa: BLE001 - as out of memory: each may fit on its own
            log.warning("prompts_run_apart", extra={"prompts": len(groups), "error": repr(error)})
            self._put_back(groups)
            return
        finally:
            _charge(groups, tokens, self.clock() - began)
        for group in groups:
            self._guarded([group], partial(self._begin, group, len(group.rows)))

    def _prefill_together(self, groups: Sequence[Group]) -> None:
        base = self.base
        prompts = [
            Part(
                adapter=group.adapter,
                tokens=torch.tensor(group.prompt, device=base.device),
                cache=base.new_cache(len(group.prompt)),
            )
            for group in groups
        ]
        logits = base.logits(base.prefill_each(prompts))
        for group, prompt, own in zip(groups, prompts, torch.split(logits, 1), strict=True):
            group.cache, group.ran, group.logits = prompt.cache, len(group.prompt), own

    def _put_back(self, groups: Sequence[Group]) -> None:
        """In line again as they were; the first one stays the first."""
        for group in groups:
            group.alone = True
        for group in reversed(groups[1:]):
            self.waiting.setdefault(group.uid, deque()).appendleft(group)
        self.last_session = groups[0].uid

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
            group.prompt_logprobs = score_prompt(self.base, states, tokens, topk, group.op.adapter)
            group.hidden = []

    def _begin(self, group: Group, fit: int) -> None:
        assert group.cache is not None
        assert group.logits is not None
        rows = group.rows[group.begun : group.begun + fit]
        group.begun += len(rows)
        last = group.begun == len(group.rows)
        cache = self.base.begin(group.cache if last else group.cache.copy(), len(rows))
        if last:
            self.first = None if self.first is group else self.first
            group.cache = cache
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
        """Give each row its next token; those that ended, and groups that nobody reads, leave.

        So does, with an error, a group whose numbers are not finite: those beside it go on.
        """
        asked = [(cohort.group, row) for cohort in cohorts for row in cohort.rows]
        ids = choose(logits, asked)
        chosen = score(logits, ids, asked)
        astray: set[int] = set()
        for (group, row), token, logprob in zip(asked, ids.tolist(), chosen, strict=True):
            if not math.isfinite(logprob):
                astray.add(id(group))
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.ended = ending(self.base, group, row)
        start = 0
        for cohort in cohorts:
            newest = ids[start : start + len(cohort.rows)]
            start += len(cohort.rows)
            if id(cohort.group) in astray:
                self._finish(cohort.group, not_finite(cohort.group.op.adapter))
            else:
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


def _charge(groups: Sequence[Group], shares: Sequence[int], seconds: float) -> None:
    for group, share in zip(groups, shares, strict=True):
        group.seconds += seconds * share / sum(shares)


def _need(group: Group) -> Need:
    return Need(
        rows=len(group.rows) - group.begun,
        prompt=0 if group.cache is not None else len(group.prompt),
        each=group.length_max,
        adapter=group.owner.adapter,
    )
