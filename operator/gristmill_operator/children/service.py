"""The names of the ranks: a headless Service that answers before anybody is ready, for the rendezvous."""

from gristmill_contracts import labels
from gristmill_operator.children.manifest import (
    COMPONENT,
    WORKER,
    Manifest,
    owner,
    session_labels,
)
from gristmill_operator.children.seating import Seating


def rank_names(seating: Seating) -> Manifest:
    """A session of one worker has nobody to find and needs none."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": seating.name,
            "namespace": seating.namespace,
            "labels": session_labels(seating.session),
            "ownerReferences": owner(seating.session),
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {
                COMPONENT: WORKER,
                labels.SESSION: seating.name,
                labels.ATTEMPT: str(seating.attempt),
            },
            "ports": [
                {
                    "name": "rendezvous",
                    "port": seating.profile.port,
                    "targetPort": seating.profile.port,
                    "protocol": "TCP",
                }
            ],
        },
    }
