"""Sampling and scoring with the official SDK."""

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.sdk_loop import step

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("recorded")]


def test_a_sampling_client_follows_the_saved_weights(client: sdk.TrainingClient) -> None:
    params = sdk.SamplingParams.from_any(
        {"max_tokens": 512, "temperature": 1.0, "seed": 5, "stop": ["zzzz"]}
    )
    before = client.save_weights_and_get_sampling_client(description="before")
    first = before.sample([7, 11, 13], num_samples=2, sampling_params=params).result()
    for _ in range(5):
        step(client)
    after = client.save_weights_and_get_sampling_client(description="after")
    third = after.sample([7, 11, 13], num_samples=2, sampling_params=params).result()
    again = before.sample([7, 11, 13], num_samples=2, sampling_params=params).result()
    assert first == again
    assert first != third
    for sequence in first.sequences:
        assert isinstance(sequence, sdk.SampledSequence)
        assert sequence.stop_reason in set(sdk.StopReason)
        assert sequence.logprobs is not None
        assert len(sequence.logprobs) == len(sequence.tokens) >= 1
    after.stop()
    assert step(client) > 0, "retiring a shared sampling client must not stop the session"


def test_prompt_logprobs_agree_with_compute_logprobs(client: sdk.TrainingClient) -> None:
    prompt = [7, 11, 13, 17]
    with client.create_sampling_client() as sampler:
        answer = sampler.sample(
            prompt,
            sampling_params={"max_tokens": 512},
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        ).result()
        scored = sampler.compute_logprobs(prompt).result()
    assert scored[0] is None
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[-3:] == pytest.approx(scored[1:], abs=1e-5)
    rows = answer.topk_prompt_logprobs
    assert rows is not None
    assert [len(row) for row in rows] == [0, 3, 3, 3]
    assert all(isinstance(entry, sdk.TokenLogprob) for row in rows for entry in row)


def test_a_package_of_any_rank_is_sampled_in_a_session_of_its_own(
    service: sdk.ServiceClient, client: sdk.TrainingClient, base_model: str
) -> None:
    step(client)
    arn = str(client.save_weights_for_sampler(merge_weights=True).result().model_package_arn)
    prompt = [7, 11, 13, 17, 19]
    trained = client.create_sampling_client(model_package_arn=arn).compute_logprobs(prompt).result()
    with service.create_sampling_client(model_package_arn=arn) as sampler:
        assert sampler.compute_logprobs(prompt).result() == trained
    with service.create_sampling_client(base_model=base_model) as sampler:
        assert sampler.compute_logprobs(prompt).result() != trained
    with pytest.raises(ValueError, match="exactly one"):
        service.create_sampling_client()
