"""Says of each base model whether its weights and devices are there, and has weights of the hub fetched.

Weights are fetched where somebody wants them: into the namespace of each tenant that has a session of the
model. A claim cannot be shared between namespaces, and a token of the hub never reaches a session.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts import conditions, labels
from gristmill_contracts.base_model import BaseModelResource, HubWeights
from gristmill_contracts.conditions import condition
from gristmill_contracts.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import TERMINAL_STATES
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.units import now_us
from gristmill_operator.children.fetch import (
    FILLED,
    TOKEN_ENTRY,
    FetchState,
    fetch_job,
    fetch_state,
    fetch_token,
    weights_claim,
)
from gristmill_operator.children.manifest import asked
from gristmill_operator.children.namespace import namespace_name
from gristmill_operator.children.options import ChildOptions, child_options
from gristmill_operator.children.seating import fetch_job_name, weights_claim_name
from gristmill_operator.children.weights import WeightsRefused, fetched_folder, weights_mount
from gristmill_operator.codec import model_from, status_patch
from gristmill_operator.devices import offered_devices
from gristmill_operator.kinds import (
    CLAIMS,
    JOBS,
    MODELS,
    NAMESPACES,
    NODES,
    SECRETS,
    SESSIONS,
)
from gristmill_operator.parsed import Parsed
from gristmill_operator.problems import AlreadyExistsError
from gristmill_operator.seams import Cache, Cluster, Json, Recorder
from gristmill_operator.settings import OperatorSettings

AGAIN_S: Final = 15.0
REFUSALS: Final = (ForbiddenError, InvalidRequestError, NotFoundError, OverloadedError)


@dataclass(slots=True, kw_only=True)
class ModelReconciler:
    """The implementation of `seams.Reconciler` for BaseModels."""

    cluster: Cluster
    cache: Cache
    ledger: object
    key: bytes
    recorder: Recorder
    settings: OperatorSettings
    clock: Callable[[], int] = now_us
    _options: ChildOptions = field(init=False)
    _parsed: Parsed = field(init=False)

    def __post_init__(self) -> None:
        self._options = child_options(self.settings)
        self._parsed = Parsed(cache=self.cache)

    async def reconcile(self, name: str) -> float | None:
        body = self.cache.get(MODELS, "", name)
        if body is None:
            return None
        model = model_from(body)
        if model.metadata.deletion_time_us is not None:
            return None
        weights = await self._weights(model)
        devices = devices_condition(model, offered_devices(self.cache.list(NODES)))
        await self._write_status(body, model, [weights, devices, ready_condition(model, weights)])
        waits = weights.status != "True" or self._waits_for_tenants(model)
        return AGAIN_S if waits else None

    # --- weights ---------------------------------------------------------------------------------

    async def _weights(self, model: BaseModelResource) -> Condition:
        mount = weights_mount(model, self._options)
        if isinstance(mount, WeightsRefused):
            return condition(conditions.WEIGHTS_AVAILABLE, False, mount.reason, mount.message)
        hub = model.spec.weights.hub_ref
        if hub is None:
            where = (
                f"pods mount the claim {mount.claim!r} of their tenant's namespace"
                if mount.claim
                else "nodes bring them along"
            )
            return condition(conditions.WEIGHTS_AVAILABLE, True, "Mounted", where)
        states = [
            (tenant, await self._fetched(tenant, model, hub)) for tenant in self._wanting(model)
        ]
        return fetch_condition(
            [(tenant.metadata.name, state) for tenant, state in states if not state.filled],
            filled=sum(state.filled for _, state in states),
        )

    def _waits_for_tenants(self, model: BaseModelResource) -> bool:
        """Somebody wants weights of the hub whose namespace is not as it should be yet."""
        if model.spec.weights.hub_ref is None:
            return False
        return any(self._tenant_of(each) is None for each in self._namespaces(model))

    def _wanting(self, model: BaseModelResource) -> list[Tenant]:
        """Tenants that have a session of the model which is not over."""
        found = [self._tenant_of(each) for each in self._namespaces(model)]
        allowed = model.spec.allowed_tenants.match_names
        return [
            tenant
            for tenant in found
            if tenant is not None and (not allowed or tenant.metadata.name in allowed)
        ]

    def _namespaces(self, model: BaseModelResource) -> list[str]:
        """Where sessions of the model are that are not over."""
        found = {
            body["metadata"]["namespace"]
            for body in self.cache.list(SESSIONS)
            if body["spec"]["baseModelRef"]["name"] == model.metadata.name
            and (body.get("status") or {}).get("state") not in TERMINAL_STATES
            and "deletionTimestamp" not in body["metadata"]
        }
        return sorted(found)

    def _tenant_of(self, namespace: str) -> Tenant | None:
        """By the mark that only the operator writes, once the namespace is as it should be."""
        body = self.cache.get(NAMESPACES, "", namespace)
        marks = {} if body is None else body["metadata"].get("annotations") or {}
        tenant = self._parsed.tenant(marks.get(labels.TENANT, ""))
        if tenant is None or namespace_name(tenant) != namespace:
            return None
        is_ready = conditions.is_true(tenant.status.conditions, conditions.NAMESPACE_READY)
        return tenant if is_ready else None

    async def _fetched(
        self, tenant: Tenant, model: BaseModelResource, hub: HubWeights
    ) -> FetchState:
        """Do the next step of one tenant's fetch. What the API refuses is told as a failure."""
        namespace, name = namespace_name(tenant), model.metadata.name
        claim = self.cache.get(CLAIMS, namespace, weights_claim_name(name))
        job = self.cache.get(JOBS, namespace, fetch_job_name(name))
        state = fetch_state(model, claim, job)
        try:
            if state.job_succeeded and claim is not None and job is not None:
                await self._finish(model, claim, job)
                return FetchState(filled=True)
            if not state.filled and job is None:
                await self._start(tenant, model, hub, claim)
        except REFUSALS as error:
            return FetchState(job_failed=True, waits_for=error.message)
        return state

    async def _start(
        self, tenant: Tenant, model: BaseModelResource, hub: HubWeights, claim: Json | None
    ) -> None:
        if claim is None:
            await self.cluster.apply(CLAIMS, asked(weights_claim(tenant, model, self._options)))
        if hub.token_secret:
            await self.cluster.apply(SECRETS, await self._token(tenant, model, hub.token_secret))
        try:
            await self.cluster.create(JOBS, fetch_job(tenant, model, hub, self._options))
        except AlreadyExistsError:
            return

    async def _token(self, tenant: Tenant, model: BaseModelResource, secret: str) -> Json:
        """Raises NotFoundError or InvalidRequestError that say which Secret is wanted."""
        namespace = self._options.system_namespace
        found = await self.cluster.get(SECRETS, namespace, secret)
        token = (found.get("data") or {}).get(TOKEN_ENTRY)
        if not token:
            raise InvalidRequestError(
                f"Secret {namespace}/{secret} has no entry {TOKEN_ENTRY!r}; put the hub's token there"
            )
        return fetch_token(tenant, model, token)

    async def _finish(self, model: BaseModelResource, claim: Json, job: Json) -> None:
        """The mark first: from then on sessions start. Then everything that was for the fetch alone goes."""
        meta = claim["metadata"]
        patch: Json = {"metadata": {"annotations": {FILLED: fetched_folder(model)}}}
        await self.cluster.merge_patch(CLAIMS, meta["namespace"], meta["name"], patch)
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        if model.spec.weights.hub_ref is not None and model.spec.weights.hub_ref.token_secret:
            try:
                token = await self.cluster.get(SECRETS, namespace, name)
                await self.cluster.delete(SECRETS, namespace, name, uid=token["metadata"]["uid"])
            except NotFoundError:
                pass
        await self.cluster.delete(JOBS, namespace, name, uid=job["metadata"]["uid"])

    # --- status ----------------------------------------------------------------------------------

    async def _write_status(
        self, body: Json, model: BaseModelResource, notes: Sequence[Condition]
    ) -> None:
        generation = model.metadata.generation
        merged = conditions.merge(
            model.status.conditions, notes, now_us=self.clock(), generation=generation
        )
        fresh = model.status.model_copy(
            update={"observed_generation": generation, "conditions": merged}
        )
        patch = status_patch(body, fresh)
        if patch is not None:
            name = model.metadata.name
            await self.cluster.merge_patch(MODELS, "", name, patch, subresource="status")


