"""What a session is called and known by, wherever that is asked. Pure."""

import hashlib

from gristmill_contracts import labels
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.session import TrainingSession


def session_uid(session: TrainingSession) -> SessionUid:
    """The durable identity that meter and ledger know: minted once, else the resource's own uid."""
    minted = session.metadata.annotations.get(labels.SESSION_ID)
    return SessionUid(minted or session.metadata.uid)


def session_name(session: TrainingSession) -> str:
    """What people call it."""
    return session.spec.display_name or session.metadata.name


def tenant_of(session: TrainingSession) -> TenantName:
    """Who pays. In a cluster the tenant's namespace has a name of its own, and a label says whose it is."""
    meta = session.metadata
    return TenantName(meta.labels.get(labels.TENANT) or meta.namespace)


def session_seed(uid: SessionUid) -> int:
    """The seed of a session's adapter: a function of its identity, so that it survives every restart."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:6], "little")
