"""A session's state from its log: from the first frame on, or from the CHECKPOINT that the log begins with."""

from collections.abc import Sequence

import msgspec

from gristmill_contracts.errors import LogLostError, VolumeFailedError
from gristmill_meter.checkpoints import restore_state
from gristmill_meter.frames import Checkpoint, Frame
from gristmill_meter.log import SessionLog
from gristmill_meter.records import SessionState
from gristmill_meter.state import apply


def rebuild(state: SessionState, log: SessionLog, kept: Sequence[Frame]) -> None:
    """Fill an empty state with what a recovered log says (blocking where its checkpoint is a blob).

    Raises LogLostError where the log begins with nothing to begin with.
    """
    if log.first_number > 1:
        first = kept[0] if kept else None
        if not isinstance(first, Checkpoint):
            raise LogLostError(
                f"log {log.folder} begins at frame {log.first_number} without a checkpoint; restore the "
                "volume"
            )
        try:
            restore_state(state, log.read_body_now(first.state))
        except (VolumeFailedError, msgspec.MsgspecError) as error:
            raise LogLostError(
                f"the checkpoint that log {log.folder} begins with cannot be read: {error}"
            ) from error
    for frame in kept:
        apply(state, frame)
