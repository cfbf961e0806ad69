"""Budgets: what the meter, the operator and the command line tell the ledger about limits of spending.

Amounts are integers: tokens of all types together, or pico-units of a currency (a count of tokens times
the price in micro-units per 1,000,000 tokens). All bodies are msgpack, as in `http`.

meter -> ledger:
    POST /v1/leases                               TakeLease -> Lease | Denied (both 200)
    POST /v1/leases/{id}/renew                    RenewLease -> Renewed
    POST /v1/leases/{id}/return                   ReturnLease -> Renewed
    GET  /v1/leases?session=                      -> list[OpenLease]: leases with a hold, of every attempt
    heartbeats renew too: Heartbeat.leases, HeartbeatAnswer.leases and .budgets
cli, operator -> ledger:
    PUT    /v1/budgets/{tenant}/{name}            PutBudget -> BudgetView (the same again changes nothing)
    GET    /v1/budgets/{tenant}/{name}            -> BudgetView
    DELETE /v1/budgets/{tenant}/{name}?source=    -> Empty: ended from now on; its facts stay
    GET    /v1/budgets?tenant=&scope_type=&scope=&ended=&after=&limit=   -> BudgetPage
    GET    /v1/suspense?tenant=&after=&limit=     -> SuspensePage
    POST   /v1/suspense/{lease}/{tenant}/{name}   Decide -> Empty

How a meter uses it
-------------------
- A lease is for one (session, access key). It holds an amount of every budget that applies to them. The
  meter takes an operation's worst case off each hold before it dispatches, and puts the difference to what
  was used back when the operation has ended. It asks for another lease when one does not suffice.
- What an operation may cost at worst: Counts of it; in tokens their total, in money the sum of counts times
  `Lease.prices`.
- Every UsageEvent names the lease that its operation was reserved under (`UsageEvent.lease`), also one that
  a later attempt posts. The ledger takes what it cost off the hold in the transaction that stores it.
- No operation is dispatched under a lease `expires_in_s` after *sending* the request that was answered so,
  by CLOCK_BOOTTIME. What was dispatched before may end at leisure: it is still held.
- A lease that is not needed any more, or whose time is up, is given back with ReturnLease, whose `keep` says
  how much of each hold may still be posted: what runs, what ended and is not acknowledged, what nobody
  claimed yet. An empty `keep` ends it. A newer attempt does so for the leases of an older one, once it
  has read the log: GET /v1/leases names them.
- A lease that nobody renews or returns is not freed: its rest is in suspense, which counts against the
  limit until its events arrive, it is returned after all, its session closed with everything acknowledged,
  or somebody decides.
"""

from typing import Final, Literal

import msgspec

from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.usage import Counts

ScopeType = Literal["tenant", "project", "session", "key"]
"""Whose usage a budget bounds: the tenant's, or that of one of its projects, sessions or access keys."""

Mode = Literal["hard", "soft"]
"""hard: nothing is started that could pass the limit. soft: it is only told that the limit is passed."""

Recurrence = Literal["once", "day", "week", "month"]
"""When it begins anew: never, or at midnight, on Monday, on the first of the month in its time zone."""

Source = Literal["manual", "resource"]
"""resource: written from a custom resource or manifest, and changed there alone."""

TOKENS: Final = "tokens"
"""The unit of a budget in tokens. Any other unit is an ISO 4217 code: pico-units of that currency."""


# --- leases: meter and ledger --------------------------------------------------------------------


class TakeLease(msgspec.Struct, frozen=True, kw_only=True):
    """Hold an amount of every budget that applies to operations of this session by this key.

    Sent again with the same (session, attempt, seq) it is the same lease, however often.
    """

    session: SessionUid
    attempt: int
    seq: int
    """Any number that this attempt used for no other lease, over restarts too: its clock in microseconds."""
    key: str
    """Id of the access key that submits the operations; "" = none is known."""
    model: str
    need: Counts
    """Worst case of the operation that waits."""
    least: Counts | None = None
    """A stream that may be cut: the smallest part that is worth starting. With it the answer may hold less
    than `need`, then all that is left. None = all of `need` or nothing."""
    want: Counts | None = None
    """How much is of use, as for the next hundred operations; None = the ledger chooses."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease holds of one budget."""

    budget: str
    """<tenant>/<name>"""
    period_start_us: int
    unit: str
    amount: int
    floor: int
    """What `need` costs at worst, in this unit. The amount is less only where `least` was given."""
    mode: Mode = "hard"


