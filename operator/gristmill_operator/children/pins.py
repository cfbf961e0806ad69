"""What a session that starts now is held to from then on, whatever the operator or its settings become."""

from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.session import PinnedStatus
from gristmill_operator.children.manifest import hash_of
from gristmill_operator.children.pods import template_hash
from gristmill_operator.children.seating import Seating
from gristmill_operator.children.weights import WeightsRefused, weights_mount


def pins(seating: Seating, card: RateCard | None) -> PinnedStatus:
    """`seating.session` is taken as not pinned yet. `card` None = its usage has no price."""
    mount = weights_mount(seating.model, seating.options)
    return PinnedStatus(
        base_model_uid=seating.model.metadata.uid,
        image=seating.model.spec.image,
        meter_image=seating.options.images.meter,
        rate_card_uid=card.metadata.uid if card else "",
        rate_card_hash=card_hash(card) if card else "",
        template_hash="" if isinstance(mount, WeightsRefused) else template_hash(seating, mount),
    )


def card_hash(card: RateCard) -> str:
    """Of the whole text of the prices."""
    return hash_of(card.spec.model_dump(mode="json", by_alias=True))
