"""Samples that are handed in without waiting, so that several of them share the worker's batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill_contracts.http import Execute, Executed, OpenSession
from gristmill_contracts.ids import TenantName
from gristmill_contracts.operations import CheckpointRef, Sample, SampledSequence, SampleResult
from gristmill_testing.local_runner import Client, datum, ref, sample

FIRST, SECOND = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"
LONG = [5 + at % 500 for at in range(600)]
"""Two whole blocks and a part."""


def ids(sequence: SampledSequence) -> list[int]:
    return [int(token) for token in sequence.tokens.tolist()]


def scores(sequence: SampledSequence) -> list[float]:
    return [float(value) for value in sequence.logprobs.tolist()]


@dataclass(slots=True)
class Asked:
    """A sample that was handed in, and its answer once there is one."""

    op: Sample
    answers: list[Executed] = field(default_factory=list)

    @property
    def result(self) -> SampleResult:
        (answer,) = self.answers
        assert isinstance(answer.result, SampleResult), answer.error
        return answer.result


def ask(client: Client, **options: Any) -> Asked:
    client.samples += 1
    asked = Asked(sample(**options))
    call = Execute(index=0, op_id=f"{client.uid}/log/{client.samples}", operation=asked.op)
    client.runner.begin(client.uid, call, asked.answers.append)
    return asked


def finish(client: Client, *all_asked: Asked) -> list[SampleResult]:
    while client.runner.sampler.busy:
        client.runner.sampler.turn()
    return [asked.result for asked in all_asked]


def trained_adapters(client: Client) -> list[CheckpointRef]:
    """Three saved versions that differ visibly."""
    saved = []
    for number in range(3):
        client.train([datum(list(range(5 + number, 25 + number))), datum([9, 8, 7])])
        client.step()
        saved.append(ref(client.save_weights()))
    return saved


def second_client(client: Client, tmp_path: Path, tenant: str = "acme") -> Client:
    opened = Client(client.runner, SECOND, str(tmp_path / "state2"))
    request = OpenSession(
        tenant=TenantName(tenant), rank=8, alpha=16, seed=0, state_dir=opened.state_dir
    )
    opened.runner.open(SECOND, request)
    return opened


def mixed(adapters: Sequence[CheckpointRef | None]) -> list[dict[str, Any]]:
    """Requests that differ in everything that may differ in a batch."""
    return [
        {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 9, "adapter": adapters[0]},
        {"prompt": [8] * 20, "seed": 2, "max_tokens": 14, "num_samples": 3, "adapter": adapters[1]},
        {"prompt": [9, 10], "seed": 3, "max_tokens": 3, "temperature": 0.0, "adapter": adapters[2]},
        {"prompt": [11, 12], "seed": 4, "max_tokens": 12, "top_k": 20, "adapter": None},
        {"prompt": [5, 6, 7, 9], "seed": 5, "max_tokens": 6, "top_p": 0.9, "adapter": adapters[0]},
        {"prompt": [14] * 70, "seed": 6, "max_tokens": 10, "temperature": 1.5, "adapter": None},
        {"prompt": [15, 16], "seed": 7, "max_tokens": 2, "num_samples": 2, "adapter": adapters[2]},
    ]
