"""Every bound, with its unit in its name. Relations between bounds are asserted at the end."""

from typing import Final

# --- requests ------------------------------------------------------------------------------------
REQUEST_BODY_BYTES_MAX: Final = 32 * 2**20
"""Largest HTTP body of any public request. The SDK estimates 10 MB a chunk, and JSON runs over."""
CONTROL_BODY_BYTES_MAX: Final = 1 * 2**20
HELD_BODY_BYTES_MAX: Final = 512 * 2**20
"""Bodies of public requests in a gateway's memory at once; past it 429."""
OPEN_REQUESTS_MAX: Final = 4096
"""Public requests that one gateway works on or holds at once; past it 429."""
CHAT_BODY_BYTES_MAX: Final = 4 * 2**20
CHAT_WAIT_S_MAX: Final = 900.0
"""How long a chat call that is not streamed may run."""
DATUMS_PER_OPERATION_MAX: Final = 1024
DATUM_TOKENS_MAX: Final = 131_072
OPERATION_TOKENS_MAX: Final = 1_048_576
CLIENT_TOKEN_CHARS_MAX: Final = 128
DESCRIPTION_CHARS_MAX: Final = 1024
MESSAGE_CHARS_MAX: Final = 4096
"""Longest error message that is kept with an operation."""
SAMPLES_PER_PROMPT_MAX: Final = 1000
SAMPLE_TOKENS_MAX: Final = 131_072
STOP_STRINGS_MAX: Final = 64
STOP_STRING_CHARS_MAX: Final = 256
TOPK_PROMPT_LOGPROBS_MAX: Final = 20
CHAT_MESSAGES_MAX: Final = 4096
SEQUENCE_NUMBER_MAX: Final = 2**53 - 1
SEED_MAX: Final = 2**63 - 1
LEARNING_RATE_MAX: Final = 0.01
BETA_MAX: Final = 0.999999
EPS_MIN: Final = 1e-16
EPS_MAX: Final = 0.01
WEIGHT_DECAY_MAX: Final = 1.0
GRAD_CLIP_NORM_MAX: Final = 100.0
LORA_PLUS_RATIO_MIN: Final = 1.0
LORA_PLUS_RATIO_MAX: Final = 100.0
TARGETS_PER_TOKEN_MAX: Final = 1024
"""Of cross_entropy with several targets for one token."""
LOSS_BETA_MAX: Final = 100.0
"""Of dro and dpo."""
TEMPERATURE_MAX: Final = 2.0
LORA_RANK_MAX: Final = 256
LORA_ALPHA_MAX: Final = 65_536

# --- sessions ------------------------------------------------------------------------------------
SESSION_NAME_CHARS_MAX: Final = 63
OBJECT_NAME_CHARS_MAX: Final = 40
CONDITION_MESSAGE_CHARS_MAX: Final = 32_768
GAP_TIMEOUT_S: Final = 300.0
"""How long a session waits for a missing sequence number before it fails. Settable for tests."""
SEQUENCE_AHEAD_MAX: Final = 1024
"""How far above the next expected number a submit may lie."""
QUEUED_OPERATIONS_MAX: Final = 4096
"""Accepted and unfinished operations of one session; past it 429."""
QUEUED_BYTES_MAX: Final = 512 * 2**20
DISPATCHED_SAMPLES_MAX: Final = 64
"""Keyless operations of one session that are at the worker at once."""
UNCLAIMED_TOKENS_MAX: Final = 4_000_000
"""Sampled tokens of one session whose result nobody fetched yet; past it 429."""
CLAIM_TIMEOUT_S: Final = 3600.0
RESULT_RETENTION_S: Final = 86_400.0
RESULT_WAIT_S_MAX: Final = 20.0
"""How long a Get is held. Well below the SDK's read timeout of 60 s."""
HELD_POLLS_MAX: Final = 4096
"""Gets of one session that are held at once; those past it are answered at once."""
STREAM_STALL_S: Final = 120.0
"""How long a token stream waits for a client that reads nothing, before it is cut."""
CREATE_WAIT_S_MAX: Final = 25.0
"""How long a create is held until the session takes operations: the SDK polls only every 10 s."""

