"""Each API's own defaults of the optimizer, as its specification states them."""

import pytest

from gristmill_contracts import limits
from gristmill_contracts.operations import OptimStep
from gristmill_contracts.optimizer_defaults import SAGEMAKER, TINKER, OptimizerDefaults


def test_the_two_apis_disagree_as_they_are_documented() -> None:
    assert OptimizerDefaults(
        learning_rate=None, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0,
        grad_clip_norm=1.0, lora_plus_lr_ratio=1.0,
    ) == SAGEMAKER  # fmt: skip
    assert OptimizerDefaults(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0,
        grad_clip_norm=0.0, lora_plus_lr_ratio=1.0,
    ) == TINKER  # fmt: skip


def test_they_have_the_fields_of_a_step() -> None:
    assert OptimizerDefaults.__struct_fields__ == OptimStep.__struct_fields__


@pytest.mark.parametrize("defaults", [SAGEMAKER, TINKER], ids=["sagemaker", "tinker"])
def test_every_default_is_one_that_a_client_may_send(defaults: OptimizerDefaults) -> None:
    assert limits.EPS_MIN <= defaults.eps <= limits.EPS_MAX
    assert max(defaults.beta1, defaults.beta2) <= limits.BETA_MAX
    assert 0 <= defaults.grad_clip_norm <= limits.GRAD_CLIP_NORM_MAX
    assert 0 <= defaults.weight_decay <= limits.WEIGHT_DECAY_MAX
    assert (defaults.learning_rate or 0.0) <= limits.LEARNING_RATE_MAX
