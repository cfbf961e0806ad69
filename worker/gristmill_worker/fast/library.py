"""The compiled decode step: built once for a machine with a C++ compiler, and loaded from a folder then on."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import torch

from gristmill_worker.kept_kernels import FOLDER_VARIABLE, make_private

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("step.cpp")
FLAGS: Final = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp",
    "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma",
)  # fmt: skip
BUILD_S_MAX: Final = 300.0
"""It takes a second of a processor; others may want that too."""


@cache
def step_library() -> ctypes.CDLL | None:
    """None, with a line in the log, where there is no compiler, or not the instructions."""
    try:
        if not torch.cpu._is_avx512_bf16_supported():
            return None
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        if compiler is None:
            raise FileNotFoundError("no C++ compiler was found")
        return ctypes.CDLL(str(_built(compiler, _folder())))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        log.warning("decode_step_not_compiled", extra={"error": str(error).splitlines()[0]})
        return None


def _folder() -> Path:
    """Where torch keeps what it compiles, if that is set. Raises OSError where others may write."""
    given = os.environ.get(FOLDER_VARIABLE)
    folder = Path(given or Path(tempfile.gettempdir()) / f"gristmill-{os.getuid()}")
    make_private(folder)
    return folder


def _built(compiler: str, folder: Path) -> Path:
    version = subprocess.run(  # noqa: S603 - whatever the operator calls his compiler
        [compiler, "--version"], capture_output=True, check=True, timeout=BUILD_S_MAX
    )
    made_of = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + version.stdout)
    built = folder / f"gristmill_step_{made_of.hexdigest()[:32]}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / built.name
            subprocess.run(  # noqa: S603 - the same, on our own source
                [compiler, *FLAGS, "-o", str(made), str(SOURCE)],
                capture_output=True, check=True, timeout=BUILD_S_MAX,
            )  # fmt: skip
            made.replace(built)  # whole or not at all, whoever builds beside us
    return built