# --- cluster -------------------------------------------------------------------------------------
FLUSH_ABANDON_S: Final = 900.0
"""After this the usage that a deleted session still holds is recorded as a gap."""
DIRECTIVE_WAIT_S: Final = 60.0
"""How long a live meter may take to close a session before its pods are deleted and a drain Job ships the log."""
NODE_LOST_S: Final = 60.0
"""A node that is not ready for this long is taken for lost: a new attempt is forced."""
METER_START_S: Final = 60.0
"""How long a meter may take to answer its start-up probe."""
POD_GRACE_S: Final = 120
WORKER_GRACE_S: Final = 90
"""Part of the grace that the worker may use; the meter keeps the rest."""
STATUS_USAGE_EVERY_S: Final = 60.0
"""Usage reaches the status of one session at most this often."""
STATUS_WRITES_PER_S: Final = 10.0
"""Status writes that only inform, of all sessions together."""

OWN_RANGES_MAX: Final = 200
"""Ranges of the cluster's own addresses in one NetworkPolicy, of one version of IP; more are merged with their
neighbours."""

# --- gateway in a cluster ------------------------------------------------------------------------
API_CONNECTIONS_MAX: Final = 32
"""Connections of one gateway to the API server."""
API_TIMEOUT_S: Final = 10.0
"""How long the API server may take to answer a request that is no watch."""
API_PLACE_WAIT_S: Final = 5.0
"""How long a call waits for one of those connections, before its client is told to try again."""
GATEWAY_THREADS_MAX: Final = 128
"""Threads of one gateway: many more than wait for the API server, so that work on sessions goes on."""
API_TRIES_MAX: Final = 4
"""How often a write that the API server could not take just now is sent."""
API_PAGE_MAX: Final = 500
"""Objects of one page of a list."""
API_OBJECT_BYTES_MAX: Final = 4 * 2**20
"""Longest line of a watch. etcd holds 1.5 MB in one object."""
WATCH_LIFETIME_S: Final = 300
"""After this the API server is asked to end a watch, and a new one goes on where it ended."""
WATCH_SILENCE_S: Final = 100.0
"""A watch without a byte for this long is taken for dead: the API server sends a bookmark a minute."""
WATCH_BACKOFF_S_MAX: Final = 10.0
ACCESS_KEPT_S: Final = 10.0
"""How long an answer to "may they?" holds."""
ACCESS_LASTING_S: Final = 60.0
"""How long a yes holds for what comes often: operations of a session, checkpoints."""
ACCESS_KEPT_MAX: Final = 10_000
SUBMIT_HOLD_S_MAX: Final = 20.0
"""How long a submit waits for its session's pod, before the client is told to try again."""
HELD_SUBMITS_MAX: Final = 1000
"""Submits of one gateway that wait for a pod at once; past it they are told to try again at once."""
HELD_SUBMITS_PER_SESSION_MAX: Final = 64

# --- inbox and archive ---------------------------------------------------------------------------
INBOX_OPERATIONS_MAX: Final = 1024
"""Operations of one session that wait for a meter; past it 429."""
INBOX_BYTES_MAX: Final = 256 * 2**20
"""Bytes of operations of one session that wait for a meter; past it 429."""
INBOX_PAGE_OPERATIONS_MAX: Final = 256
INBOX_PAGE_BYTES_MAX: Final = 32 * 2**20
"""A meter takes what waits in pages of so many operations and bytes, at least one."""
INBOX_SERVED_S: Final = 6.0
"""A session counts as served for so long after its meter's last heartbeat; then its inbox is open again."""
INBOX_LOG_NUMBER_MIN: Final = 2**50
"""Keyless operations that came through the inbox have numbers from here on, so that they never meet those
that a meter gives: the time in microseconds."""
ARCHIVE_OPERATIONS_MAX: Final = 100_000
"""Operations of one session in the archive; the newest are kept."""
ARCHIVE_BYTES_MAX: Final = 4 * 2**30
"""Bytes of results of one session in the archive; the newest are kept."""
ARCHIVE_PAGE_OPERATIONS_MAX: Final = 1000
ARCHIVE_PAGE_BYTES_MAX: Final = 16 * 2**20
"""A meter ships results in pages of so many operations and bytes, at least one."""
ARCHIVE_RETENTION_S_MAX: Final = 31 * 86_400.0
"""Longest retention that a meter may ask for."""
ARCHIVE_SHIP_S_MAX: Final = 300.0
"""How long the end of a session waits for a ledger that does not take its results."""
ARCHIVE_SWEEP_S: Final = 60.0
"""How often the ledger looks for archived results whose retention is over."""
ORPHAN_AGE_S: Final = 3600.0
"""A body of an operation that no row names is removed once it is older than this."""
ORPHAN_LOOK_S: Final = 6 * 3600.0
"""How often such bodies are looked for."""
ARCHIVE_DRAIN_S: Final = 5.0
"""How long a meter that goes down ships results, so that they can be read until the next one is there."""
ARCHIVE_SWEEP_MAX: Final = 1000
"""Results that are removed in one transaction."""

