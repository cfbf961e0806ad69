"""Resources as a cluster holds them, built in one line, and the operator's choices that go with them."""

from typing import Any

from gristmill_contracts import labels
from gristmill_contracts.base_model import (
    BaseModelResource,
    BaseModelSpec,
    ClaimWeights,
    WeightsSpec,
)
from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import BaseModelRef, TrainingSession, TrainingSessionSpec
from gristmill_contracts.tenant import Tenant, TenantSpec
from gristmill_operator.children.options import ChildOptions, child_options
from gristmill_operator.children.seating import Seating
from gristmill_operator.settings import OperatorSettings

CLUSTER_KEY = bytes(range(32))
SESSION_UID = "5e55105e-0000-4000-8000-000000000001"
WORKER_IMAGE = "registry.test/gristmill-worker@sha256:" + "a" * 64
METER_IMAGE = "registry.test/gristmill-meter@sha256:" + "b" * 64


def operator_settings(**changes: Any) -> OperatorSettings:
    fields = {
        "ledger_url": "http://gristmill-ledger.gristmill-system.svc:8460",
        "meter_image": METER_IMAGE,
        "pod_cidrs": ("10.88.0.0/16",),
        "service_cidrs": ("10.96.0.0/16",),
    }
    return OperatorSettings(**{**fields, **changes})


def options(**changes: Any) -> ChildOptions:
    return child_options(operator_settings(**changes))


def a_tenant(name: str = "acme", uid: str = "tenant-uid-1", **spec: Any) -> Tenant:
    meta = Metadata(name=name, namespace="", uid=uid, generation=1)
    return Tenant(metadata=meta, spec=TenantSpec.model_validate(spec))


def a_model(name: str = "tiny", **spec: Any) -> BaseModelResource:
    fields = {
        "image": WORKER_IMAGE,
        "weights": WeightsSpec(pvc=ClaimWeights(claim_name="tiny-weights")),
        "dtype": "float32",
        **spec,
    }
    meta = Metadata(name=name, namespace="", uid="model-uid-1", generation=1)
    return BaseModelResource(metadata=meta, spec=BaseModelSpec.model_validate(fields))


def a_session(name: str = "run", **spec: Any) -> TrainingSession:
    meta = Metadata(
        name=name,
        namespace="gm-acme",
        uid=SESSION_UID,
        generation=1,
        creation_time_us=1_760_000_000_000_000,
        labels={labels.TENANT: "acme"},
    )
    fields = {"base_model_ref": BaseModelRef(name="tiny"), **spec}
    return TrainingSession(metadata=meta, spec=TrainingSessionSpec.model_validate(fields))


def a_card(name: str = "standard") -> RateCard:
    meta = Metadata(name=name, namespace="", uid="card-uid-1", generation=1)
    spec = {
        "currency": "USD",
        "prices": [{"model": "*", "meter": "train", "price": "2.5"}],
        "effectiveFrom": "2026-01-01T00:00:00Z",
    }
    return RateCard.model_validate({"metadata": meta, "spec": spec})


def a_seating(
    session: TrainingSession | None = None,
    tenant: Tenant | None = None,
    model: BaseModelResource | None = None,
    attempt: int = 1,
    **settings: Any,
) -> Seating:
    return Seating(
        session=session or a_session(),
        tenant=tenant or a_tenant(),
        model=model or a_model(),
        attempt=attempt,
        options=options(**settings),
    )
