"""One budget in memory, with the semantics of leases that a meter relies on. No budget until `limit` is set."""

from dataclasses import dataclass, field

from gristmill_contracts.budgets import (
    TOKENS,
    Denied,
    Hold,
    Lease,
    LeaseAnswer,
    Mode,
    OpenLease,
    ReturnLease,
    TakeLease,
)
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.usage import TOKEN_TYPES, Counts, UsageEvent

BUDGET = "acme/tenant"


@dataclass(slots=True)
class Held:
    request: TakeLease
    lease: Lease
    rest: int


@dataclass(slots=True)
class FakeBudgets:
    """`share`: how many parts a lease may take of what is left, as one in so many."""

    limit: int | None = None
    unit: str = TOKENS
    mode: Mode = "hard"
    prices: dict[str, int] = field(default_factory=dict)
    share: int = 1
    expires_in_s: float = 300.0
    version: int = 0
    posted: int = 0
    late: int = 0
    """Posted without a lease."""
    held: dict[str, Held] = field(default_factory=dict)
    granted: dict[tuple[str, int, int], Lease] = field(default_factory=dict)
    reserved_max: int = 0
    """Most that was ever posted and held at once."""

    def raise_to(self, limit: int | None) -> None:
        self.limit = limit
        self.version += 1

    def take(self, request: TakeLease) -> LeaseAnswer:
        known = self.granted.get((request.session, request.attempt, request.seq))
        if known is not None:
            return known
        if self.limit is None:
            return Lease(id="", expires_in_s=60.0, prices={}, holds=[], version=self.version)
        need, left = self.cost(request.need), self.left
        least = need if request.least is None else self.cost(request.least)
        if least > left and self.mode == "hard":
            return self._denied(least)
        want = need if request.want is None else self.cost(request.want)
        amount = min(max(need, min(want, left // self.share)), max(left, 0))
        return self._grant(request, amount if self.mode == "hard" else need, need)

    def _grant(self, request: TakeLease, amount: int, need: int) -> Lease:
        hold = Hold(
            budget=BUDGET, period_start_us=0, unit=self.unit, amount=amount, floor=need,
            mode=self.mode,
        )  # fmt: skip
        lease = Lease(
            id=f"lease-{len(self.granted) + 1}",
            expires_in_s=self.expires_in_s,
            prices=self.prices,
            holds=[hold],
            version=self.version,
        )
        self.granted[request.session, request.attempt, request.seq] = lease
        self.held[lease.id] = Held(request=request, lease=lease, rest=amount)
        self.reserved_max = max(self.reserved_max, self.posted + self.late + self.reserved)
        return lease

    def _denied(self, wanted: int) -> Denied:
        return Denied(
            budget=BUDGET,
            unit=self.unit,
            limit=self.limit or 0,
            posted=self.posted + self.late,
            reserved=self.reserved,
            wanted=wanted,
            resets_at_us=None,
            reason="exhausted",
            message=f"budget {BUDGET} has {self.left} left; raise it",
            version=self.version,
        )

    def give_back(self, lease: str, request: ReturnLease) -> None:
        if lease not in self.held:
            if all(known.id != lease for known in self.granted.values()):
                raise NotFoundError(f"there is no lease {lease}")
            return
        held = self.held[lease]
        held.rest = min(held.rest, request.keep.get(BUDGET, 0))
        if not held.rest:
            del self.held[lease]

    def renew(self, leases: list[str]) -> dict[str, float]:
        return {lease: self.expires_in_s for lease in leases if lease in self.held}

    def open_leases(self, session: SessionUid) -> list[OpenLease]:
        return [
            OpenLease(
                id=lease,
                session=session,
                attempt=held.request.attempt,
                key=held.request.key,
                taken_us=0,
                expires_in_s=self.expires_in_s,
                suspended=False,
                holds=held.lease.holds,
                rest={BUDGET: held.rest},
            )
            for lease, held in self.held.items()
            if held.request.session == session
        ]

    def post(self, event: UsageEvent) -> None:
        if self.limit is None or event.kind != "usage" or event.counts is None:
            return
        amount = self.cost(event.counts)
        held = self.held.get(event.lease)
        within = min(amount, held.rest) if held is not None else 0
        if held is not None:
            held.rest -= within
        self.posted += within
        self.late += amount - within

    def cost(self, counts: Counts) -> int:
        if self.unit == TOKENS:
            return counts.total
        return sum(getattr(counts, name) * self.prices[name] for name in TOKEN_TYPES)

    @property
    def reserved(self) -> int:
        return sum(held.rest for held in self.held.values())

    @property
    def left(self) -> int:
        return (self.limit or 0) - self.posted - self.late - self.reserved
