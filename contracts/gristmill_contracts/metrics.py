"""Names of what our processes tell Prometheus, as they stand in the exposition and in dashboards.

A name never changes once released. Its unit, or `_total` for what only grows, comes last. Label values
come from configuration: never a session, a user or a request.
"""

from typing import Final

# --- gateway -------------------------------------------------------------------------------------

GATEWAY_REQUESTS: Final = "gristmill_gateway_requests_total"
GATEWAY_REQUEST_SECONDS: Final = "gristmill_gateway_request_seconds"
GATEWAY_OPEN_REQUESTS: Final = "gristmill_gateway_open_requests"
GATEWAY_REFUSED_NUMBERS: Final = "gristmill_gateway_refused_numbers_total"
GATEWAY_HELD_BODY_BYTES: Final = "gristmill_gateway_held_body_bytes"
GATEWAY_HELD_SUBMITS: Final = "gristmill_gateway_held_submits"
GATEWAY_WATCHES_AWAY: Final = "gristmill_gateway_watches_away"

# --- meter ---------------------------------------------------------------------------------------

METER_TOKENS: Final = "gristmill_meter_tokens_total"
METER_OPERATIONS: Final = "gristmill_meter_operations_total"
METER_REPLAYED_OPERATIONS: Final = "gristmill_meter_replayed_operations_total"
LABEL_OVERFLOW: Final = "gristmill_label_overflow_total"
SPOOL_UNACKED_EVENTS: Final = "gristmill_spool_unacked_events"
SPOOL_OLDEST_UNACKED_SECONDS: Final = "gristmill_spool_oldest_unacked_seconds"
SPOOL_BYTES: Final = "gristmill_spool_bytes"
SPOOL_VOLUME_FREE_BYTES: Final = "gristmill_spool_volume_free_bytes"

# --- ledger --------------------------------------------------------------------------------------

LEDGER_EVENTS: Final = "gristmill_ledger_events_total"
LEDGER_QUARANTINED_EVENTS: Final = "gristmill_ledger_quarantined_events_total"
LEDGER_UNPRICED_EVENTS: Final = "gristmill_ledger_unpriced_events_total"
LEDGER_UNRATED_EVENTS: Final = "gristmill_ledger_unrated_events"
RATED_COST: Final = "gristmill_rated_cost_total"
LEDGER_LOG_LOST: Final = "gristmill_ledger_log_lost_total"
LEDGER_USAGE_GAPS: Final = "gristmill_ledger_usage_gaps_total"
LEDGER_INBOX_OPERATIONS: Final = "gristmill_ledger_inbox_operations_total"
LEDGER_ARCHIVED_OPERATIONS: Final = "gristmill_ledger_archived_operations_total"
LEDGER_COMMIT_SECONDS: Final = "gristmill_ledger_commit_seconds"
LEDGER_HEADS_SIGNED: Final = "gristmill_ledger_heads_signed_total"
CHAIN_VERIFIED_SEQ: Final = "gristmill_chain_verified_seq"
CHAIN_UNVERIFIED_ROWS: Final = "gristmill_chain_unverified_rows"
CHAIN_FAILURES: Final = "gristmill_chain_failures_total"
LEDGER_PRODUCERS: Final = "gristmill_ledger_producers"
LEDGER_HEARTBEAT_AGE_SECONDS: Final = "gristmill_ledger_heartbeat_age_seconds"
RECON_DIFF_TOKENS: Final = "gristmill_recon_diff_tokens"
RECON_DIFFS: Final = "gristmill_recon_diffs"
RECON_OLDEST_DIFF_AGE_SECONDS: Final = "gristmill_recon_oldest_diff_age_seconds"
RECON_RUN_AGE_SECONDS: Final = "gristmill_recon_run_age_seconds"
BUDGET_LIMIT: Final = "gristmill_budget_limit"
BUDGET_POSTED: Final = "gristmill_budget_posted"
BUDGET_RESERVED: Final = "gristmill_budget_reserved"
BUDGET_DENIALS: Final = "gristmill_budget_denials_total"
BUDGET_THRESHOLDS_PASSED: Final = "gristmill_budget_thresholds_passed_total"
BUDGET_UNRESERVED_EVENTS: Final = "gristmill_budget_unreserved_events_total"
RESERVATIONS_EXPIRED: Final = "gristmill_reservations_expired_total"

# --- worker --------------------------------------------------------------------------------------

WORKER_OPERATIONS: Final = "gristmill_worker_operations_total"
WORKER_TOKENS: Final = "gristmill_worker_tokens_total"
WORKER_OPERATION_SECONDS: Final = "gristmill_worker_operation_seconds"
WORKER_SESSIONS: Final = "gristmill_worker_sessions"
WORKER_QUEUED: Final = "gristmill_worker_queued"

# --- operator ------------------------------------------------------------------------------------

OPERATOR_RECONCILES: Final = "gristmill_operator_reconciles_total"
OPERATOR_RECONCILE_SECONDS: Final = "gristmill_operator_reconcile_seconds"
OPERATOR_QUEUE_DEPTH: Final = "gristmill_operator_queue_depth"
OPERATOR_QUEUE_AGE_SECONDS: Final = "gristmill_operator_queue_age_seconds"
OPERATOR_QUEUE_WAIT_SECONDS: Final = "gristmill_operator_queue_wait_seconds"
OPERATOR_IN_FLIGHT: Final = "gristmill_operator_in_flight"
OPERATOR_LEADER: Final = "gristmill_operator_leader"
OPERATOR_API_REQUESTS: Final = "gristmill_operator_api_requests_total"
OPERATOR_API_REQUEST_SECONDS: Final = "gristmill_operator_api_request_seconds"
OPERATOR_STATUS_WRITES: Final = "gristmill_operator_status_writes_total"
OPERATOR_WATCH_EVENTS: Final = "gristmill_operator_watch_events_total"
OPERATOR_WATCH_AGE_SECONDS: Final = "gristmill_operator_watch_age_seconds"
OPERATOR_WATCH_MISSED: Final = "gristmill_operator_watch_missed_total"
OPERATOR_WATCH_RESTARTS: Final = "gristmill_operator_watch_restarts_total"
OPERATOR_EVENTS_DROPPED: Final = "gristmill_operator_events_dropped_total"
OPERATOR_LOOP_LAG_SECONDS: Final = "gristmill_operator_loop_lag_seconds"
OPERATOR_CACHED_OBJECTS: Final = "gristmill_operator_cached_objects"
OPERATOR_SESSIONS: Final = "gristmill_operator_sessions"
OPERATOR_START_SECONDS: Final = "gristmill_operator_session_start_seconds"
OPERATOR_FINALIZER_AGE_SECONDS: Final = "gristmill_operator_finalizer_age_seconds"
OPERATOR_FLUSH_ABANDONED: Final = "gristmill_operator_flush_abandoned_total"
OPERATOR_LEDGER_ANSWERS: Final = "gristmill_operator_ledger_answers"
