"""The eyes: what the caches and the ledger's heartbeats tell of one session, in the planner's words."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts import conditions, labels
from gristmill_contracts.base_model import BaseModelResource, Profile
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.session import PinnedStatus, TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.fetch import fetch_state
from gristmill_operator.children.manifest import COMPONENT, WORKER
from gristmill_operator.children.namespace import namespace_name
from gristmill_operator.children.options import ChildOptions, child_options
from gristmill_operator.children.pins import pins
from gristmill_operator.children.seating import (
    Seating,
    fetch_job_name,
    profile_of,
    state_claim_name,
    weights_claim_name,
)
from gristmill_operator.children.session_policy import missing_profiles
from gristmill_operator.children.weights import WeightsRefused, weights_mount
from gristmill_operator.devices import offered_devices
from gristmill_operator.job_view import drain_view
from gristmill_operator.kinds import CLAIMS, JOBS, NAMESPACES, NODES, PODS
from gristmill_operator.memory import Memory
from gristmill_operator.parsed import Parsed
from gristmill_operator.pod_view import Devices, NodeView, node_view, pod_view
from gristmill_operator.seams import Cache, Heartbeats, Json
from gristmill_operator.settings import OperatorSettings
from gristmill_sessions.cluster import Cluster, ModelView, Pod, TenantView, Volume
from gristmill_sessions.identity import session_name, session_uid
from gristmill_sessions.observed import Observed
from gristmill_sessions.queue import position, waits

WORKERS_MAX: Final = 64
PINS_KEPT_MAX: Final = 20_000
PLACE_KEPT_US: Final = 30_000_000
"""How long a place is kept for a session that may run and has not said yet that it does."""


@dataclass(slots=True, kw_only=True)
class ClusterObserver:
    """The implementation of `seams.Observer`."""

    cache: Cache
    heartbeats: Heartbeats
    settings: OperatorSettings
    memory: Memory
    parsed: Parsed | None = None
    """To be shared with others that read sessions."""
    _parsed: Parsed = field(init=False)
    _options: ChildOptions = field(init=False)
    _pinned: OrderedDict[str, tuple[object, PinnedStatus]] = field(default_factory=OrderedDict)
    """uid of a session -> what its pins follow from, and the pins: making them takes longer than all else."""

    def __post_init__(self) -> None:
        self._parsed = self.parsed or Parsed(cache=self.cache)
        self._options = child_options(self.settings)

    def observe(self, session: TrainingSession, *, error: str, now_us: int) -> Observed:
        uid, key = session_uid(session), session.metadata.uid
        beat = self.heartbeats.newest(uid)
        namespace = self.cache.get(NAMESPACES, "", session.metadata.namespace)
        tenant = self._tenant(session, namespace)
        model = self._parsed.model(session.spec.base_model_ref.name)
        return Observed(
            session=session,
            now_us=now_us,
            registered=key in self.memory.registered,
            heartbeat=beat,
            error=error,
            workers_max=WORKERS_MAX,
            cluster=Cluster(
                pods=self._pods(session, model, now_us),
                name_holder=self._name_holder(session),
                tenant=self._tenant_view(session, tenant, now_us),
                model=self._model_view(session, tenant, model),
                pins=self._pins(session, tenant, model),
                failure=self.memory.refused.get(key),
                job=drain_view(self.cache.children(JOBS, session)),
                volume=self._volume(session),
                namespace_terminating=is_deleted(namespace),
                ledger_read=self.heartbeats.caught_up,
                directive_given=self.memory.directives.get(key) == session.status.attempt,
                gap_recorded=self.memory.gaps.get(key) == session.status.attempt,
                placed=self._placed(session),
                cost=(beat.cost or "") if beat is not None else "",
            ),
        )

    # --- pods ------------------------------------------------------------------------------------

    def _placed(self, session: TrainingSession) -> int:
        attempt, count = self.memory.placed.get(session.metadata.uid, (0, 0))
        return count if attempt == session.status.attempt else 0

    def _pods(
        self, session: TrainingSession, model: BaseModelResource | None, now_us: int
    ) -> tuple[Pod, ...]:
        """Foreign ones too, but not those of a drain Job."""
        devices = self._devices(session, model)
        return tuple(
            pod_view(body, self._node(body, now_us), devices)
            for body in self.cache.children(PODS, session, foreign=True)
            if (body["metadata"].get("labels") or {}).get(COMPONENT) in (WORKER, None)
        )

    def _node(self, pod: Json, now_us: int) -> NodeView:
        name = (pod.get("spec") or {}).get("nodeName")
        if not name:
            return NodeView()
        node = self.cache.get(NODES, "", name)
        if node is not None:
            self.memory.nodes_missed.pop(name, None)
            return node_view(node, None)
        return node_view(None, self.memory.nodes_missed.setdefault(name, now_us))

    def _devices(self, session: TrainingSession, model: BaseModelResource | None) -> Devices:
        profile = _profile(session, model)
        if profile is None or profile.device is None:
            return Devices()
        return Devices(
            wanted=profile.device.resource_name, offered=offered_devices(self.cache.list(NODES))
        )

    # --- whom it belongs to ----------------------------------------------------------------------

    def _tenant(self, session: TrainingSession, namespace: Json | None) -> Tenant | None:
        """By the mark of its namespace, which only the operator writes; never by what the session says."""
        marks = ((namespace or {}).get("metadata") or {}).get("annotations") or {}
        name = marks.get(labels.TENANT)
        tenant = self._parsed.tenant(name) if name else None
        if tenant is None or namespace_name(tenant) != session.metadata.namespace:
            return None
        return tenant if marks.get(labels.TENANT_UID) == tenant.metadata.uid else None

    def _tenant_view(
        self, session: TrainingSession, tenant: Tenant | None, now_us: int
    ) -> TenantView:
        namespace = session.metadata.namespace
        if tenant is None:
            return TenantView(
                found=False,
                ready=False,
                message=f"namespace {namespace!r} belongs to no tenant; make a Tenant whose "
                f"spec.namespace is {namespace!r}, or make the session in a tenant's namespace",
            )
        ready = conditions.find(tenant.status.conditions, conditions.READY)
        budget = conditions.find(tenant.status.conditions, conditions.BUDGET_AVAILABLE)
        maximum = tenant.spec.quota.max_running
        return TenantView(
            name=tenant.metadata.name,
            ready=ready is not None and ready.status == "True",
            suspended=tenant.spec.suspended,
            terminating=tenant.metadata.deletion_time_us is not None,
            message="its namespace is being made" if ready is None else ready.message,
            budget_exhausted=budget is not None and budget.status == "False",
            budget_message="" if budget is None else budget.message,
            position=self._position(session, maximum, now_us),
            max_running=maximum,
            priority_classes=tuple(
                name
                for name in (tenant.spec.priority_class_name, *tenant.spec.priority_classes)
                if name
            ),
            rate_card_missing=self._missing_card(session, tenant),
        )

    def _position(self, session: TrainingSession, maximum: int | None, now_us: int) -> int | None:
        """None = it may run now. The place is kept for it at once: the next look at another session may
        come before this one has written down that it took it.
        """
        if maximum is None:
            return None
        uid, places = session.metadata.uid, self.memory.places
        for expired in [each for each, until_us in places.items() if until_us <= now_us]:
            del places[expired]
        sessions = self._parsed.sessions(session.metadata.namespace)
        place = position(session, sessions, maximum, places)
        if not waits(session):
            places.pop(uid, None)
        elif place is None:
            places[uid] = now_us + PLACE_KEPT_US
        return place

    def _name_holder(self, session: TrainingSession) -> str:
        """Asked until the session is accepted: to compare each with all others is dear."""
        if conditions.is_true(session.status.conditions, conditions.ACCEPTED):
            return ""
        name, age = session_name(session), _age(session)
        for other in self._parsed.sessions(session.metadata.namespace):
            if session_name(other) != name or other.metadata.uid == session.metadata.uid:
                continue
            # Creation times have whole seconds: who was accepted already is first, whatever they say.
            accepted = conditions.is_true(other.status.conditions, conditions.ACCEPTED)
            if accepted or _age(other) < age:
                return other.metadata.name
        return ""

    # --- what it runs on -------------------------------------------------------------------------

    def _model_view(
        self,
        session: TrainingSession,
        tenant: Tenant | None,
        model: BaseModelResource | None,
    ) -> ModelView:
        name = session.spec.base_model_ref.name
        if model is None:
            return ModelView(
                found=False, ready=False, message=f"there is no base model {name!r}", profiles=()
            )
        profile = _profile(session, model)
        wanting = self._not_ready(session, tenant, model)
        allowed = model.spec.allowed_tenants.match_names
        return ModelView(
            ready=not wanting,
            message=wanting,
            deprecated=model.spec.deprecated,
            allowed=not allowed or (tenant is not None and tenant.metadata.name in allowed),
            profile_found=profile is not None,
            profiles=tuple(each.name for each in model.spec.profiles),
            workers=1 if profile is None else profile.workers,
        )

    def _not_ready(
        self,
        session: TrainingSession,
        tenant: Tenant | None,
        model: BaseModelResource,
    ) -> str:
        """Why a session cannot be made with this model here; "" = it can."""
        mount = weights_mount(model, self._options)
        if isinstance(mount, WeightsRefused):
            return mount.message
        if tenant is not None:
            missing = missing_profiles(session, tenant)
            if missing:
                return (
                    f"tenant {tenant.metadata.name!r} has no egress profile {', '.join(missing)}; "
                    "add it to the tenant's network.egressProfiles"
                )
        if model.spec.weights.hub_ref is not None:
            namespace, name = session.metadata.namespace, model.metadata.name
            return fetch_state(
                model,
                self.cache.get(CLAIMS, namespace, weights_claim_name(name)),
                self.cache.get(JOBS, namespace, fetch_job_name(name)),
            ).waits_for
        ready = conditions.find(model.status.conditions, conditions.READY)
        if ready is None:
            return f"base model {model.metadata.name!r} has not been looked at yet"
        return "" if ready.status == "True" else ready.message

    def _pins(
        self,
        session: TrainingSession,
        tenant: Tenant | None,
        model: BaseModelResource | None,
    ) -> PinnedStatus:
        if tenant is None or model is None or _profile(session, model) is None:
            return PinnedStatus()
        card = self.card_of(session, tenant)
        about = (session.metadata, tenant.metadata, model.metadata)
        key = (
            *((each.uid, each.generation) for each in about),
            session.status.workers.desired,
            card.metadata.uid if card else "",
        )
        known = self._pinned.get(session.metadata.uid)
        if known is not None and known[0] == key:
            return known[1]
        fresh = pins(_seating(session, tenant, model, self._options), card)
        self._pinned[session.metadata.uid] = (key, fresh)
        if len(self._pinned) > PINS_KEPT_MAX:
            self._pinned.popitem(last=False)
        return fresh

    def _missing_card(self, session: TrainingSession, tenant: Tenant) -> str:
        reference = session.spec.rate_card_ref or tenant.spec.rate_card_ref
        is_there = reference is None or self.card_of(session, tenant) is not None
        return "" if reference is None or is_there else reference.name

    def card_of(self, session: TrainingSession, tenant: Tenant) -> RateCard | None:
        reference = session.spec.rate_card_ref or tenant.spec.rate_card_ref
        return None if reference is None else self._parsed.card(reference.name)

    def _volume(self, session: TrainingSession) -> Volume:
        name = state_claim_name(session.metadata.name)
        claim = self.cache.get(CLAIMS, session.metadata.namespace, name)
        if claim is None:
            return Volume()
        meta = claim["metadata"]
        owners = meta.get("ownerReferences") or ()
        return Volume(
            found=True,
            deleting="deletionTimestamp" in meta,
            unflushed=labels.UNFLUSHED in (meta.get("labels") or {}),
            owned=any(each["uid"] == session.metadata.uid for each in owners),
        )


def _age(session: TrainingSession) -> tuple[int, str]:
    """Older sessions first; no two are of one age."""
    return session.metadata.creation_time_us, session.metadata.uid


def is_deleted(body: Json | None) -> bool:
    return body is not None and "deletionTimestamp" in body["metadata"]


def _seating(
    session: TrainingSession, tenant: Tenant, model: BaseModelResource, options: ChildOptions
) -> Seating:
    return Seating(
        session=session,
        tenant=tenant,
        model=model,
        attempt=session.status.attempt,
        options=options,
    )


def _profile(session: TrainingSession, model: BaseModelResource | None) -> Profile | None:
    if model is None:
        return None
    try:
        return profile_of(model, session.spec.base_model_ref.profile)
    except InvalidRequestError:
        return None
