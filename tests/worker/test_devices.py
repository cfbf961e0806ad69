"""The checks of tests/gpu, on the CPU; and what CUDA alone runs, as far as a CPU can run it."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_worker import libraries
from gristmill_worker.attended import _SdpaFunction, attended
from gristmill_worker.devices import device_of, prepare_device, strictly
from gristmill_worker.fast import attention, varlen
from gristmill_worker.runs import Run

F32, BF16 = torch.float32, torch.bfloat16
TABLE = (Run(0, 12, 2), Run(24, 5, 1))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("path", ["fast", "generic"])
def test_three_runs_give_the_same_bits(path: Any, dtype: torch.dtype, llama_dir: Path) -> None:
    assert bitwise(device_checks.three_runs(loaded(llama_dir, CPU, dtype, path)))


def test_the_comparison_of_three_runs_sees_one_bit(llama_dir: Path) -> None:
    passes = device_checks.three_runs(loaded(llama_dir, CPU, F32, "fast"))
    passes[2].gradient.view(torch.int32)[7] ^= 1
    assert not bitwise(passes)


def test_sampling_and_scoring_agree(llama_dir: Path, tmp_path: Path) -> None:
    found = device_checks.sampled_against_scored(loaded(llama_dir, CPU, F32, "fast"), tmp_path)
    assert found.numel() >= 8
    assert float(found.mean()) < 1e-5
    assert float(found.max()) < 1e-3


# --- what CUDA runs instead of the CPU's kernels -----------------------------------------------------


def by_loops(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Of varlen_attn's signature: each segment alone, each query row alone."""
    group = q.shape[1] // k.shape[1]
    assert options["enable_gqa"] == (group > 1)
    left, right = options["window_size"]
    assert right == 0
    bounds: list[int] = options["cu_seq_q"].tolist()
    out = []
    for start, end in itertools.pairwise(bounds):
        for at in range(start, end):
            first = start if left < 0 else max(start, at - left)
            keys = k[first : at + 1].repeat_interleave(group, 1)
            values = v[first : at + 1].repeat_interleave(group, 1)
            p = torch.softmax(torch.einsum("hd,jhd->hj", q[at], keys) * options["scale"], -1)
            out.append(torch.einsum("hj,jhd->hd", p, values))
    return torch.stack(out)


def test_the_bounds_of_segments() -> None:
    assert varlen.bounds_of(TABLE, CPU).tolist() == [0, 12, 24, 29]
    assert varlen.bounds_of(TABLE, CPU).dtype == torch.int32


@pytest.mark.parametrize("window", [None, 4, 12, 40])
def test_one_call_for_the_whole_stream_is_attention_by_segment(
    window: int | None, llama_dir: Path
) -> None:
    base: Any = loaded(llama_dir, CPU, F32, "fast")
    own = base.decoder.attention
    s = own.shape
    maker = torch.Generator().manual_seed(0)
    q, k, v, d_out = (
        torch.randn(29, heads, s.head_size, generator=maker)
        for heads in (s.heads, s.kv_heads, s.kv_heads, s.heads)
    )
    kept: list[Any] = []
    expected = own.forward(q, k, v, TABLE, window=window, kept=kept)
    gradients = own.backward(d_out, TABLE, kept)

    def counted(*heads: Tensor, **options: Any) -> Tensor:
        assert options["max_q"] == options["max_k"] == 12
        return by_loops(*heads, **options)

    whole = varlen.attend(q, k, v, TABLE, window=window, scale=own.scale, kernel=counted)
    assert relative(whole.out, expected) < 1e-5
    assert relative(torch.cat(whole.backward(d_out), 1), gradients) < 1e-5


