"""The internal operation model: one vocabulary for every wire, every hop and the log.

Encoded as msgpack. Arrays travel as little-endian bytes, never as lists.
Wire adapters translate to these types in the gateway; meter and worker never see a wire format.
"""

import array
import sys
from typing import Final, Literal

import msgspec

from gristmill_contracts.ids import CheckpointId
from gristmill_contracts.usage import Counts

Dtype = Literal["int64", "float32"]
_TYPECODES: Final[dict[str, str]] = {"int64": "q", "float32": "f"}
ITEM_BYTES: Final[dict[str, int]] = {"int64": 8, "float32": 4}


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A dense array, row-major, little-endian. `len(data) == prod(shape) * item size`."""

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes

    def tolist(self) -> list[int] | list[float]:
        """The values in row-major order, flat."""
        values: array.array[int] | array.array[float] = array.array(_TYPECODES[self.dtype])
        values.frombytes(self.data)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()

    @property
    def size(self) -> int:
        return len(self.data) // ITEM_BYTES[self.dtype]


def tensor(
    dtype: Dtype, values: list[int] | list[float], shape: tuple[int, ...] | None = None
) -> Tensor:
    """Pack flat values. Raises OverflowError or TypeError where a value does not fit the dtype."""
    packed: array.array[int] | array.array[float] = array.array(_TYPECODES[dtype], values)
    if sys.byteorder == "big":
        packed.byteswap()
    return Tensor(dtype, shape if shape is not None else (len(values),), packed.tobytes())


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """N input tokens (int64, shape (N,)) and loss inputs whose first axis has length N.

    The server never shifts: position i is scored against `target_tokens[i]`. cross_entropy also takes
    K targets a token, `target_tokens` and `weights` (N, K); or as many as each token has:
    `target_rows` int64 (N + 1,) tells where a token's own begin and end in `target_tokens` (M,) and
    `weights` (M,), from 0 to M.
    """

    tokens: Tensor
    loss_inputs: dict[str, Tensor]


LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "dpo"]
"""What the engine knows; a wire offers those that its own specification names."""


class Forward(msgspec.Struct, frozen=True, kw_only=True, tag="forward"):
    """Score datums without touching gradients."""

    loss: LossName
    loss_config: dict[str, float]
    datums: list[Datum]


class ForwardBackward(msgspec.Struct, frozen=True, kw_only=True, tag="forward_backward"):
    """Score datums and add the gradient of the SUM over tokens and datums to the accumulator."""

    loss: LossName
    loss_config: dict[str, float]
    datums: list[Datum]


class OptimStep(msgspec.Struct, frozen=True, kw_only=True, tag="optim_step"):
    """One AdamW step over the accumulated gradients. Every value is explicit: no defaults below the wire."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """0 = no clipping."""
    lora_plus_lr_ratio: float
    """LoRA+: the rate of the B matrices is learning_rate times this."""


class SaveWeights(msgspec.Struct, frozen=True, kw_only=True, tag="save_weights"):
    """Write the adapter in the PEFT layout (merge=True: the merged base model as well)."""

    location: str
    """Folder of this checkpoint's parent, relative to the artifact store's root."""
    merge: bool
    description: str


class SaveState(msgspec.Struct, frozen=True, kw_only=True, tag="save_state"):
    """Write adapter, moments, step count, un-stepped gradients and counters."""

    location: str
    description: str


class LoadState(msgspec.Struct, frozen=True, kw_only=True, tag="load_state"):
    """Replace the session's adapter (and moments, if `with_optimizer`) by a saved state."""

    checkpoint: "CheckpointRef"
    with_optimizer: bool


class CheckpointRef(msgspec.Struct, frozen=True, kw_only=True):
    """A saved checkpoint: its id, its folder relative to the artifact root, and its public name."""

    id: CheckpointId
    path: str
    name: str
    """How the client named it (an ARN), for messages only."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    max_tokens: int
    temperature: float
    """0 = argmax."""
    top_k: int
    """-1 = off."""
    top_p: float
    """1 = off."""
    seed: int
    """Sample i draws from the counter stream (seed, i). The gateway makes one where the client gave none."""
    stop: list[str] | None
    """Strings, as well as the model's end tokens. None = the end tokens alone; an empty list = nothing stops
    a sample before `max_tokens`, not even an end token."""
    logprobs: Literal["raw", "processed"] = "raw"
    """raw = of the model itself, at temperature 1, nothing truncated: comparable with `forward`.
    processed = of the distribution that was drawn from: after temperature, top_k and top_p."""


class ChatMessage(msgspec.Struct, frozen=True, array_like=True):
    role: str
    content: str


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    """Draw `num_samples` continuations of one prompt: exactly one of `prompt` and `messages` is given."""

    prompt: Tensor | None
    messages: list[ChatMessage] | None
    """Rendered by the worker with the model's chat template, generation prompt added."""
    num_samples: int
    params: SamplingParams
    include_prompt_logprobs: bool
    topk_prompt_logprobs: int
    """0 = none."""
    include_text: bool
    adapter: CheckpointRef | None
    """None = the session's default: see meter. The meter writes the resolved value into its log."""


