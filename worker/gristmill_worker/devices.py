"""What torch is told of a device before a model is loaded, so that two runs give the same bits.

See also `libraries`, for what must be said before torch is imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def device_of(wanted: str, *, gpus: int, local_rank: int) -> torch.device:
    """auto = CUDA where there is a GPU. The ranks of one machine take its GPUs in their order."""
    if wanted == "cpu" or not gpus:
        return torch.device("cpu" if wanted == "auto" else wanted)
    return torch.device("cuda", local_rank % gpus)


def prepare_device(device: torch.device) -> None:
    """Deterministic algorithms, no autotuning, full float32. Where torch has none, it warns.

    A warning and not an error: sampling sums probabilities by an operation that has no deterministic
    kernel on CUDA. Attention, whose backward pass torch makes deterministic on request alone, is run
    under `strictly`.
    """
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    if device.type != "cuda":
        return
    if device.index is not None:
        torch.cuda.set_device(device)  # collectives and kernels that are told no other
    from torch._inductor import config  # takes a second to import, and nothing else needs it

    config.deterministic = True  # compiled kernels are chosen without timing them
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    # Split sums of a bf16 product are added in float32, as on a CPU.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@contextmanager
def strictly() -> Iterator[None]:
    """Only deterministic algorithms; RuntimeError from an operation that has none."""
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(mode=True, warn_only=False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
