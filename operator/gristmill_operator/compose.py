"""Eyes, hands and the reconcilers of what is not a session, put together."""

from gristmill_contracts.units import now_us
from gristmill_operator.apply import ClusterHands
from gristmill_operator.memory import Memory
from gristmill_operator.models import ModelReconciler
from gristmill_operator.observe import ClusterObserver
from gristmill_operator.parsed import Parsed
from gristmill_operator.parts import Foundation, Parts
from gristmill_operator.ratecards import CardReconciler
from gristmill_operator.tenants import TenantReconciler


def compose(base: Foundation) -> Parts:
    memory, parsed = Memory(), Parsed(cache=base.cache)
    return Parts(
        observer=ClusterObserver(
            cache=base.cache,
            heartbeats=base.heartbeats,
            settings=base.settings,
            memory=memory,
            parsed=parsed,
        ),
        read=parsed.session_of,
        hands=ClusterHands(
            cluster=base.cluster,
            cache=base.cache,
            ledger=base.ledger,
            key=base.key,
            settings=base.settings,
            memory=memory,
        ),
        others={
            "Tenant": TenantReconciler(
                cluster=base.cluster,
                cache=base.cache,
                ledger=base.ledger,
                key=base.key,
                recorder=base.recorder,
                settings=base.settings,
                clock=now_us,
            ),
            "BaseModel": ModelReconciler(
                cluster=base.cluster,
                cache=base.cache,
                ledger=base.ledger,
                key=base.key,
                recorder=base.recorder,
                settings=base.settings,
                clock=now_us,
            ),
            "RateCard": CardReconciler(
                cluster=base.cluster,
                cache=base.cache,
                ledger=base.ledger,
                key=base.key,
                recorder=base.recorder,
                settings=base.settings,
                clock=now_us,
            ),
        },
        forget=memory.forget,
    )
