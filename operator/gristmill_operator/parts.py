"""What is put together once this process leads, and of what."""

from collections.abc import Callable
from dataclasses import dataclass

from gristmill_contracts.session import TrainingSession
from gristmill_operator.cache import ObjectCache
from gristmill_operator.cluster import CachedCluster
from gristmill_operator.codec import session_from
from gristmill_operator.heartbeats import HeartbeatStream
from gristmill_operator.ledger import LedgerClient
from gristmill_operator.seams import Hands, Json, Observer, Reconcilers, Recorder
from gristmill_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """What there is to build on."""

    cache: ObjectCache
    cluster: CachedCluster
    heartbeats: HeartbeatStream
    ledger: LedgerClient
    key: bytes
    """The cluster key."""
    recorder: Recorder
    settings: OperatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    observer: Observer
    hands: Hands
    others: Reconcilers
    read: Callable[[Json], TrainingSession] = session_from
    """A session of the cache; it may remember what it read."""
    forget: Callable[[str], None] = lambda uid: None
    """Told of the uid of each session resource that is gone."""


Compose = Callable[[Foundation], Parts]
