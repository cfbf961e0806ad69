"""What libraries below torch read from the environment when they are loaded. Imports none of them."""

import os
from collections.abc import MutableMapping
from typing import Final

ENVIRONMENT: Final = {
    # cuBLAS is deterministic only with a fixed workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Else NCCL chooses by size and topology, and with the algorithm the order of summation.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    # Threads that spin for each other took 20 times as long on two cores that others use too.
    "OMP_WAIT_POLICY": "passive",
    # The vector instructions that the CPU names, and no programs compiled to try each of them: 5 s of a first
    # start. A compiler that lacks them fails at the first kernel, and then none is compiled.
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}


def tell_libraries(environment: MutableMapping[str, str] = os.environ) -> None:
    """Before torch is imported. What is set already stays."""
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)
