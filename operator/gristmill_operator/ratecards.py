"""Puts each rate card's prices on record at the ledger, which keeps them when the card is gone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from gristmill_contracts import conditions
from gristmill_contracts.conditions import condition
from gristmill_contracts.errors import ConflictError, ForbiddenError, InvalidRequestError
from gristmill_contracts.price_book import PriceBook
from gristmill_contracts.rate_card import RateCard, price_book
from gristmill_contracts.resources import Condition
from gristmill_contracts.units import now_us
from gristmill_operator.codec import card_from, status_patch
from gristmill_operator.kinds import CARDS
from gristmill_operator.seams import Cache, Cluster, Json, Recorder
from gristmill_operator.settings import OperatorSettings

REFUSED_AGAIN_S: Final = 60.0


class Ledger(Protocol):
    async def put_price_book(self, book: PriceBook) -> None: ...


@dataclass(slots=True, kw_only=True)
class CardReconciler:
    """The implementation of `seams.Reconciler` for RateCards."""

    cluster: Cluster
    cache: Cache
    ledger: Ledger
    key: bytes
    recorder: Recorder
    settings: OperatorSettings
    clock: Callable[[], int] = now_us

    async def reconcile(self, name: str) -> float | None:
        """Again = the same prices: a ledger that was restored gets them once more."""
        body = self.cache.get(CARDS, "", name)
        if body is None:
            return None
        card = card_from(body)
        if card.metadata.deletion_time_us is not None:
            return None
        note = await self._record(card)
        await self._write_status(body, card, note)
        return None if note.status == "True" else REFUSED_AGAIN_S

    async def _record(self, card: RateCard) -> Condition:
        """Raises UnavailableError while the ledger is away."""
        try:
            await self.ledger.put_price_book(price_book(card))
        except (ConflictError, ForbiddenError, InvalidRequestError) as error:
            message = (
                f"the ledger refuses the prices: {error.message}. A card cannot be changed: delete it, and "
                "make one of another name"
            )
            return condition(conditions.RECORDED, False, "Refused", message)
        return condition(conditions.RECORDED, True, "Recorded")

    async def _write_status(self, body: Json, card: RateCard, note: Condition) -> None:
        generation = card.metadata.generation
        merged = conditions.merge(
            card.status.conditions, [note], now_us=self.clock(), generation=generation
        )
        fresh = card.status.model_copy(
            update={"observed_generation": generation, "conditions": merged}
        )
        patch = status_patch(body, fresh)
        if patch is not None:
            await self.cluster.merge_patch(
                CARDS, "", card.metadata.name, patch, subresource="status"
            )