# --- meter log -----------------------------------------------------------------------------------
FRAME_BYTES_MAX: Final = 1 * 2**20
INLINE_PAYLOAD_BYTES_MAX: Final = 16 * 2**10
"""Larger payloads and results live in blob files beside the log."""
SEGMENT_BYTES: Final = 16 * 2**20
"""Bytes of frames after which a checkpoint begins another segment, so that older ones can be deleted."""
SEGMENT_BYTES_MAX: Final = 64 * 2**20
INLINE_RESULTS_BYTES_MAX: Final = 32 * 2**20
"""Small results of one session that stay in memory; older ones are read from the log again."""
RESULT_ROOM_BYTES_MIN: Final = 64 * 2**10
LOG_FREE_BYTES_MIN: Final = 64 * 2**20
"""New work is refused when the volume has less than this and the reserved room left."""
SNAPSHOT_REPLAY_S_MAX: Final = 20.0
"""A snapshot is taken when the operations since the last one took this long to run."""
SNAPSHOT_PAYLOAD_BYTES_MAX: Final = 256 * 2**20
STREAM_FLUSH_TOKENS: Final = 8
"""Tokens in one PROGRESS frame and one flush of a token stream, at most."""

# --- posting -------------------------------------------------------------------------------------
UNACKED_OPERATIONS_MAX: Final = 10_000
"""Usage events of one session that the ledger has not acknowledged; past it 429. What a lost volume takes
with it is no more than this."""
UNACKED_AGE_S_MAX: Final = 900.0
"""Age of the oldest of them; past it 429."""
BATCH_EVENTS_MAX: Final = 500
HEARTBEAT_S: Final = 2.0
HEARTBEAT_PAGE_MAX: Final = 1000
RELEASE_GRANT_S: Final = 30.0
"""How long an attempt may release results after the heartbeat that asked for it: one writer."""
USAGE_PAGE_MAX: Final = 10_000

# --- ledger --------------------------------------------------------------------------------------
LEDGER_WRITES_PENDING_MAX: Final = 256
"""Requests that may wait for the ledger's one writer; past it 429."""
COMMIT_EVENTS_MAX: Final = 250
"""Usage events of several batches that share a commit, so that none waits long for it; a larger batch has
one alone."""
LEDGER_COMMIT_TRIES_MAX: Final = 5
"""How often a transaction that PostgreSQL aborted for a deadlock is run again before a 503."""
LEDGER_TEXT_CHARS_MAX: Final = 4096
"""Longest name, path or id in a message to the ledger."""
RESOURCE_INTEGER_MAX: Final = 2**53 - 1
"""Largest integer in a resource: what every reader of JSON keeps exact."""
QUANTITY_MAX: Final = 2**63 - 1
"""Largest token count, time or number that the ledger's integers hold."""
HEARTBEAT_WAIT_S_MAX: Final = 30.0
EVENT_AGE_S_MAX: Final = 35 * 86_400
EVENT_AHEAD_S_MAX: Final = 300
"""An event that began earlier or later than this against the ledger's clock is kept, quarantined."""
CHAIN_LOOK_S: Final = 5.0
"""How often a ledger looks for an hour to sign and for new rows to verify."""
CHAIN_PAGE_ROWS: Final = 2000
"""Rows that are verified, or exported, at a time."""
CHAIN_PAGE_BUSY_ROWS: Final = 250
"""Rows that a ledger verifies behind its writers at a time, where somebody waits for the database."""
CHAIN_BUSY_PAUSE_S: Final = 0.01
"""How long it lets them go first then."""
PRICES_PER_BOOK_MAX: Final = 10_000
EXPLAIN_PAGE_MAX: Final = 5_000
RERATE_HOURS_MAX: Final = 200
"""Hours of a tenant that one call rates again; the caller goes on from there."""
RATING_TENANTS_MAX: Final = 100
"""Tenants whose usage one transaction rates."""
RATING_ROWS_MAX: Final = 500
"""Usage rows that one transaction rates where nobody waits for the database."""
RATING_ROWS_BUSY_MAX: Final = 250
"""The same where others wait: rating must not hold them up."""
GAPS_SHOWN_MAX: Final = 100
"""Recorded gaps in one answer about usage; their number is told in any case."""

# --- reconciliation ------------------------------------------------------------------------------
RECON_LOOK_S: Final = 30.0
"""How often a ledger looks whether this hour was reconciled."""
RECON_WAIT_S: Final = 3600.0
"""How long usage may be under way, or a worker without a moment to compare, before that is a difference."""
DEVICE_TIME_EVERY_S: Final = 300.0
"""How often the time that devices are held for a session is recorded, besides at its end."""
RECON_PAGE_MAX: Final = 1000
"""Differences in one answer."""

