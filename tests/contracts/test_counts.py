"""Tokens of an operation, from its request and its result alone."""

from gristmill_contracts import operations as ops
from gristmill_contracts.usage import Counts


def sampled(*lengths: int, prompt: int, cached: int) -> Counts:
    """What a group of samples counts that drew so many tokens each."""
    operation = ops.Sample(
        prompt=ops.tensor("int64", list(range(prompt))),
        messages=None,
        num_samples=len(lengths),
        params=ops.SamplingParams(
            max_tokens=100, temperature=1.0, top_k=-1, top_p=1.0, seed=1, stop=None
        ),
        include_prompt_logprobs=False,
        topk_prompt_logprobs=0,
        include_text=False,
        adapter=None,
    )
    sequences = [
        ops.SampledSequence(
            tokens=ops.tensor("int64", [7] * length),
            logprobs=ops.tensor("float32", [-1.0] * length),
            stop_reason="stop",
            text=None,
        )
        for length in lengths
    ]
    result = ops.SampleResult(
        sequences=sequences,
        prompt_logprobs=None,
        topk_prompt_logprobs=None,
        prompt_tokens=prompt,
        cached_tokens=cached,
    )
    return ops.count_result(operation, result)


def test_f02_a_prompt_is_counted_by_what_was_computed_of_it() -> None:
    """59 tokens for two samples, 48 of them from the cache: 11 were computed, and 118 in all."""
    counts = sampled(20, 20, prompt=59, cached=48)
    assert counts == Counts(prefill=11, cached_prefill=107, sample=40)
    assert counts.prefill + counts.cached_prefill == 2 * 59


def test_f02_without_a_cache_a_group_computes_its_prompt_once() -> None:
    assert sampled(1, 2, 3, prompt=10, cached=0) == Counts(prefill=10, cached_prefill=20, sample=6)
