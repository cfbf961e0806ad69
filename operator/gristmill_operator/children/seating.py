"""One attempt of one session with all that its children are made of, and how they are called. Pure."""

from dataclasses import dataclass

from gristmill_contracts.base_model import BaseModelResource, Profile
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.session import PinnedStatus, TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.options import ChildOptions
from gristmill_sessions.identity import session_uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    session: TrainingSession
    tenant: Tenant
    model: BaseModelResource
    attempt: int
    options: ChildOptions

    @property
    def name(self) -> str:
        return self.session.metadata.name

    @property
    def namespace(self) -> str:
        return self.session.metadata.namespace

    @property
    def uid(self) -> SessionUid:
        return session_uid(self.session)

    @property
    def profile(self) -> Profile:
        return profile_of(self.model, self.session.spec.base_model_ref.profile)

    @property
    def workers(self) -> int:
        """How many pods: fixed at the first attempt, as `gristmill_sessions.attempts.ranks` says."""
        status, spec = self.session.status, self.session.spec
        if status.attempt > 0 and status.workers.desired > 0:
            return status.workers.desired
        return spec.workers if "workers" in spec.model_fields_set else self.profile.workers

    @property
    def pinned(self) -> PinnedStatus:
        """What the session began with, so that an upgrade changes no session that has begun."""
        return self.session.status.pinned or PinnedStatus()

    @property
    def worker_image(self) -> str:
        return self.pinned.image or self.model.spec.image

    @property
    def meter_image(self) -> str:
        return self.pinned.meter_image or self.options.images.meter


def profile_of(model: BaseModelResource, name: str) -> Profile:
    """Raises InvalidRequestError that names the profiles there are."""
    for profile in model.spec.profiles:
        if profile.name == name:
            return profile
    known = ", ".join(each.name for each in model.spec.profiles)
    raise InvalidRequestError(
        f"base model {model.metadata.name!r} has no profile {name!r}; it has {known}"
    )


def pod_name(session: str, attempt: int, rank: int) -> str:
    return f"{session}-a{attempt}-{rank}"


def attempt_secret_name(session: str, attempt: int) -> str:
    return f"{session}-a{attempt}"


def state_claim_name(session: str) -> str:
    return f"{session}-state"


def device_claims_name(session: str) -> str:
    return f"{session}-devices"


def drain_job_name(session: str, attempt: int) -> str:
    return f"{session}-drain-a{attempt}"


def weights_claim_name(model: str) -> str:
    """A session's name holds no dot, so that no session's volume is ever called the same."""
    return f"gm-weights.{model}"


def fetch_job_name(model: str) -> str:
    return f"gm-fetch-{model}"


def key_secret_name(key: str) -> str:
    return f"gristmill-key-{key}"
