"""What rank 0 tells the other ranks: enough to keep the same sessions in the same state."""

import msgspec
import safetensors.torch

from gristmill_contracts.http import Execute
from gristmill_worker.adapter import make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.session import Counters, Session


class Adopt(msgspec.Struct, kw_only=True, tag=True):
    """Hold this session in exactly this state. `buffers` is a safetensors file of its flat buffers."""

    uid: str
    seed: int
    rank: int
    alpha: int
    counters: Counters
    buffers: bytes


class Run(msgspec.Struct, kw_only=True, tag=True):
    """Run your share of this operation. It was found valid."""

    uid: str
    call: Execute


class Lend(msgspec.Struct, kw_only=True, tag=True):
    """Gather the sharded base along with one forward pass that rank 0 runs alone."""


class Forget(msgspec.Struct, kw_only=True, tag=True):
    """Close the session."""

    uid: str


class Finish(msgspec.Struct, kw_only=True, tag=True):
    """The team is over: end with status 0."""


Order = Adopt | Run | Lend | Forget | Finish


def adoption(session: Session) -> Adopt:
    buffers = {name: value.cpu() for name, value in session.buffers().items()}
    return Adopt(
        uid=session.uid,
        seed=session.seed,
        rank=session.adapter.rank,
        alpha=session.adapter.alpha,
        counters=session.counters,
        buffers=safetensors.torch.save(buffers),
    )


def adopted(base: BaseModel, order: Adopt) -> Session:
    """The session that the order describes. It has no folder: only rank 0 writes snapshots."""
    buffers = safetensors.torch.load(order.buffers)
    adapter = make_adapter(
        base.layout(order.rank), order.alpha, buffers["weights"],
        device=base.device, dtype=base.dtype,
    )  # fmt: skip
    m, v, gradient = (buffers[name].to(base.device) for name in ("m", "v", "gradient"))
    return Session(
        uid=order.uid, state_dir="", seed=order.seed, adapter=adapter, m=m, v=v,
        gradient=gradient, counters=order.counters,
    )  # fmt: skip
