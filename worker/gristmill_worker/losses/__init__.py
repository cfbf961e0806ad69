"""Losses over the log-probabilities of targets: token-level, summed over tokens and datums.

Each gives its value and dL/dp of every token in closed form, so that one pass over the logits is
enough; dpo alone couples tokens, and needs two. Definitions: the Tinker documentation's "Losses", and the SageMaker service model's inputs.
"""

from collections.abc import Callable
from typing import Final

from torch import Tensor

from gristmill_contracts.operations import LossName
from gristmill_worker.losses.cispo import cispo
from gristmill_worker.losses.cross_entropy import cross_entropy
from gristmill_worker.losses.dro import dro
from gristmill_worker.losses.importance_sampling import importance_sampling
from gristmill_worker.losses.ppo import ppo
from gristmill_worker.losses.terms import TokenTerms

Loss = Callable[[Tensor, dict[str, Tensor], dict[str, float]], TokenTerms]

LOSSES: Final[dict[LossName, Loss]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
}
"""Of one token each; dpo is in its own module."""
REQUIRED_INPUTS: Final[dict[LossName, tuple[str, ...]]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "advantages", "logprobs"),
    "ppo": ("target_tokens", "advantages", "logprobs"),
    "cispo": ("target_tokens", "advantages", "logprobs"),
    "dro": ("target_tokens", "advantages", "logprobs"),
    "dpo": ("target_tokens", "weights", "ref_log_prob"),
}
CONFIG_KEYS: Final[dict[LossName, tuple[str, ...]]] = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
    "dpo": ("beta", "pairs"),
}
REQUIRED_CONFIG: Final[dict[LossName, tuple[str, ...]]] = {"dro": ("beta",), "dpo": ("beta",)}
INPUT_KEYS: Final = (
    "target_tokens", "target_rows", "weights", "advantages", "logprobs", "ref_log_prob", "temperature",
)  # fmt: skip
