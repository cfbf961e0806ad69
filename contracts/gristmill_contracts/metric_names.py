"""What the metrics of a result are called on each wire.

Ours are plain names. SageMaker's wire uses verl's. Tinker's carry the reduction behind a colon, by which its
client folds the chunks of one call: `mean` is weighted by the number of datums.
"""

from typing import Final

SAGEMAKER: Final = {
    "tokens": "global_token_num",
    "kl_q_p_mean": "actor/ppo_kl",
    "clip_fraction": "actor/pg_clipfrac",
}
"""`actor/` and our own name for all others. The loss is apart: a mean over datums, `actor/pg_loss`."""
TINKER: Final = {
    "loss_sum": "loss:sum",
    "datums": "datums:sum",
    "tokens": "tokens:sum",
    "ratio_mean": "ratio:mean",
    "clip_fraction": "clip_fraction:mean",
    "kl_q_p_mean": "kl_q_p:mean",
    "kl_p_ref_mean": "kl_p_ref:mean",
    "pair_accuracy": "pair_accuracy:mean",
    "margin_mean": "margin:mean",
    "chosen_reward_mean": "chosen_reward:mean",
    "rejected_reward_mean": "rejected_reward:mean",
}


def sagemaker_name(name: str) -> str:
    return SAGEMAKER.get(name, f"actor/{name}")


def tinker_name(name: str) -> str:
    """A name without a known reduction is a mean."""
    return TINKER.get(name, f"{name}:mean")
