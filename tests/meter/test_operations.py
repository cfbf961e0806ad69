"""One operation after another through a meter: what runs, what is told, what is billed."""

from gristmill_contracts import operations as ops
from gristmill_contracts.usage import Counts
from gristmill_testing.meter_world import (
    World,
    compute_logprobs,
    forward,
    forward_backward,
    optim_step,
    sample,
    save_weights,
)


async def test_a_training_operation_runs_and_is_billed_at_its_result(world: World) -> None:
    view = await world.train(1, forward_backward(tokens=7))
    assert view.state == "Completed"
    assert view.counts == Counts(train=7)
    assert isinstance(view.result, ops.ForwardResult)
    await world.settled()
    (event,) = world.ledger.of("train", 1)
    assert (event.kind, event.outcome, event.counts) == ("usage", "completed", Counts(train=7))
    assert event.op_start_us <= event.op_end_us


async def test_every_kind_of_operation_is_counted_by_its_rule(world: World) -> None:
    await world.train(1, forward(tokens=3))
    await world.train(2, forward_backward(tokens=5))
    await world.train(3, optim_step())
    await world.train(4, save_weights())
    await world.sample(sample(prompt=6, tokens=8, samples=3))
    await world.sample(compute_logprobs(prompt=11))
    await world.settled()
    assert world.ledger.billed() == Counts(train=8, prefill=6 + 11, cached_prefill=12, sample=24)
    assert world.session.view().counts == world.ledger.billed()
    assert [event.producer_seq for event in world.ledger.events] == [1, 2, 3, 4, 5, 6]
