"""Floors and goals of the engine's speed and memory, by the row of the benchmark that measures them."""

from gristmill_testing.products import FAST_BF16
from gristmill_testing.verdicts import Bound

PEFT = "transformers + PEFT"
EAGER = "PEFT, eager attention"
COMPILED = "PEFT + torch.compile"
TRL = "TRL SFTTrainer"
PADDED, PACKED = "PEFT, padded", "PEFT, packed in one row"
ONE_BY_ONE = "one after another"

TRAINING, DECODING, END_TO_END = "training", "decode phase", "end to end"
TIMES_FLOOR = "x the GEMM floor's time"
PEAK_RSS = "GB of the worker at most"
PROMPT_RUNS = "prompt tokens run for each of the prompt"
COLD, WARM = "s to the first step, cold cache", "s to the first step, warm cache"

ADAPTERS_LENGTH = 32
"""Tokens of each adapter's request, for the row that is judged."""


def eight_adapters(length: int) -> str:
    return f"8 adapters x {length} tokens"


def bounds(bf16_over_fp32: float) -> list[Bound]:
    """`bf16_over_fp32`: how many times faster the processor multiplies bf16 than fp32."""
    fast = bf16_over_fp32 >= FAST_BF16
    train, ragged = "training 4x256 bf16", "training ragged bf16"
    found = [
        Bound(
            row=train, what="x PEFT", measure=TRAINING, peers=(PEFT,), bf16=True,
            floor=1.65 if fast else 1.4, goal=2.0 if fast else 1.6,
        ),
        Bound(row=train, what="x best peer", measure=TRAINING, bf16=True, floor=1.3, goal=1.5),
        Bound(row=train, what=TIMES_FLOOR, bf16=True, floor=2.1, goal=1.25, at_most=True),
        Bound(
            row=ragged, what="x PEFT packed", measure=TRAINING, peers=(PACKED,), bf16=True,
            floor=1.8, goal=3.0,
        ),
        Bound(row=ragged, what=PEAK_RSS, bf16=True, floor=4.2, goal=3.4, at_most=True),
        Bound(
            row="training 4x256 fp32", what="x PEFT", measure=TRAINING, peers=(PEFT,), floor=1.1,
            goal=1.2,
        ),
        Bound(
            row="request of 1x32 tokens", what="x PEFT", measure=TRAINING, peers=(PEFT,), bf16=True,
            floor=1.5, goal=2.0,
        ),
    ]  # fmt: skip
    for rows, floor, goal in ((1, 1.3, 2.0), (8, 1.8, 3.0), (32, 3.0, 5.0)):
        found += [
            Bound(
                row=f"decode B={rows}", what=f"x PEFT, {phase}", measure=phase, peers=(PEFT,),
                bf16=True, floor=floor if judged else None, goal=goal if judged else None,
            )
            for phase, judged in ((DECODING, True), (END_TO_END, False))
        ]  # fmt: skip
    shared, mixed = "32 samples of one prompt", eight_adapters(ADAPTERS_LENGTH)
    return [
        *found,
        Bound(row=shared, what=PROMPT_RUNS, floor=1.0, at_most=True),
        Bound(row=shared, what=f"x PEFT, {END_TO_END}", measure=END_TO_END, peers=(PEFT,)),
        Bound(row="8 adapters", what=f"x sequential, {ADAPTERS_LENGTH} tokens", measure=mixed,
              peers=(ONE_BY_ONE,), bf16=True, goal=1.6),
        Bound(row="first step", what=COLD, floor=30.0, goal=10.0, at_most=True),
        Bound(row="first step", what=WARM, floor=8.0, goal=3.0, at_most=True),
    ]  # fmt: skip
