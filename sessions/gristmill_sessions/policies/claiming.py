"""How a session of a cluster comes to its first attempt: accepted, known to the ledger, given a place."""

from typing import Any, Final

from gristmill_contracts import conditions, labels
from gristmill_contracts.conditions import condition
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import QueueStatus, WorkersStatus
from gristmill_sessions.attempts import cluster_of, is_started, ranks
from gristmill_sessions.cluster import ModelView, TenantView
from gristmill_sessions.identity import session_name
from gristmill_sessions.observed import Adopt, Observed, Plan, Register
from gristmill_sessions.policies.unserved import unserved

ASK_AGAIN_S: Final = 5


def adoption(observed: Observed) -> Plan | None:
    """Identity, finalizer and whose it is come before anything that could need them."""
    meta, tenant = observed.session.metadata, cluster_of(observed).tenant
    labelled = not tenant.found or meta.labels.get(labels.TENANT) == tenant.name
    if (
        labelled
        and labels.METERING_FLUSH in meta.finalizers
        and labels.SESSION_ID in meta.annotations
    ):
        return None
    return Plan(policy="adoption", actions=(Adopt(),), more=True)


def acceptance(observed: Observed) -> Plan | None:
    """What can never run here as it stands waits, and says why. Asked before the first attempt only."""
    if observed.attempt > 0:
        return None
    found = _tenant_refuses(observed) or _model_refuses(observed) or _prices_refuse(observed)
    found = found or _spec_refuses(observed) or _priority_refuses(observed)
    found = found or _name_refuses(observed)
    if found is None:
        return None
    # Nobody tells a session of the end of another one.
    asks = cluster_of(observed).name_holder != ""
    return Plan(
        policy="acceptance",
        conditions=(condition(conditions.ACCEPTED, False, *found), *not_started(observed)),
        status={"queue": None},
        again_at_us=observed.now_us + ASK_AGAIN_S * 1_000_000 if asks else None,
    )


def _tenant_refuses(observed: Observed) -> tuple[str, str] | None:
    tenant: TenantView = cluster_of(observed).tenant
    namespace = observed.session.metadata.namespace
    if not tenant.found:
        return (
            "TenantNotFound",
            f"namespace {namespace!r} belongs to no Tenant; create one whose spec.namespace is {namespace!r}, "
            "or create the session in a tenant's namespace",
        )
    if tenant.terminating:
        return (
            "TenantTerminating",
            f"tenant {tenant.name!r} is being deleted; no session starts any more",
        )
    if tenant.suspended:
        return (
            "TenantSuspended",
            f"tenant {tenant.name!r} is suspended; the session starts when its spec.suspended is false",
        )
    if not tenant.ready:
        why = tenant.message or "its namespace is being prepared"
        return "TenantNotReady", f"tenant {tenant.name!r} is not ready: {why}"
    return None


def _model_refuses(observed: Observed) -> tuple[str, str] | None:
    model: ModelView = cluster_of(observed).model
    ref, tenant = observed.session.spec.base_model_ref, cluster_of(observed).tenant
    if not model.found:
        return (
            "ModelNotFound",
            f"there is no BaseModel {ref.name!r}; create it, or name one of `kubectl get basemodels`",
        )
    if not model.allowed:
        return (
            "ModelNotAllowed",
            f"BaseModel {ref.name!r} is not open to tenant {tenant.name!r}; add it to the model's "
            "spec.allowedTenants, or name another model",
        )
    if model.deprecated:
        return (
            "ModelDeprecated",
            f"BaseModel {ref.name!r} takes no new sessions; name its successor",
        )
    if not model.profile_found:
        names = ", ".join(sorted(model.profiles)) or "none"
        return (
            "ProfileNotFound",
            f"BaseModel {ref.name!r} has no profile {ref.profile!r}; it has: {names}",
        )
    return None


def _prices_refuse(observed: Observed) -> tuple[str, str] | None:
    """A misspelt name would be usage without a price, and the card of a session never changes."""
    name = cluster_of(observed).tenant.rate_card_missing
    if not name:
        return None
    return (
        "RateCardNotFound",
        f"there is no RateCard {name!r} to price the session by; create it, or name one of `kubectl get "
        "ratecards` in spec.rateCardRef of the Tenant, or of a new session",
    )


def _spec_refuses(observed: Observed) -> tuple[str, str] | None:
    spec = observed.session.spec
    if spec.full is not None:
        return (
            "FullTrainingNotServed",
            "spec.full is not served yet; create the session with spec.lora instead",
        )
    if spec.desired_state == "Parked":
        return "ParkingNotServed", PARKING
    asked = unserved(spec)
    return ("FieldNotServed", f"{asked}. Create the session again so") if asked else None


def _priority_refuses(observed: Observed) -> tuple[str, str] | None:
    """Pods of a higher class push others aside: which ones a tenant may use, the platform's team says."""
    name, tenant = observed.session.spec.priority_class_name, cluster_of(observed).tenant
    if not name or name in tenant.priority_classes:
        return None
    known = ", ".join(tenant.priority_classes) or "none"
    return (
        "PriorityNotAllowed",
        f"spec.priorityClassName is {name!r}, which tenant {tenant.name!r} does not have; it has: {known}. Have "
        f"{name!r} added to the Tenant's spec.priorityClasses: the session starts then. Or create it again with "
        "another class, or without",
    )


