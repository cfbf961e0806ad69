"""Between the wire's arrays and torch."""

from typing import Any, Final

import numpy as np
import torch

from gristmill_contracts import operations

_NUMPY: Final[dict[str, np.dtype[Any]]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}


def to_torch(value: operations.Tensor) -> torch.Tensor:
    """A copy on the CPU, in native byte order."""
    array = np.frombuffer(value.data, dtype=_NUMPY[value.dtype]).reshape(value.shape)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))


def from_torch(value: torch.Tensor) -> operations.Tensor:
    """int64 stays, everything else becomes float32."""
    dtype: operations.Dtype = "int64" if value.dtype == torch.int64 else "float32"
    array = value.detach().to("cpu", getattr(torch, dtype)).contiguous().numpy()
    return operations.Tensor(dtype, tuple(array.shape), array.astype(_NUMPY[dtype]).tobytes())
