"""A quota that the cluster does not count is asked for again: not at once, not for ever fast, never opened."""

import copy
from typing import Any

import pytest

from gristmill_contracts.errors import ForbiddenError, NotFoundError
from gristmill_contracts.resources import parse_time
from gristmill_operator.quota_count import (
    ASKED_AT,
    NOTHING,
    RECOUNT_EVERY_S,
    RECOUNT_OLD_EVERY_S,
    YOUNG_S,
    count_of,
    keep_counted,
)
from gristmill_operator.seams import Json

MADE = "2026-01-01T00:00:00Z"
SESSIONS = "count/trainingsessions.gristmill.dev"


def at(seconds: float) -> int:
    made = parse_time(MADE)
    assert isinstance(made, int)
    return made + int(seconds * 1e6)


def quota(*counted: str, asked: str | None = None) -> Json:
    bounds = {"pods": "9", SESSIONS: "5"}
    return {
        "metadata": {
            "name": "gristmill", "namespace": "gm-a", "uid": "q", "creationTimestamp": MADE,
            "annotations": {} if asked is None else {ASKED_AT: asked},
        },
        "spec": {"hard": dict(bounds)},
        "status": {"hard": dict(bounds), "used": dict.fromkeys(counted, "0")},
    }  # fmt: skip


class Api:
    """One quota, which is changed as the API server would."""

    def __init__(self, found: Json | None) -> None:
        self.quota = copy.deepcopy(found)
        self.bounds: list[dict[str, str]] = []

    async def get(self, *_: Any) -> Json:
        if self.quota is None:
            raise NotFoundError("no quota")
        return copy.deepcopy(self.quota)

    async def merge_patch(self, _kind: Any, _namespace: str, _name: str, patch: Json) -> Json:
        assert self.quota is not None
        assert patch["metadata"]["uid"] == self.quota["metadata"]["uid"]
        self.quota["metadata"]["annotations"] |= patch["metadata"].get("annotations", {})
        for name, value in patch["spec"]["hard"].items():
            if value is None:
                self.quota["spec"]["hard"].pop(name, None)
            else:
                self.quota["spec"]["hard"][name] = value
        self.bounds.append(dict(self.quota["spec"]["hard"]))
        return self.quota


def test_what_is_counted_needs_nothing() -> None:
    found = count_of(quota("pods", SESSIONS), at(1000))
    assert (found.missing, found.ask, found.again_s, found.message) == ((), False, None, "")


def test_what_is_not_counted_is_named() -> None:
    found = count_of(quota("pods"), at(1))
    assert list(found.missing) == [SESSIONS]
    assert SESSIONS in found.message
    assert found.again_s is not None
    assert not found.ask


def test_a_quota_without_any_status_is_not_counted() -> None:
    fresh = quota()
    del fresh["status"]
    assert list(count_of(fresh, at(0)).missing) == [SESSIONS, "pods"]


def test_a_cluster_is_asked_every_half_minute_and_seldom_later() -> None:
    asked, found = [], quota("pods")
    for second in range(3600):
        if count_of(found, at(second)).ask:
            asked.append(second)
            moment = f"2026-01-01T00:{second // 60:02}:{second % 60:02}Z"
            found = quota("pods", asked=moment)
    pauses = [b - a for a, b in zip([0, *asked], asked, strict=False)]
    assert set(pauses) == {RECOUNT_EVERY_S, RECOUNT_OLD_EVERY_S}
    assert len(asked) <= YOUNG_S / RECOUNT_EVERY_S + 3600 / RECOUNT_OLD_EVERY_S


async def test_asking_changes_the_bounds_and_changes_them_back_and_opens_none() -> None:
    api = Api(quota("pods"))
    found = await keep_counted(api, "gm-a", at(RECOUNT_EVERY_S))  # type: ignore[arg-type]
    assert found.ask
    before = quota()["spec"]["hard"]
    assert api.bounds == [before | {NOTHING: "0"}, before]
    again = await keep_counted(api, "gm-a", at(RECOUNT_EVERY_S + 1))  # type: ignore[arg-type]
    assert list(again.missing) == [SESSIONS]
    assert len(api.bounds) == 2


async def test_a_policy_that_lets_nobody_change_a_quota_is_waited_out() -> None:
    class Closed(Api):
        async def merge_patch(self, *_: Any) -> Json:
            raise ForbiddenError("a policy")

    found = await keep_counted(Closed(quota("pods")), "gm-a", at(RECOUNT_EVERY_S))  # type: ignore[arg-type]
    assert list(found.missing) == [SESSIONS]
    assert found.again_s


async def test_what_an_asker_left_behind_is_taken_away() -> None:
    left = quota("pods", SESSIONS)
    left["spec"]["hard"][NOTHING] = "0"
    api = Api(left)
    assert not (await keep_counted(api, "gm-a", at(1))).missing  # type: ignore[arg-type]
    assert api.bounds == [quota()["spec"]["hard"]]


async def test_a_quota_that_went_meanwhile_is_waited_for() -> None:
    found = await keep_counted(Api(None), "gm-a", at(1))  # type: ignore[arg-type]
    assert found.missing
    assert found.again_s


@pytest.mark.parametrize("text", ["", "yesterday", "2026-01-01T00:00:00"])
def test_a_mark_that_is_no_time_hinders_nothing(text: str) -> None:
    assert count_of(quota("pods", asked=text), at(RECOUNT_EVERY_S)).ask