def _name_refuses(observed: Observed) -> tuple[str, str] | None:
    """Clients name a session by its display name, and its checkpoints lie under it."""
    holder = cluster_of(observed).name_holder
    if not holder:
        return None
    return (
        "NameTaken",
        f"TrainingSession {holder!r} of this namespace is called {session_name(observed.session)!r}, too: "
        "clients could not tell them apart. Delete this one and choose another spec.displayName, or "
        "delete the other; this one starts then",
    )


PARKING: Final = (
    "spec.desiredState Parked is not served yet: the session keeps what it has; set it to Running, or to "
    "Stopped to end the session"
)


def registration(observed: Observed) -> Plan | None:
    """Nothing starts before the ledger knows whom to bill. What started goes on without the ledger."""
    known = conditions.is_true(observed.conditions, conditions.LEDGER_REGISTERED)
    if observed.registered or known:
        return None
    registering = condition(
        conditions.LEDGER_REGISTERED,
        False,
        "RegistrationFailed" if observed.error else "Registering",
        f"the ledger did not take the session, it is tried again: {observed.error}"
        if observed.error
        else "the ledger is told of the session",
    )
    return Plan(
        policy="registration",
        actions=(Register(),),
        conditions=(_accepted(), registering, *not_started(observed)),
        more=True,
    )


def claim(observed: Observed) -> Plan | None:
    """The number of the first attempt. It is written down before any pod is made."""
    if observed.attempt > 0:
        return None
    held = _not_yet(observed)
    if held is not None:
        return held
    beat = observed.heartbeat
    # A ledger that knows attempts of a session without a status: it was restored from a backup.
    attempt = 1 if beat is None else beat.view.attempt + 1
    count = ranks(observed)
    status: dict[str, Any] = {  # Any: fields of the status
        "attempt": attempt,
        "queue": None,
        "workers": WorkersStatus(desired=count),
        "pinned": observed.session.status.pinned or cluster_of(observed).pins,
    }
    return Plan(
        policy="claim",
        conditions=(
            *standing(),
            condition(
                conditions.PODS_READY,
                False,
                "Creating",
                f"{count} pods of attempt {attempt} are being made",
            ),
            *not_started(observed),
        ),
        status=status,
    )


def _not_yet(observed: Observed) -> Plan | None:
    """Why an accepted session gets no attempt now."""
    cluster, name = cluster_of(observed), observed.session.spec.base_model_ref.name
    tenant, model = cluster.tenant, cluster.model
    queue: QueueStatus | None = None
    if not cluster.ledger_read:
        reason, message = (
            "LedgerUnreachable",
            "what the ledger knows of the session could not be read yet",
        )
    elif not model.ready:
        why = model.message or "its weights are being prepared"
        reason, message = "WaitingForModel", f"BaseModel {name!r} is not ready: {why}"
    elif tenant.budget_exhausted:
        said = f": {tenant.budget_message}" if tenant.budget_message else ""
        reason = "BudgetExhausted"
        message = f"the budget of tenant {tenant.name!r} is used up{said}. The session starts once it is raised"
    elif tenant.position is not None:
        reason = "Queued"
        message = (
            f"position {tenant.position} in the queue of tenant {tenant.name!r}: quota.maxRunning of "
            f"{tenant.max_running} sessions run. It starts when one of them ends, or the quota is raised"
        )
        queue = QueueStatus(position=tenant.position, reason=message[:1024])
    else:
        return None
    return Plan(
        policy="queue",
        conditions=(
            _accepted(),
            _registered(),
            condition(conditions.QUOTA_RESERVED, False, reason, message),
            *not_started(observed),
        ),
        status={"queue": queue},
        again_at_us=None if cluster.ledger_read else observed.now_us + ASK_AGAIN_S * 1_000_000,
    )


# --- what several policies say -------------------------------------------------------------------


def standing() -> tuple[Condition, ...]:
    """Of a session that has an attempt."""
    reserved = condition(
        conditions.QUOTA_RESERVED, True, "Reserved", "the session may hold its pods"
    )
    return _accepted(), _registered(), reserved


def not_started(observed: Observed) -> tuple[Condition, ...]:
    """Of one that never served. Started is for good, whatever else was lost of the status."""
    if is_started(observed):
        return ()
    waits = "the session has not started yet; the other conditions say what it waits for"
    return (
        condition(conditions.STARTED, False, "NotStarted", waits),
        condition(conditions.READY, False, "NotStarted", waits),
        condition(conditions.SERVING, False, "NotStarted", waits),
    )


def _accepted() -> Condition:
    return condition(conditions.ACCEPTED, True, "Valid", "tenant, model and spec fit")


def _registered() -> Condition:
    return condition(
        conditions.LEDGER_REGISTERED, True, "Registered", "the ledger knows whom to bill"
    )
