"""Log-probabilities of the tokens of a prompt."""

from typing import Final

import torch
from torch import Tensor

from gristmill_contracts import operations
from gristmill_contracts.errors import OperationFailedError
from gristmill_contracts.operations import CheckpointRef, ComputeLogprobs, ComputeLogprobsResult
from gristmill_worker.adapter import Adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.tensors import from_torch, to_torch

HEAD_ROWS: Final = 256

TopK = list[list[tuple[int, float]]]


def not_finite(ref: CheckpointRef | None) -> OperationFailedError:
    """The error of a model whose numbers have run away; None is the base."""
    who = "the base model" if ref is None else f"checkpoint {ref.name}"
    return OperationFailedError(
        f"{who} gives log-probabilities that are not finite; its weights have grown too large: "
        "use an earlier checkpoint, and train on from there at a lower rate"
    )


@torch.inference_mode()
def compute_logprobs(
    base: BaseModel, adapter: Adapter | None, op: ComputeLogprobs
) -> ComputeLogprobsResult:
    """Entry i scores token i given those before it; entry 0 is NaN."""
    tokens = to_torch(op.prompt).to(base.device)
    with base.selected(adapter):
        hidden = base.hidden(tokens[None])
        logprobs, topk = score_prompt(base, hidden, tokens, op.topk, op.adapter)
    return ComputeLogprobsResult(logprobs=logprobs, topk=topk)


def score_prompt(
    base: BaseModel, hidden: Tensor, tokens: Tensor, topk: int, ref: CheckpointRef | None
) -> tuple[operations.Tensor, TopK | None]:
    """hidden (P, h), tokens (P,) -> float32 (P,), and the `topk` best (id, logprob) of each position.

    Raises OperationFailedError, naming `ref`, where a score is not a number.
    """
    logprobs = torch.full(tokens.shape, torch.nan)
    best: TopK = [[]]
    for start in range(0, len(tokens) - 1, HEAD_ROWS):
        rows = hidden[start : min(start + HEAD_ROWS, len(tokens) - 1)]
        after = slice(start + 1, start + 1 + len(rows))
        scores = torch.log_softmax(base.head.logits(rows), dim=-1)
        logprobs[after] = scores.gather(1, tokens[after, None])[:, 0].cpu()
        if topk:
            values, ids = scores.topk(min(topk, scores.shape[1]), dim=-1)
            best += [
                list(zip(one_ids, one_values, strict=True))
                for one_ids, one_values in zip(ids.tolist(), values.tolist(), strict=True)
            ]
    if bool(torch.isnan(logprobs[1:]).any()):
        raise not_finite(ref)
    return from_torch(logprobs), best if topk else None
