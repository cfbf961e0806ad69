"""What a GPU must show: `make test-gpu`. Skipped where there is none.

The same functions run on the CPU in tests/worker/test_devices.py and test_memory.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_contracts.errors import InvalidRequestError, OutOfMemoryError
from gristmill_contracts.operations import ForwardBackward
from gristmill_testing import device_checks
from gristmill_testing.device_checks import (
    CPU,
    adapter_of,
    bitwise,
    loaded,
    one_pass,
    relative,
    rows,
)
from gristmill_testing.local_runner import Client, make_runner
from gristmill_testing.peak_memory import peak_bytes
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_worker import memory, room
from gristmill_worker.fast import varlen
from gristmill_worker.libraries import tell_libraries
from gristmill_worker.room import Room, room_on
from gristmill_worker.sizes import sizes_of

tell_libraries()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

CUDA = torch.device("cuda")
F32, BF16 = torch.float32, torch.bfloat16
PATHS = ["fast", "generic"]
HEAD = {"head_dim": 64, "hidden_size": 256, "num_hidden_layers": 4}
"""A head size that flash attention takes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("gpu") / "m", **HEAD)


@pytest.fixture(autouse=True, scope="module")
def _deterministic_as_before() -> Iterator[None]:
    mode = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(mode)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
def test_three_runs_give_the_same_bits(path: Any, dtype: torch.dtype, folder: Path) -> None:
    assert bitwise(device_checks.three_runs(loaded(folder, CUDA, dtype, path)))


@pytest.mark.parametrize("path", PATHS)
def test_float32_is_what_the_cpu_gives(path: Any, folder: Path) -> None:
    here, there = (loaded(folder, device, F32, path) for device in (CPU, CUDA))
    expected = one_pass(here, adapter_of(here), rows())
    found = one_pass(there, adapter_of(there), rows())
    assert relative(found.logprobs, expected.logprobs) < 1e-4
    assert relative(found.gradient, expected.gradient) < 1e-4


def test_bfloat16_is_near_what_the_cpu_gives_in_float32(folder: Path) -> None:
    here, there = loaded(folder, CPU, F32, "fast"), loaded(folder, CUDA, BF16, "fast")
    expected = one_pass(here, adapter_of(here), rows())
    found = one_pass(there, adapter_of(there), rows())
    assert float((found.logprobs - expected.logprobs).abs().mean()) < 0.06
    assert abs(found.loss - expected.loss) < 0.01 * abs(expected.loss)


def test_sampling_and_scoring_agree(folder: Path, tmp_path: Path) -> None:
    found = device_checks.sampled_against_scored(loaded(folder, CUDA, F32, "fast"), tmp_path)
    assert float(found.mean()) < 1e-5
    assert float(found.max()) < 1e-3


def test_varlen_attention_is_taken_where_torch_has_it() -> None:
    """Flash attention asks for compute capability 8.0."""
    if torch.cuda.get_device_capability(CUDA) < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    assert varlen.works(CUDA, BF16, 4, 2, 64)


def test_an_operation_takes_no_more_than_was_foretold(folder: Path, tmp_path: Path) -> None:
    base = loaded(folder, CUDA, BF16, "fast")
    client = Client(make_runner(base, tmp_path / "a"), "u", str(tmp_path / "s"))
    client.open()
    client.train(rows((16,)))
    client.step()
    sizes, lengths = sizes_of(base), (256, 256, 256, 256)
    batch = memory.Batch(
        lengths=lengths, targets=1, budget=2048, packed=True, world=1, rank=8, trains=True
    )
    taken = peak_bytes(lambda: client.train(rows(lengths)), CUDA)
    assert taken <= memory.batch_bytes(sizes, batch)


def test_what_does_not_fit_is_refused_and_what_was_missed_fails_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session goes on after both."""
    base = loaded(folder, CUDA, BF16, "fast")
    runner = make_runner(base, tmp_path / "a")
    client = Client(runner, "u", str(tmp_path / "s"))
    client.open()
    found = room_on(CUDA)()
    assert found is not None
    assert 0 < found <= torch.cuda.get_device_properties(CUDA).total_memory
    monkeypatch.setattr(room, "NEVER_REFUSED_BYTES", 0)
    runner.room = Room(
        sizes_of(base), budget=2048, packed=True, world=1, available=lambda: 1_000_000
    )
    with pytest.raises(InvalidRequestError, match="1000000 are available"):
        client.train(rows((900,)))
    runner.room = None
    total = torch.cuda.get_device_properties(CUDA).total_memory
    limit = torch.cuda.memory_allocated(CUDA) + 2 * 2**20
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total, CUDA)
    try:
        with pytest.raises(OutOfMemoryError, match="ran out of memory"):
            client.run(
                ForwardBackward(loss="cross_entropy", loss_config={}, datums=rows((900, 900)))
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    client.train(rows((9,)))
    client.step()
