"""Asks the API server what an account may do: SubjectAccessReview, remembered for a moment."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import OverloadedError, UnavailableError
from gristmill_contracts.resources import GROUP
from gristmill_gateway.access import Verb
from gristmill_gateway.kubernetes_api import ApiServer
from gristmill_gateway.kubernetes_objects import SESSIONS, Json
from gristmill_gateway.wire_errors import AccessDeniedError

logger = logging.getLogger(__name__)

REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ACCOUNT_PREFIX: Final = "system:serviceaccount:"
RENEW_S: Final = 1.0
AWAY_S: Final = 5.0
EDIT_ROLE: Final = "gristmill-editor"


@dataclass(frozen=True, slots=True)
class Question:
    account: str
    verb: Verb
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class _Answer:
    allowed: bool
    reason: str
    asked_at: float

    def holds(self, now: float, *, lasting: bool) -> bool:
        kept_s = limits.ACCESS_LASTING_S if lasting and self.allowed else limits.ACCESS_KEPT_S
        return now - self.asked_at < kept_s


class KubernetesAccess:
    """`access.Access` by RBAC, or whatever the cluster authorizes with. To be used on one event loop."""

    def __init__(self, api: ApiServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._kept: OrderedDict[Question, _Answer] = OrderedDict()
        self._asking: dict[Question, asyncio.Task[_Answer]] = {}
        self._away_until = 0.0
        """Until then nobody waits for a new answer who has an old one to go by."""

    async def check(
        self,
        service_account: str,
        verb: Verb,
        namespace: str,
        name: str = "",
        *,
        lasting: bool = False,
    ) -> None:
        question = Question(service_account, verb, namespace, name)
        answer = self._kept.get(question)
        if answer is None or not answer.holds(self._clock(), lasting=lasting):
            if answer is not None and lasting and answer.allowed:
                answer = await self._renewed(question, answer)
            else:
                answer = await asyncio.shield(self._ask_once(question))
        if not answer.allowed:
            raise AccessDeniedError(refusal(question, answer.reason))

    async def _renewed(self, question: Question, known: _Answer) -> _Answer:
        """A new answer, if one comes soon; else the old one: work does not wait for the API server."""
        if self._clock() < self._away_until:
            return known
        try:
            return await asyncio.wait_for(asyncio.shield(self._ask_once(question)), RENEW_S)
        except (TimeoutError, UnavailableError, OverloadedError):
            self._away_until = self._clock() + AWAY_S
            return known

    def _ask_once(self, question: Question) -> asyncio.Task[_Answer]:
        """Whoever has the same question meanwhile gets the same answer."""
        task = self._asking.get(question)
        if task is None:
            task = asyncio.create_task(self._ask(question))
            self._asking[question] = task
            task.add_done_callback(lambda done: self._answered(question, done))
        return task

    def _answered(self, question: Question, done: asyncio.Task[_Answer]) -> None:
        self._asking.pop(question, None)
        if not done.cancelled() and done.exception() is not None:
            logger.info("review_unanswered", extra={"reason": str(done.exception())})

    async def _ask(self, question: Question) -> _Answer:
        asked_at = self._clock()
        status = (await self._api.create(REVIEWS, review(question))).get("status") or {}
        answer = _Answer(bool(status.get("allowed")), str(status.get("reason") or ""), asked_at)
        self._kept[question] = answer
        self._kept.move_to_end(question)
        while len(self._kept) > limits.ACCESS_KEPT_MAX:
            self._kept.popitem(last=False)
        return answer


def review(question: Question) -> Json:
    """A SubjectAccessReview. A service account is in three groups, and rights may hang on any of them."""
    namespace = question.account.removeprefix(ACCOUNT_PREFIX).partition(":")[0]
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": question.account,
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
                "system:authenticated",
            ],
            "resourceAttributes": {
                "namespace": question.namespace,
                "verb": question.verb,
                "group": GROUP,
                "resource": SESSIONS,
                "name": question.name,
            },
        },
    }


def refusal(question: Question, reason: str) -> str:
    """Who may not do what where, and what would let them."""
    account = question.account.removeprefix(ACCOUNT_PREFIX)
    why = f" ({reason})" if reason else ""
    return (
        f"User: {question.account} is not authorized to {question.verb} {SESSIONS}.{GROUP} in namespace "
        f"{question.namespace!r}{why}; let it with `kubectl -n {question.namespace} create rolebinding "
        f"{account.partition(':')[2]}-sessions --clusterrole={EDIT_ROLE} --serviceaccount={account}`"
    )
