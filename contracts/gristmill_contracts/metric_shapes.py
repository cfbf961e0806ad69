"""What each process tells Prometheus: every metric with its kind and labels. A test scrapes and compares.

Tenants, models and budgets come from configuration and are capped (`label_values`); all other labels have
closed sets of values. None is a session, a user or a request.
"""

from typing import Final, Literal, NamedTuple

from gristmill_contracts import metrics as names

Part = Literal["operator", "gateway", "meter", "ledger", "worker"]


class Shape(NamedTuple):
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...] = ()


def _counter(*labels: str) -> Shape:
    return Shape("counter", labels)


def _gauge(*labels: str) -> Shape:
    return Shape("gauge", labels)


def _histogram(*labels: str) -> Shape:
    return Shape("histogram", labels)


OPERATOR: Final = {
    names.OPERATOR_RECONCILES: _counter("kind", "result"),
    names.OPERATOR_RECONCILE_SECONDS: _histogram("kind"),
    names.OPERATOR_QUEUE_DEPTH: _gauge(),
    names.OPERATOR_QUEUE_AGE_SECONDS: _gauge(),
    names.OPERATOR_QUEUE_WAIT_SECONDS: _histogram(),
    names.OPERATOR_IN_FLIGHT: _gauge(),
    names.OPERATOR_LEADER: _gauge(),
    names.OPERATOR_API_REQUESTS: _counter("verb", "code"),
    names.OPERATOR_API_REQUEST_SECONDS: _histogram("verb"),
    names.OPERATOR_STATUS_WRITES: _counter("informative"),
    names.OPERATOR_WATCH_EVENTS: _counter("resource"),
    names.OPERATOR_WATCH_AGE_SECONDS: _gauge("resource"),
    names.OPERATOR_WATCH_MISSED: _counter("resource"),
    names.OPERATOR_WATCH_RESTARTS: _counter(),
    names.OPERATOR_EVENTS_DROPPED: _counter(),
    names.OPERATOR_LOOP_LAG_SECONDS: _gauge(),
    names.OPERATOR_CACHED_OBJECTS: _gauge("resource"),
    names.OPERATOR_SESSIONS: _gauge("state"),
    names.OPERATOR_START_SECONDS: _histogram(),
    names.OPERATOR_FINALIZER_AGE_SECONDS: _gauge(),
    names.OPERATOR_FLUSH_ABANDONED: _counter(),
    names.OPERATOR_LEDGER_ANSWERS: _gauge(),
}
GATEWAY: Final = {
    names.GATEWAY_REQUESTS: _counter("operation", "status"),
    names.GATEWAY_REQUEST_SECONDS: _histogram("operation"),
    names.GATEWAY_OPEN_REQUESTS: _gauge(),
    names.GATEWAY_REFUSED_NUMBERS: _counter(),
    names.GATEWAY_HELD_BODY_BYTES: _gauge(),
    names.GATEWAY_HELD_SUBMITS: _gauge(),
    names.GATEWAY_WATCHES_AWAY: _gauge(),
}
METER: Final = {
    names.METER_TOKENS: _counter("tenant", "model", "token_type"),
    names.METER_OPERATIONS: _counter("tenant", "op", "outcome"),
    names.METER_REPLAYED_OPERATIONS: _counter(),
    names.LABEL_OVERFLOW: _counter("label"),
    names.SPOOL_UNACKED_EVENTS: _gauge(),
    names.SPOOL_OLDEST_UNACKED_SECONDS: _gauge(),
    names.SPOOL_BYTES: _gauge(),
    names.SPOOL_VOLUME_FREE_BYTES: _gauge(),
}
LEDGER: Final = {
    names.RECON_DIFF_TOKENS: _gauge("pair", "kind"),
    names.RECON_DIFFS: _gauge("pair", "kind"),
    names.RECON_OLDEST_DIFF_AGE_SECONDS: _gauge(),
    names.RECON_RUN_AGE_SECONDS: _gauge(),
    names.LEDGER_EVENTS: _counter("result"),
    names.LEDGER_QUARANTINED_EVENTS: _counter(),
    names.LEDGER_UNPRICED_EVENTS: _counter(),
    names.LEDGER_UNRATED_EVENTS: _gauge(),
    # Falls where usage is rated again for less, so it is no counter.
    names.RATED_COST: _gauge("tenant", "currency"),
    names.LEDGER_LOG_LOST: _counter(),
    names.LEDGER_USAGE_GAPS: _counter(),
    names.LEDGER_INBOX_OPERATIONS: _counter("result"),
    names.LEDGER_ARCHIVED_OPERATIONS: _counter(),
    names.LEDGER_COMMIT_SECONDS: _histogram(),
    names.LEDGER_HEADS_SIGNED: _counter(),
    names.CHAIN_VERIFIED_SEQ: _gauge(),
    names.CHAIN_UNVERIFIED_ROWS: _gauge(),
    names.CHAIN_FAILURES: _counter(),
    names.LEDGER_PRODUCERS: _gauge(),
    names.LEDGER_HEARTBEAT_AGE_SECONDS: _gauge(),
    names.BUDGET_LIMIT: _gauge("tenant", "budget", "unit"),
    names.BUDGET_POSTED: _gauge("tenant", "budget", "unit"),
    names.BUDGET_RESERVED: _gauge("tenant", "budget", "unit"),
    names.BUDGET_DENIALS: _counter("tenant", "reason"),
    names.BUDGET_THRESHOLDS_PASSED: _counter("percent"),
    names.BUDGET_UNRESERVED_EVENTS: _counter(),
    names.RESERVATIONS_EXPIRED: _counter("resolution"),
    names.LABEL_OVERFLOW: _counter("label"),
}
WORKER: Final = {
    names.WORKER_OPERATIONS: _counter("kind", "outcome", "replay"),
    names.WORKER_TOKENS: _counter("token_type", "replay"),
    names.WORKER_OPERATION_SECONDS: _histogram("kind"),
    names.WORKER_SESSIONS: _gauge(),
    names.WORKER_QUEUED: _gauge(),
}
SHAPES: Final[dict[Part, dict[str, Shape]]] = {
    "operator": OPERATOR,
    "gateway": GATEWAY,
    "meter": METER,
    "ledger": LEDGER,
    "worker": WORKER,
}