def test_the_probe_takes_what_is_right_and_nothing_else() -> None:
    def off_by_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        left, right = options["window_size"]
        return by_loops(q, k, v, **{**options, "window_size": (left + (left > 0), right)})

    def across(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        ends = options["cu_seq_q"][[0, -1]]
        return by_loops(q, k, v, **{**options, "cu_seq_q": ends})

    def missing(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel")

    assert varlen.probe(CPU, BF16, 4, 2, 16, by_loops)
    assert not varlen.probe(CPU, BF16, 4, 2, 16, off_by_one)
    assert not varlen.probe(CPU, BF16, 4, 2, 16, across)
    assert not varlen.probe(CPU, BF16, 4, 2, 16, missing)
    assert not varlen.works(CPU, BF16, 4, 2, 16)


@pytest.mark.parametrize("how", ["stream", "run"])
def test_a_decoder_on_what_cuda_runs_gives_what_it_gives_here(
    how: str, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole stream in one call; or torch's attention for each long run, as where that is missing."""
    base = loaded(llama_dir, CPU, F32, "fast")
    adapter, datums = adapter_of(base), rows((550, 12, 12))
    expected = one_pass(base, adapter, datums)
    if how == "stream":
        monkeypatch.setattr(varlen, "works", lambda *_: True)
        monkeypatch.setattr(varlen, "_flash", by_loops)
    else:
        monkeypatch.setattr(attention, "differentiated_by_torch", lambda _: True)
    found = one_pass(base, adapter, datums)
    assert relative(found.logprobs, expected.logprobs) < 1e-5
    assert relative(found.gradient, expected.gradient) < 1e-5


def test_attention_as_one_node_has_torchs_gradients() -> None:
    maker = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, 7, 8, generator=maker, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    )
    options = {"attn_mask": None, "is_causal": True, "scale": 0.3}
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
    own = _SdpaFunction.apply(q, k, v, options)
    d_out = torch.randn(plain.shape, generator=maker, dtype=torch.float64)
    assert torch.equal(own, plain)
    for ours, theirs in zip(
        torch.autograd.grad(own, (q, k, v), d_out),
        torch.autograd.grad(plain, (q, k, v), d_out),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


# --- determinism ---------------------------------------------------------------------------------------


def test_a_backward_pass_of_attention_insists_on_deterministic_algorithms() -> None:
    seen: list[int] = []

    class Watching(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return q + k + v

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            seen.append(torch.get_deterministic_debug_mode())
            return upstream[0], upstream[0], upstream[0]

    prepare_device(CPU)
    done = attended(Watching.apply, *(torch.ones(2) for _ in range(3)))
    done.backward(torch.ones(2))
    assert seen == [2]  # error
    assert torch.get_deterministic_debug_mode() == 1  # warn


def test_strictness_ends_with_an_error_too() -> None:
    prepare_device(CPU)
    with pytest.raises(RuntimeError, match="by hand"), strictly():
        raise RuntimeError("by hand")
    assert torch.get_deterministic_debug_mode() == 1


def test_libraries_are_told_before_torch_is_imported_and_keep_what_was_set() -> None:
    told = {"NCCL_ALGO": "Tree"}
    libraries.tell_libraries(told)
    assert told == {**libraries.ENVIRONMENT, "NCCL_ALGO": "Tree"}
    program = "import sys, gristmill_worker.libraries, gristmill_worker.__main__; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"


@pytest.fixture(scope="module", autouse=True)
def _deterministic_as_before() -> Any:
    mode = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(mode)


def test_a_large_rank_and_one_token_are_no_exceptions(tmp_path: Path) -> None:
    base = loaded(build_tiny_llama(tmp_path / "m", seed=3), CPU, F32, "fast")
    adapter = adapter_of(base, rank=64)
    passes = [one_pass(base, adapter, rows((1,))) for _ in range(2)]
    assert bitwise(passes)


@pytest.mark.parametrize(
    ("wanted", "gpus", "local_rank", "device"),
    [
        ("auto", 0, 1, "cpu"),
        ("auto", 8, 0, "cuda:0"),
        ("auto", 8, 3, "cuda:3"),
        ("cuda", 8, 3, "cuda:3"),
        ("cuda", 1, 3, "cuda:0"),  # each process sees a GPU of its own
        ("cuda", 0, 0, "cuda"),  # torch says what is missing
        ("cpu", 8, 3, "cpu"),
    ],
)
def test_ranks_of_one_machine_take_its_gpus_in_their_order(
    wanted: str, gpus: int, local_rank: int, device: str
) -> None:
    assert device_of(wanted, gpus=gpus, local_rank=local_rank) == torch.device(device)
