"""Metrics under both wires' names."""

from gristmill_contracts.metric_names import TINKER, sagemaker_name, tinker_name

REDUCTIONS = ("sum", "mean", "min", "max", "slack", "unique", "hash2")
"""Those that Tinker's client folds chunks by."""


def test_sums_fold_as_sums_and_means_as_means() -> None:
    assert tinker_name("loss_sum") == "loss:sum"
    assert tinker_name("tokens") == "tokens:sum"
    assert tinker_name("ratio_mean") == "ratio:mean"
    assert tinker_name("something_new") == "something_new:mean"
    for ours, theirs in TINKER.items():
        name, _, reduction = theirs.partition(":")
        assert reduction in REDUCTIONS
        assert ours in (name, f"{name}_{reduction}")


def test_sagemakers_names_are_verls() -> None:
    assert sagemaker_name("tokens") == "global_token_num"
    assert sagemaker_name("kl_q_p_mean") == "actor/ppo_kl"
    assert sagemaker_name("clip_fraction") == "actor/pg_clipfrac"
    assert sagemaker_name("grad_norm") == "actor/grad_norm"
