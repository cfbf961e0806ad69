"""Keys of annotations, labels and finalizers on our resources and their children, and our names."""

from typing import Final

# --- annotations of a TrainingSession ------------------------------------------------------------
SESSION_ID: Final = "gristmill.dev/session-id"
"""The durable identity of a TrainingSession: minted once, kept over restores and new resource uids."""
CREATED_BY: Final = "gristmill.dev/created-by"
"""Which door made the resource: `sagemaker` for CreateTrainingSession; absent for applied manifests."""
CREATED_BY_SAGEMAKER: Final = "sagemaker"
SAGEMAKER_REQUEST: Final = "gristmill.dev/sagemaker-request"
"""JSON: what CreateTrainingSession sent and the spec has no field for; Describe gives it back."""
STOP_REQUESTED: Final = "gristmill.dev/stop-requested"
"""Set by StopTrainingSession: a GitOps tool would take back a change of the spec."""
RESTART: Final = "gristmill.dev/restart"
"""Any new value rolls the live session onto the present image, at a snapshot."""

# --- labels of children --------------------------------------------------------------------------
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "gristmill"
SESSION: Final = "gristmill.dev/session"
TENANT: Final = "gristmill.dev/tenant"
"""The tenant's name: on its namespace, its sessions and all children."""
TENANT_UID: Final = "gristmill.dev/tenant-uid"
ATTEMPT: Final = "gristmill.dev/attempt"
RANK: Final = "gristmill.dev/rank"
TEMPLATE_HASH: Final = "gristmill.dev/template-hash"
UNFLUSHED: Final = "gristmill.dev/unflushed"
"""On a volume that holds usage nobody has: it is never deleted by us."""

# --- finalizers and field managers ---------------------------------------------------------------
METERING_FLUSH: Final = "gristmill.dev/metering-flush"
"""Finalizer of a TrainingSession: it stays until the ledger has all of the session's usage."""
TENANT_FINALIZER: Final = "gristmill.dev/tenant"
"""Finalizer of a Tenant whose deletionPolicy is Delete."""
FIELD_MANAGER: Final = "gristmill-operator"

# --- names ---------------------------------------------------------------------------------------
CLUSTER_KEY_SECRET: Final = "gristmill-cluster-key"  # noqa: S105
CLUSTER_KEY_ENTRY: Final = "cluster.key"
LEASE: Final = "gristmill-operator"
WORKER_ACCOUNT: Final = "gm-worker"
CLIENT_ACCOUNT: Final = "gm-client"
NAMESPACE_PREFIX: Final = "gm-"
METER_PORT: Final = 8470
