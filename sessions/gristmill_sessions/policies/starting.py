"""How a session comes to life: adopted, accepted, registered, placed."""

from gristmill_contracts import conditions, labels
from gristmill_contracts.conditions import condition
from gristmill_sessions.observed import Adopt, Observed, Place, Plan, Register
from gristmill_sessions.policies.unserved import unserved


def adopt(observed: Observed) -> Plan | None:
    """Identity and finalizer come before anything that could need them."""
    meta = observed.session.metadata
    if labels.METERING_FLUSH in meta.finalizers and labels.SESSION_ID in meta.annotations:
        return None
    return Plan(policy="adopt", actions=(Adopt(),))


def acceptance(observed: Observed) -> Plan | None:
    """What can never run here as it stands waits, and says why. A session that started goes on."""
    if observed.seat is not None or conditions.is_true(observed.conditions, conditions.STARTED):
        return None
    spec = observed.session.spec
    name = spec.base_model_ref.name
    if not observed.model_found:
        return _refused(
            "ModelNotFound",
            f"there is no base model {name!r}; add it with `gristmill models add {name}`",
        )
    if spec.workers > observed.workers_max:
        return _refused(
            "WorkersUnsupported",
            f"workers is {spec.workers}; a session may have at most {observed.workers_max} here",
        )
    asked = unserved(spec)
    if asked:
        return _refused("FieldNotServed", f"{asked}. Create the session again so")
    if observed.tenant_suspended:
        tenant = observed.session.metadata.namespace
        return _refused(
            "TenantSuspended", f"tenant {tenant!r} is suspended until an operator lifts it"
        )
    return None


def _refused(reason: str, message: str) -> Plan:
    return Plan(
        policy="acceptance", conditions=(condition(conditions.ACCEPTED, False, reason, message),)
    )


def registration(observed: Observed) -> Plan | None:
    """Nothing starts before the ledger knows whom to bill."""
    if observed.registered:
        return None
    reason = "RegistrationFailed" if observed.error else "Registering"
    seated = observed.seat is not None
    return Plan(
        policy="registration",
        actions=(Register(),),
        conditions=()
        if seated
        else (condition(conditions.LEDGER_REGISTERED, False, reason, observed.error),),
    )


def placement(observed: Observed) -> Plan | None:
    if observed.seat is not None:
        return None
    attempt = max(1, observed.session.status.attempt)
    return Plan(
        policy="placement",
        actions=(Place(attempt),),
        conditions=(
            condition(conditions.ACCEPTED, True, "Valid"),
            condition(conditions.LEDGER_REGISTERED, True, "Registered"),
            condition(conditions.QUOTA_RESERVED, True, "Unlimited"),
            condition(
                conditions.PODS_READY,
                False,
                "StartFailed" if observed.error else "Starting",
                observed.error,
            ),
        ),
        status={"attempt": attempt},
    )
