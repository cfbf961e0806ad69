"""Twenty and more kill -9 during one run: the same losses to the last bit, the same bill."""

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.books import Books
from gristmill_testing.crash_campaign import PARTS, plan, train
from gristmill_testing.instance import RunningGristmill
from gristmill_testing.mixed_run import run_mixed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("recorded"),
]

STEPS = 60
SEED = 7
KILLS_EACH = 6
MIXED_STEPS = 20
SHAPE = {"datums": 24, "length": 48}


def test_the_plan_is_a_pure_function_of_its_seed() -> None:
    kills = plan(SEED, STEPS, KILLS_EACH)
    assert kills == plan(SEED, STEPS, KILLS_EACH)
    assert kills != plan(SEED + 1, STEPS, KILLS_EACH)
    assert len({kill.step for kill in kills}) == KILLS_EACH * len(PARTS)


def test_a_run_with_twenty_kills_equals_an_undisturbed_one(
    service: sdk.ServiceClient,
    client: sdk.TrainingClient,
    instance: RunningGristmill,
    books: Books,
) -> None:
    start = client.save_state().result().model_package_arn
    assert start is not None
    calm = train(client, STEPS, [], instance.kill, **SHAPE)
    with service.create_training_client_from_state_with_optimizer(start) as disturbed:
        rough = train(disturbed, STEPS, plan(SEED, STEPS, KILLS_EACH), instance.kill, **SHAPE)
        print(rough.log())
        assert len(rough.landed) >= 20
        assert all(rough.kills_of()[part] >= 4 for part in PARTS)
        assert rough.kills_inside().total() >= 10
        assert all(rough.kills_inside()[part] >= 1 for part in PARTS)
        assert rough.losses == calm.losses
        assert rough.digests == calm.digests
        expected = {"prefill": 0, "cached_prefill": 0, "sample": 0, "train": calm.tokens}
        for name in (client.training_session_name, disturbed.training_session_name):
            books.expect(name, expected)
            books.expect_no_difference(name)


def test_a_mixed_run_with_twelve_kills_equals_an_undisturbed_one(
    service: sdk.ServiceClient,
    client: sdk.TrainingClient,
    instance: RunningGristmill,
    books: Books,
) -> None:
    """Samples, scores, saves and loads as well: the same tokens and numbers, billed once."""
    start = client.save_state().result().model_package_arn
    assert start is not None
    calm = run_mixed(client, MIXED_STEPS, [], instance.kill)
    with service.create_training_client_from_state_with_optimizer(start) as disturbed:
        rough = run_mixed(disturbed, MIXED_STEPS, plan(SEED, MIXED_STEPS, each=3), instance.kill)
        assert len(rough.landed) >= 8
        assert rough.seen == calm.seen
        assert rough.bill == calm.bill
        for name in (client.training_session_name, disturbed.training_session_name):
            books.expect(name, calm.bill.as_dict())
            books.expect_no_difference(name)