# --- budgets -------------------------------------------------------------------------------------
BUDGET_LEASE_S: Final = 300.0
"""How long a lease may be spent without a word from the ledger: that long may the ledger be away."""
BUDGET_LEASE_LIFE_S_MAX: Final = 3600.0
"""A lease is spent no longer than this, however often it is renewed: its prices hold that long."""
BUDGET_ASK_S: Final = 60.0
"""A session that no budget bounds asks again after this, at the latest."""
BUDGET_SWEEP_S: Final = 10.0
"""How often leases are looked for whose time ran out."""
BUDGET_LEASE_SHARE: Final = 100
"""A lease holds one part in so many of what is left."""
BUDGETS_PER_TENANT_MAX: Final = 10_000
"""Standing budgets of one tenant, those of its sessions aside."""
BUDGET_THRESHOLDS_MAX: Final = 16
BUDGET_PAGE_MAX: Final = 1000

# --- public lists --------------------------------------------------------------------------------
LIST_PAGE_MAX: Final = 100
NEXT_TOKEN_CHARS_MAX: Final = 8192

# --- artifact store (the S3 wire) ----------------------------------------------------------------
OBJECT_KEY_BYTES_MAX: Final = 1024
KEY_SEGMENT_BYTES_MAX: Final = 255
"""Longest name between two slashes: what a file system holds."""
OBJECTS_PAGE_MAX: Final = 1000
"""Keys of one ListObjectsV2 page and of one DeleteObjects call."""
S3_BODY_BYTES_MAX: Final = 4 * 2**20
"""Room for one DeleteObjects of OBJECTS_PAGE_MAX longest keys."""
BUCKETS_MAX: Final = 1000
"""Buckets of one tenant."""
ARTIFACT_CHUNK_BYTES: Final = 256 * 2**10
"""How much of a file is read at a time while it is sent."""
ARTIFACT_PART_BYTES: Final = 8 * 2**20
"""How much of a file a bucket gets at a time; S3 takes at most 10,000 parts of 5 MiB or more."""
ARTIFACT_BYTES_MAX: Final = 64 * 2**30
"""Largest file of a checkpoint."""
ARTIFACT_FREE_BYTES_MIN: Final = 256 * 2**20
"""Uploads are refused when the store's volume has less than this left."""
ARTIFACT_UPLOADS_MAX: Final = 16
"""Uploads that one ledger takes at once; past it 429."""
ARTIFACT_FILES_MAX: Final = 4096
"""Files of one checkpoint."""

# --- SigV4 ---------------------------------------------------------------------------------------
CLOCK_SKEW_S_MAX: Final = 300

# --- metrics -------------------------------------------------------------------------------------
METRIC_LABEL_VALUES_MAX: Final = 200
"""Tenants, and models, with a series of their own in one process; the rest is "other"."""
METRIC_OTHER_VALUES_MAX: Final = 100_000
"""Values that share the series "other" and are remembered, so that each is counted once."""

if ARTIFACT_PART_BYTES * 10_000 < ARTIFACT_BYTES_MAX:
    raise AssertionError("S3 takes at most 10,000 parts of one file")
if INLINE_PAYLOAD_BYTES_MAX * 2 > FRAME_BYTES_MAX:
    raise AssertionError("a frame must hold an inline payload and its header")
if max(RESULT_WAIT_S_MAX, CREATE_WAIT_S_MAX, 2 * SUBMIT_HOLD_S_MAX) >= 60:
    raise AssertionError("held answers must end before the official SDK's read timeout of 60 s")
if RELEASE_GRANT_S < 5 * HEARTBEAT_S:
    raise AssertionError("a release grant must outlive some lost heartbeats")
if WORKER_GRACE_S >= POD_GRACE_S:
    raise AssertionError("the meter needs a part of the pod's grace to ship its log")
if min(SEQUENCE_AHEAD_MAX, QUEUED_OPERATIONS_MAX) < INBOX_OPERATIONS_MAX:
    raise AssertionError("what an inbox took must fit into the session's log")
if INBOX_BYTES_MAX > QUEUED_BYTES_MAX:
    raise AssertionError("what an inbox took must fit into the session's log")
if INBOX_SERVED_S < 2 * HEARTBEAT_S:
    raise AssertionError("a session must not look forsaken between two heartbeats")
if not 2**50 <= INBOX_LOG_NUMBER_MIN < SEQUENCE_NUMBER_MAX:
    raise AssertionError("numbers of the inbox must be readable by every client")