class ComputeLogprobs(msgspec.Struct, frozen=True, kw_only=True, tag="compute_logprobs"):
    prompt: Tensor
    topk: int
    adapter: CheckpointRef | None


class LoadWeightsForSampling(
    msgspec.Struct, frozen=True, kw_only=True, tag="load_weights_for_sampling"
):
    """Make a checkpoint the session's default for sampling."""

    adapter: CheckpointRef


TrainOperation = Forward | ForwardBackward | OptimStep | SaveWeights | SaveState | LoadState
SampleOperation = Sample | ComputeLogprobs | LoadWeightsForSampling
Operation = TrainOperation | SampleOperation


# --- results -------------------------------------------------------------------------------------


class ForwardResult(msgspec.Struct, frozen=True, kw_only=True, tag="forward"):
    """Answer of forward and forward_backward.

    outputs[i]["logprobs"]: float32, log-probability of each target, in the shape of `target_tokens`.
    metrics: plain floats. Always: `loss_sum`, `datums`, `tokens`. RL losses also: `ratio_mean`,
    `clip_fraction`, `kl_q_p_mean` (mean of q - p over positions whose weight is not 0). dpo also:
    `pair_accuracy`, `margin_mean`, `chosen_reward_mean`, `rejected_reward_mean`.
    """

    outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]


class OptimStepResult(msgspec.Struct, frozen=True, kw_only=True, tag="optim_step"):
    """metrics: `grad_norm` (before clipping), `update_norm`, `step` (1 = first), `tokens` (since the last step)."""

    metrics: dict[str, float]


class SaveResult(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """Facts of the written checkpoint; `path` is its folder relative to the artifact root."""

    checkpoint_id: CheckpointId
    kind: Literal["weights", "state"]
    path: str
    rank: int
    alpha: int
    size_bytes: int
    manifest_sha256: str
    group: str = ""
    """Checkpoint group, and the version in it: filled by the meter from the ledger's registration."""
    version: int = 0


class LoadStateResult(msgspec.Struct, frozen=True, kw_only=True, tag="load_state"):
    rank: int
    alpha: int


class SampledSequence(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Tensor
    """int64 (M,). The stop token, if one ended it, is last."""
    logprobs: Tensor
    """float32 (M,): raw, unless `SamplingParams.logprobs` says processed."""
    stop_reason: Literal["stop", "length"]
    text: str | None
    """Decoded without special tokens, cut before a stop string; None unless asked for."""


class SampleResult(msgspec.Struct, frozen=True, kw_only=True, tag="sample", omit_defaults=True):
    """prompt_logprobs: float32 (P,), entry 0 is NaN. topk[i]: (token id, logprob) rows, [] at 0."""

    sequences: list[SampledSequence]
    prompt_logprobs: Tensor | None
    topk_prompt_logprobs: list[list[tuple[int, float]]] | None
    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt: read from the worker's prefix cache, so that nothing was computed for them."""


class ComputeLogprobsResult(msgspec.Struct, frozen=True, kw_only=True, tag="compute_logprobs"):
    """logprobs: float32 (P,), entry 0 is NaN."""

    logprobs: Tensor
    topk: list[list[tuple[int, float]]] | None


class Empty(msgspec.Struct, frozen=True, kw_only=True, tag="empty"):
    """Answer of load_weights_for_sampling."""


Result = (
    ForwardResult | OptimStepResult | SaveResult | LoadStateResult | SampleResult
    | ComputeLogprobsResult | Empty
)  # fmt: skip


def count_before(operation: Operation) -> Counts:
    """Tokens of an operation that are known exactly before it runs (training; scoring's prompt)."""
    if isinstance(operation, Forward | ForwardBackward):
        return Counts(train=sum(datum.tokens.size for datum in operation.datums))
    if isinstance(operation, ComputeLogprobs):
        return Counts(prefill=operation.prompt.size)
    return Counts()


def count_result(operation: Operation, result: Result) -> Counts:
    """Tokens of a completed operation, from the request and the result alone.

    sample: the prompt is prefilled once for the group, less what the prefix cache held of it; every
    further sequence hits the cache.
    """
    if isinstance(operation, Sample) and isinstance(result, SampleResult):
        prefill = result.prompt_tokens - result.cached_tokens
        return Counts(
            prefill=prefill,
            cached_prefill=result.prompt_tokens * operation.num_samples - prefill,
            sample=sum(sequence.tokens.size for sequence in result.sequences),
        )
    return count_before(operation)


def stream_counts(prompt_tokens: int, cached_tokens: int, sampled: int) -> Counts:
    """Of a stream so far: one continuation, `cached_tokens` of whose prompt came from the prefix cache."""
    return Counts(
        prefill=prompt_tokens - cached_tokens, cached_prefill=cached_tokens, sample=sampled
    )


def kind_of(operation: Operation) -> str:
    """The operation's name, one of `usage.OPERATION_KINDS`."""
    return str(operation.__struct_config__.tag)
