"""Asks the API server what an account may do: SubjectAccessReview, remembered for a moment."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import ForbiddenError
from gristmill_contracts.resources import GROUP
from gristmill_gateway.access import Verb
from gristmill_gateway.kubernetes_api import ApiServer
from gristmill_gateway.kubernetes_objects import SESSIONS, Json

REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ACCOUNT_PREFIX: Final = "system:serviceaccount:"
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
    until: float


class KubernetesAccess:
    """`access.Access` by RBAC, or whatever the cluster authorizes with."""

    def __init__(self, api: ApiServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._kept: OrderedDict[Question, _Answer] = OrderedDict()

    async def check(self, service_account: str, verb: Verb, namespace: str, name: str = "") -> None:
        question = Question(service_account, verb, namespace, name)
        answer = self._kept.get(question)
        if answer is None or answer.until <= self._clock():
            answer = await self._ask(question)
        if not answer.allowed:
            raise ForbiddenError(refusal(question, answer.reason))

    async def _ask(self, question: Question) -> _Answer:
        asked_at = self._clock()
        status = (await self._api.create(REVIEWS, review(question))).get("status") or {}
        answer = _Answer(
            bool(status.get("allowed")),
            str(status.get("reason") or ""),
            asked_at + limits.ACCESS_KEPT_S,
        )
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