def fetch_condition(open_: Sequence[tuple[str, FetchState]], *, filled: int) -> Condition:
    """open_: tenants whose weights are not there yet. One that waits does not stop the others."""
    failed = [f"tenant {name}: {state.waits_for}" for name, state in open_ if state.job_failed]
    if failed:
        return condition(conditions.WEIGHTS_AVAILABLE, False, "FetchFailed", "; ".join(failed))
    if open_:
        said = "; ".join(f"tenant {name}: {state.waits_for}" for name, state in open_)
        return condition(conditions.WEIGHTS_AVAILABLE, False, "Fetching", said)
    if filled:
        return condition(
            conditions.WEIGHTS_AVAILABLE, True, "Fetched", f"fetched for {filled} tenants"
        )
    return condition(
        conditions.WEIGHTS_AVAILABLE, True, "OnDemand", "fetched at a tenant's first session"
    )


def devices_condition(model: BaseModelResource, offered: Iterable[str]) -> Condition:
    """Informs: a cluster that grows on demand offers a device only once pods ask for it."""
    offers = sorted(offered)
    wanted = {
        profile.device.resource_name: profile.name
        for profile in model.spec.profiles
        if profile.device is not None
    }
    missing = [name for name in wanted if name not in offers]
    if missing:
        said = ", ".join(f"{name} (profile {wanted[name]})" for name in missing)
        return condition(
            conditions.DEVICES_OFFERED,
            False,
            "ResourceNotOffered",
            f"no node offers {said}; nodes offer {', '.join(offers) or 'no devices at all'}",
        )
    if wanted:
        return condition(conditions.DEVICES_OFFERED, True, "Offered", ", ".join(sorted(wanted)))
    return condition(conditions.DEVICES_OFFERED, True, "NoneNamed", "no profile names a device")


def ready_condition(model: BaseModelResource, weights: Condition) -> Condition:
    if not model.spec.image:
        message = f"base model {model.metadata.name!r} names no worker image; set spec.image"
        return condition(conditions.READY, False, "ImageMissing", message)
    if weights.status == "True" or weights.reason in ("Fetching", "FetchFailed"):
        # Each tenant waits for its own weights.
        return condition(conditions.READY, True, "Ready")
    return condition(conditions.READY, False, weights.reason, weights.message)
