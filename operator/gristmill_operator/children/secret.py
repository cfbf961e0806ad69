"""The Secret of one attempt: what its meter is told, and what it shows the ledger. Immutable."""

import base64
from typing import Final

import msgspec

from gristmill_contracts import labels
from gristmill_contracts.http import Assignment
from gristmill_contracts.secrets import attempt_secret, producer_secret
from gristmill_operator.children.manifest import Manifest, owner, session_labels
from gristmill_operator.children.seating import Seating, attempt_secret_name
from gristmill_sessions.identity import session_name, session_seed, tenant_of

PRODUCER_ENTRY: Final = "producer"


def attempt_credentials(seating: Seating, cluster_key: bytes) -> Manifest:
    """The gateway derives the same secret from the cluster key: it never reads this one."""
    session, uid = seating.session, seating.uid
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": attempt_secret_name(seating.name, seating.attempt),
            "namespace": seating.namespace,
            "labels": {**session_labels(session), labels.ATTEMPT: str(seating.attempt)},
            "ownerReferences": owner(session),
        },
        "type": "Opaque",
        "immutable": True,
        "data": {
            assignment_entry(uid): _encode(msgspec.json.encode(assignment(seating, cluster_key))),
            PRODUCER_ENTRY: _encode(producer_secret(cluster_key, uid, seating.attempt).encode()),
        },
    }


def assignment(seating: Seating, cluster_key: bytes) -> Assignment:
    """What the meter serves. To end it is told by the ledger: this text never changes."""
    session, uid = seating.session, seating.uid
    return Assignment(
        uid=uid,
        tenant=tenant_of(session),
        project=session.spec.project,
        name=session_name(session),
        model=session.spec.base_model_ref.name,
        attempt=seating.attempt,
        secret=attempt_secret(cluster_key, uid, seating.attempt),
        rank=session.spec.lora.rank,
        alpha=session.spec.lora.alpha,
        seed=session_seed(uid),
        checkpoint_group=session.spec.output.checkpoint_group,
        desired="serve",
    )


def assignment_entry(uid: str) -> str:
    return f"{uid}.json"


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()
