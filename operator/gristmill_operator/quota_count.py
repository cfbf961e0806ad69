"""Whether the cluster counts what a tenant's quota bounds, and how it is asked to. Pure but for `keep_counted`.

Until it counts, the API server refuses whatever is bounded ("status unknown for quota"). The controller of
quotas learns of a new kind, as ours right after they were installed, from its look at the API 30 s apart;
a quota that it could not count before is then counted after minutes, or at once when the bounds of that
quota change. So they are changed, by a bound of what nobody can make, and changed back: never is one of
the tenant's own bounds away. (Kubernetes, pkg/controller/resourcequota: `Sync`, and the update handler
that compares spec.hard.)
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gristmill_contracts.errors import ForbiddenError, InvalidRequestError, NotFoundError
from gristmill_contracts.resources import format_time, parse_time
from gristmill_operator.children.manifest import Manifest
from gristmill_operator.children.quota import NAME
from gristmill_operator.kinds import RESOURCE_QUOTAS
from gristmill_operator.seams import Cluster

logger = logging.getLogger(__name__)

NOTHING: Final = "count/recounts.gristmill.dev"
"""The bound of what nobody can make: there is no such kind."""
ASKED_AT: Final = "gristmill.dev/recount-asked-at"
"""Annotation of the quota: when the cluster was asked last to count it."""
RECOUNT_EVERY_S: Final = 35.0
"""Longer than the controller's period: what is as old as the quota is known to it by then."""
YOUNG_S: Final = 600.0
RECOUNT_OLD_EVERY_S: Final = 300.0
"""Of a quota that was not counted for so long, the cause is not a kind that is new."""
SOON_S: Final = 1.0
LATER_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """missing: bounds that are not counted. ask: it is time to ask again. again_s: when to look again."""

    missing: Sequence[str]
    ask: bool = False
    again_s: float | None = None

    @property
    def message(self) -> str:
        """For the Tenant; "" = all is counted."""
        if not self.missing:
            return ""
        return (
            f"the cluster does not count {', '.join(self.missing)} yet, and refuses what is bounded by it "
            "until it does; it is asked again every half minute; if it stays so for minutes, see whether "
            "kube-controller-manager runs its controller of quotas"
        )


COUNTED: Final = Count(missing=())


async def keep_counted(cluster: Cluster, namespace: str, now_us: int) -> Count:
    """Look at the quota of a tenant's namespace; where its count takes its time, ask for it."""
    try:
        quota = await cluster.get(RESOURCE_QUOTAS, namespace, NAME)
    except NotFoundError:
        return Count(missing=["anything"], again_s=SOON_S)
    count = count_of(quota, now_us)
    patches = recount_patches(quota, now_us)
    if count.ask:
        logger.info("quota_not_counted", extra={"namespace": namespace, "bounds": count.missing})
    elif is_left(quota):
        patches = patches[1:]
    else:
        return count
    try:
        for patch in patches:
            await cluster.merge_patch(RESOURCE_QUOTAS, namespace, NAME, patch)
    except (ForbiddenError, InvalidRequestError) as error:
        # Somebody's policy: then it takes the minutes that it takes.
        extra = {"namespace": namespace, "reason": error.message}
        logger.warning("quota_recount_refused", extra=extra)
    return count


def count_of(quota: Manifest, now_us: int) -> Count:
    """quota: as the API server holds it. now_us: the wall clock."""
    hard = (quota.get("spec") or {}).get("hard") or {}
    status = quota.get("status") or {}
    known, used = status.get("hard") or {}, status.get("used") or {}
    bounds = [name for name in hard if name != NOTHING]
    missing = sorted(name for name in bounds if name not in known or name not in used)
    if not missing:
        return COUNTED
    since_s = (now_us - _asked_us(quota)) / 1e6
    is_young = now_us - _time_us(quota["metadata"].get("creationTimestamp")) < YOUNG_S * 1e6
    every_s = RECOUNT_EVERY_S if is_young else RECOUNT_OLD_EVERY_S
    ask = since_s >= every_s
    return Count(
        missing=missing, ask=ask, again_s=SOON_S if ask or since_s < 2 * LATER_S else LATER_S
    )


def recount_patches(quota: Manifest, now_us: int) -> list[dict[str, Any]]:  # Any: JSON
    """Two merge patches: the bounds become others, and what they were."""
    uid = quota["metadata"]["uid"]
    marks = {ASKED_AT: format_time(now_us)}
    return [
        {"metadata": {"uid": uid, "annotations": marks}, "spec": {"hard": {NOTHING: "0"}}},
        {"metadata": {"uid": uid}, "spec": {"hard": {NOTHING: None}}},
    ]


def is_left(quota: Manifest) -> bool:
    """Whoever asked last did not come to the second patch."""
    return NOTHING in ((quota.get("spec") or {}).get("hard") or {})


def _asked_us(quota: Manifest) -> int:
    """When the cluster was asked last: by making the quota, or since."""
    meta = quota["metadata"]
    asked = (meta.get("annotations") or {}).get(ASKED_AT)
    return max(_time_us(asked), _time_us(meta.get("creationTimestamp")))


def _time_us(text: object) -> int:
    """0 for what is no time: somebody wrote it there."""
    try:
        found = parse_time(text)
    except ValueError:
        return 0
    return found if isinstance(found, int) else 0
