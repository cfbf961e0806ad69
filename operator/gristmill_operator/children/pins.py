"""What a session that starts now is held to from then on, whatever the operator or its settings become."""

from dataclasses import replace

from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.session import PinnedStatus
from gristmill_operator.children.manifest import hash_of
from gristmill_operator.children.pods import template_hash
from gristmill_operator.children.seating import Seating
from gristmill_operator.children.weights import WeightsRefused, weights_mount


def pins(seating: Seating, card: RateCard | None) -> PinnedStatus:
    """Whatever the session is pinned to already is left out. `card` None = its usage has no price."""
    status = seating.session.status.model_copy(update={"pinned": None})
    session = seating.session.model_copy(update={"status": status})
    fresh = replace(seating, session=session)
    mount = weights_mount(fresh.model, fresh.options)
    return PinnedStatus(
        base_model_uid=fresh.model.metadata.uid,
        image=fresh.worker_image,
        meter_image=fresh.meter_image,
        rate_card_uid=card.metadata.uid if card else "",
        rate_card_hash=card_hash(card) if card else "",
        template_hash="" if isinstance(mount, WeightsRefused) else template_hash(fresh, mount),
    )


def card_hash(card: RateCard) -> str:
    """Of the whole text of the prices."""
    return hash_of(card.spec.model_dump(mode="json", by_alias=True))
