"""What a session may still spend: its leases, and what its operations hold of them. Pure, no clock.

An operation takes its worst case off a lease before it is dispatched; when it has ended the difference to
what it used comes back; what it used stays held until the ledger has posted it. Times are CLOCK_BOOTTIME
in microseconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts.budgets import TOKENS, Hold, Lease
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_meter.records import Key

LOW_PART: Final = 4
"""Another lease is asked for when less than one part in so many is left."""

Amounts = dict[str, int]
"""Budget -> tokens, or pico-units of money."""


@dataclass(slots=True, kw_only=True)
class Purse:
    """One lease. Closed: nothing more is taken off it, and it is to be returned."""

    lease: Lease
    key: str
    expires_us: int
    used_us: int
    free: Amounts
    held: dict[Key, Amounts] = field(default_factory=dict)
    closed: bool = False
    told: Amounts | None = None
    """What the ledger was last told to keep; None = not returned yet."""

    def cost(self, counts: Counts) -> Amounts:
        return {hold.budget: cost(hold, self.lease.prices, counts) for hold in self.lease.holds}

    def affords(self, amounts: Amounts) -> bool:
        return all(amounts[hold.budget] <= self.free[hold.budget] for hold in self.binding)

    @property
    def binding(self) -> list[Hold]:
        """Soft budgets only tell."""
        return [hold for hold in self.lease.holds if hold.mode == "hard"]

    def usable(self, key: str, now_us: int) -> bool:
        return not self.closed and self.key == key and now_us < self.expires_us

    def sample_tokens(self, prompt: Counts, most: int) -> int:
        """How many sampled tokens it affords behind a prompt; -1 = not even the prompt."""
        for hold in self.binding:
            left = self.free[hold.budget] - cost(hold, self.lease.prices, prompt)
            each = cost(hold, self.lease.prices, Counts(sample=1))
            if left < 0:
                return -1
            most = min(most, left // each) if each else most
        return most

    def is_low(self) -> bool:
        return any(self.free[hold.budget] * LOW_PART < hold.amount for hold in self.binding)

    @property
    def has_rest(self) -> bool:
        return any(self.free[hold.budget] > 0 for hold in self.binding)

    @property
    def keep(self) -> Amounts:
        """The most that may still be posted under it."""
        kept: Amounts = {}
        for amounts in self.held.values():
            for budget, amount in amounts.items():
                if amount:
                    kept[budget] = kept.get(budget, 0) + amount
        return kept


@dataclass(slots=True, kw_only=True)
class Unbounded:
    """The ledger said that no budget applies."""

    until_us: int
    version: int


@dataclass(slots=True, kw_only=True)
class Wallet:
    """Of one session, for all access keys."""

    purses: dict[str, Purse] = field(default_factory=dict)
    unbounded: dict[str, Unbounded] = field(default_factory=dict)
    soft: dict[str, bool] = field(default_factory=dict)
    """Access key -> whether all budgets that were seen last only tell."""
    _of: dict[Key, str] = field(default_factory=dict)
    """Operation -> the lease that holds its amounts; "" = nothing bounds it."""

    # --- spending --------------------------------------------------------------------------------

    def reserve(self, operation: Key, key: str, worst: Counts, now_us: int) -> bool:
        """Take the worst case off a lease, all of it or nothing. Again is no harm."""
        if operation in self._of:
            return True
        if worst.total == 0 or self.is_unbounded(key, now_us):
            self._of[operation] = ""
            return True
        too_small: list[Purse] = []
        for purse in self._usable(key, now_us):
            amounts = purse.cost(worst)
            if purse.affords(amounts):
                for older in too_small:
                    older.closed = True
                self._hold(purse, operation, amounts, now_us)
                return True
            too_small.append(purse)
        return False

    def reserve_part(
        self, operation: Key, key: str, prompt: Counts, most: int, now_us: int
    ) -> int | None:
        """Take a prompt and as many of `most` sampled tokens as one lease affords. None = not even one."""
        if self.is_unbounded(key, now_us):
            self._of[operation] = ""
            return most
        afforded = {p.lease.id: p.sample_tokens(prompt, most) for p in self._usable(key, now_us)}
        best = max(afforded, key=lambda lease: afforded[lease], default=None)
        if best is None or afforded[best] < 1:
            return None
        purse = self.purses[best]
        self._hold(purse, operation, purse.cost(prompt + Counts(sample=afforded[best])), now_us)
        return afforded[best]

    def go_unreserved(self, operation: Key) -> None:
        """Only told budgets apply and the ledger is away: it is posted without a lease."""
        self._of[operation] = ""

    def _hold(self, purse: Purse, operation: Key, amounts: Amounts, now_us: int) -> None:
        for budget, amount in amounts.items():
            purse.free[budget] -= amount
        purse.held[operation] = amounts
        purse.used_us = now_us
        self._of[operation] = purse.lease.id

    def _usable(self, key: str, now_us: int) -> Iterator[Purse]:
        return (purse for purse in self.purses.values() if purse.usable(key, now_us))

    def is_unbounded(self, key: str, now_us: int) -> bool:
        known = self.unbounded.get(key)
        return known is not None and now_us < known.until_us

    def holds(self, operation: Key) -> bool:
        return operation in self._of

    def lease_of(self, operation: Key) -> str:
        return self._of.get(operation, "")

    def covers(self, operation: Key, used: Counts) -> bool:
        """Whether what was reserved for an operation is enough for what it uses."""
        purse = self._purse_of(operation)
        if purse is None:
            return True
        held, cost_now = purse.held[operation], purse.cost(used)
        return all(cost_now[hold.budget] <= held[hold.budget] for hold in purse.binding)

    # --- settling --------------------------------------------------------------------------------

    def settle(self, operation: Key, used: Counts) -> None:
        """It has ended: put back what it did not use. The rest is held until `posted` or `void`."""
        purse = self._purse_of(operation)
        if purse is None:
            return
        before, after = purse.held[operation], purse.cost(used)
        purse.held[operation] = after
        for budget, amount in before.items():
            purse.free[budget] += max(0, amount - after[budget])

    def void(self, operation: Key) -> None:
        """Nothing of it will ever be posted."""
        self.settle(operation, Counts())
        self.posted(operation)

    def posted(self, operation: Key) -> None:
        """The ledger has what it used, and has taken it off the lease."""
        purse = self._purse_of(operation)
        self._of.pop(operation, None)
        if purse is not None:
            del purse.held[operation]

    def _purse_of(self, operation: Key) -> Purse | None:
        purse = self.purses.get(self._of.get(operation, ""))
        return purse if purse is not None and operation in purse.held else None

    # --- leases ----------------------------------------------------------------------------------

    def add(self, lease: Lease, key: str, sent_us: int, now_us: int) -> None:
        """The answer to a request that was sent at `sent_us`."""
        until_us = sent_us + int(lease.expires_in_s * 1e6)
        self.unbounded.pop(key, None)
        self.soft[key] = all(hold.mode == "soft" for hold in lease.holds)
        if not lease.holds:
            self.unbounded[key] = Unbounded(until_us=until_us, version=lease.version)
        elif lease.id not in self.purses:
            free = {hold.budget: hold.amount for hold in lease.holds}
            self.purses[lease.id] = Purse(
                lease=lease, key=key, expires_us=until_us, used_us=now_us, free=free
            )

    def renew(self, lease: str, until_us: int) -> None:
        purse = self.purses.get(lease)
        if purse is not None:
            purse.expires_us = max(purse.expires_us, until_us)

    def supersede(self, version: int, until_us: int) -> None:
        """The ledger told the version of its budgets: what an older one said does not hold any more."""
        for key, known in list(self.unbounded.items()):
            if known.version < version:
                del self.unbounded[key]
            else:
                known.until_us = max(known.until_us, until_us)
        for purse in self.purses.values():
            purse.closed |= purse.lease.version < version

    def close(self, lease: str) -> None:
        if lease in self.purses:
            self.purses[lease].closed = True

    def close_rests(self, key: str) -> bool:
        """Close the leases of a key that have something left. True if there were any."""
        rests = [p for p in self.purses.values() if p.key == key and not p.closed and p.has_rest]
        for purse in rests:
            purse.closed = True
        return bool(rests)

    def close_idle(self, used_before_us: int, now_us: int) -> None:
        """Give back what nobody spends, and what may be spent no longer."""
        for purse in self.purses.values():
            running = purse.used_us >= used_before_us
            purse.closed |= not running or now_us >= purse.expires_us

    def close_all(self) -> None:
        self.unbounded.clear()
        for purse in self.purses.values():
            purse.closed = True

    def needs_more(self, key: str, now_us: int) -> bool:
        """Whether to ask for another lease before this one is used up."""
        usable = list(self._usable(key, now_us))
        return len(usable) == 1 and usable[0].is_low()

    def to_return(self) -> list[tuple[str, Amounts]]:
        """Closed leases with what to keep of each: told once when closed, and once when nothing is left."""
        returns = []
        for lease, purse in self.purses.items():
            keep = purse.keep
            if purse.closed and (purse.told is None or (purse.told and not keep)):
                returns.append((lease, keep))
        return returns

    def returned(self, lease: str, keep: Amounts) -> None:
        """The ledger was told to keep so much. What was posted meanwhile is told as well: a hold only falls."""
        purse = self.purses.get(lease)
        if purse is None:
            return  # Two returns were under way, and the other one was its last.
        purse.told = keep
        if not keep:
            del self.purses[lease]


def cost(hold: Hold, prices: dict[str, int], counts: Counts) -> int:
    """What counts cost of a hold, in its unit. A type without a price: the ledger grants no such hold."""
    if hold.unit == TOKENS:
        return counts.total
    return sum(getattr(counts, name) * prices.get(name, 0) for name in TOKEN_TYPES)