class Lease(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """Granted. Without holds no budget applies: nothing is bounded, and id is ""."""

    id: str
    """What UsageEvent.lease says; "" = it bounds nothing."""
    expires_in_s: float
    """From sending the request: dispatch nothing under it after that. Without holds: ask again then."""
    prices: dict[str, int]
    """Token type -> micro-units per 1,000,000 tokens to reserve with. Empty where no hold is in money."""
    holds: list[Hold]
    version: int
    """Of the tenant's budgets. A heartbeat's answer with a higher one: return the lease, take another."""


class Denied(msgspec.Struct, frozen=True, kw_only=True, tag="denied"):
    """A hard budget has not enough left. No error: ask again with every heartbeat, with a new `seq`."""

    budget: str
    unit: str
    limit: int
    posted: int
    """What was used: late usage included."""
    reserved: int
    """What leases hold, and what is in suspense."""
    wanted: int
    """In `unit`: `least` where given, else `need`."""
    resets_at_us: int | None
    """When the next period begins; None = never."""
    reason: Literal["exhausted", "unpriced", "currency"]
    """unpriced: the model has no price of a token type. currency: the session is priced in another one."""
    message: str
    """For people: which budget, how much is left, what to do."""
    version: int = 0


LeaseAnswer = Lease | Denied


class RenewLease(msgspec.Struct, frozen=True, kw_only=True):
    session: SessionUid
    attempt: int


class ReturnLease(msgspec.Struct, frozen=True, kw_only=True):
    """Give back all but `keep`. The same again changes nothing; a hold never grows.

    `attempt`: of the meter that says so; it may end leases of its own and of older attempts.
    """

    session: SessionUid
    attempt: int
    keep: dict[str, int]
    """Budget -> the most that events under this lease may still post. Left out = 0.

    All 0: nothing will be posted under it any more, and the lease ends."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True):
    """A lease after a renewal or return."""

    id: str
    expires_in_s: float
    """As in Lease; 0 = dispatch nothing more under it."""
    rest: dict[str, int]
    """Budget -> what is still held; empty = the lease has ended."""


class OpenLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that has not ended, as the ledger knows it."""

    id: str
    session: SessionUid
    attempt: int
    key: str
    taken_us: int
    expires_in_s: float
    suspended: bool
    """Its time ran out: what it holds is in suspense."""
    holds: list[Hold]
    rest: dict[str, int]


# --- budgets: command line, operator and ledger --------------------------------------------------


class PutBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Make a budget, or change its limit, mode and thresholds. The rest never changes.

    A budget counts what begins from its creation on.
    """

    scope_type: ScopeType
    scope: str
    """Project, session uid or key id; the tenant's own name for scope_type tenant."""
    unit: str
    """TOKENS, or an ISO 4217 code."""
    limit: int
    """In tokens or pico-units of the currency. 0 = nothing may be spent."""
    mode: Mode = "hard"
    recurrence: Recurrence = "once"
    time_zone: str = "UTC"
    """IANA name: where its days, weeks and months begin."""
    thresholds: tuple[int, ...] = (50, 80, 100)
    """Percent of the limit whose passing is told, once in each period."""
    source: Source = "manual"
    below_posted: Literal["refuse", "block"] = "refuse"
    """What becomes of a limit below what the running period has posted: a conflict, or it is set all the
    same, and nothing more may be spent."""


class PeriodView(msgspec.Struct, frozen=True, kw_only=True):
    """One period of a budget. Amounts in the budget's unit."""

    start_us: int
    end_us: int | None
    """None = it never ends."""
    limit: int
    posted: int
    """Usage that arrived under a hold."""
    late_posted: int
    """Usage and corrections that arrived without one. Below 0 where corrections were in favour."""
    reserved: int
    """Held by leases."""
    suspense: int
    """Held by leases whose time ran out."""
    available: int
    """What is left: never below 0."""
    thresholds_passed: tuple[int, ...] = ()


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """<tenant>/<name>"""
    tenant: TenantName
    name: str
    scope_type: ScopeType
    scope: str
    unit: str
    limit: int
    mode: Mode
    recurrence: Recurrence
    time_zone: str
    thresholds: tuple[int, ...]
    source: Source
    created_us: int
    ended: bool
    period: PeriodView
    """The running one."""
    unheard_of: Literal["", "tenant", "project", "session"] = ""
    """What it names that nobody has told the ledger of so far: its tenant, or else its scope. Perhaps it is to come,
    perhaps misspelt. Keys are told of by nobody."""


class BudgetPage(msgspec.Struct, frozen=True, kw_only=True):
    budgets: list[BudgetView]
    next_after: str | None


class SuspenseView(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease held of one budget when its time ran out, and that nobody has accounted for."""

    lease: str
    budget: str
    unit: str
    session: SessionUid
    attempt: int
    period_start_us: int
    amount: int
    """What is still in suspense."""
    since_us: int
    reason: Literal["expired", "unknown_usage"]


class SuspensePage(msgspec.Struct, frozen=True, kw_only=True):
    suspense: list[SuspenseView]
    next_after: str | None


class Decide(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded decision on what is in suspense; it is final.

    void: none of it was spent. post: count all of it as spent.
    """

    kind: Literal["void", "post"]
    reason: str
    by: str = ""
    """Who decided, as far as the caller knows."""
