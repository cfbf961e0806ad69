"""Keys of annotations and labels on our resources, and the condition types others may rely on."""

from typing import Final

SESSION_ID: Final = "gristmill.dev/session-id"
"""The durable identity of a TrainingSession: minted once, kept over restores and new resource uids."""
CREATED_BY: Final = "gristmill.dev/created-by"
"""Which door made the resource: `sagemaker` for CreateTrainingSession; absent for applied manifests."""
CREATED_BY_SAGEMAKER: Final = "sagemaker"
SAGEMAKER_REQUEST: Final = "gristmill.dev/sagemaker-request"
"""JSON: what CreateTrainingSession sent and the spec has no field for; Describe gives it back."""

METERING_FLUSH: Final = "gristmill.dev/metering-flush"
"""Finalizer of a TrainingSession: it stays until the ledger has all of the session's usage."""
