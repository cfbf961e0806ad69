"""Devices by dynamic resource allocation: a template of which each pod gets a claim of its own."""

from typing import Any

from gristmill_contracts.base_model import DraRequest
from gristmill_operator.children.manifest import Manifest, owner, session_labels
from gristmill_operator.children.seating import Seating, device_claims_name


def device_claims(seating: Seating, request: DraRequest) -> Manifest:
    exactly: dict[str, Any] = {  # Any: fields of a request
        "deviceClassName": request.device_class_name,
        "count": request.count,
        "allocationMode": "ExactCount",
    }
    if request.selectors:
        exactly["selectors"] = [{"cel": {"expression": each}} for each in request.selectors]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {
            "name": device_claims_name(seating.name),
            "namespace": seating.namespace,
            "labels": session_labels(seating.session),
            "ownerReferences": owner(seating.session),
        },
        "spec": {
            "metadata": {"labels": session_labels(seating.session)},
            "spec": {"devices": {"requests": [{"name": "devices", "exactly": exactly}]}},
        },
    }
