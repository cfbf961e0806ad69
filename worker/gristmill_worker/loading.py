"""From a prepared folder to a base model: the fast path where it serves the model, else the generic one."""

import logging
from pathlib import Path
from typing import Literal

import torch

from gristmill_contracts.errors import InvalidRequestError
from gristmill_worker.base_model import BaseModel
from gristmill_worker.facts import read_facts
from gristmill_worker.fast.model import load_fast
from gristmill_worker.fast.shape import read_config, why_not
from gristmill_worker.sharding import Sharding

log = logging.getLogger(__name__)

PathChoice = Literal["auto", "fast", "generic"]


def load_base_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    path: PathChoice = "auto",
    sharding: Sharding | None = None,
) -> BaseModel:
    """Load a prepared folder. Raises InvalidRequestError if it is not one we can run exactly."""
    try:
        facts = read_facts(folder)
    except FileNotFoundError as error:
        raise InvalidRequestError(
            f"{folder} is not a prepared model: facts.json is missing; "
            "run python -m gristmill_worker.prepare"
        ) from error
    reason = "chosen by the settings" if path == "generic" else why_not(read_config(folder))
    if reason and path == "fast":
        raise InvalidRequestError(f"the fast path does not serve {folder}: {reason}")
    if not reason:
        return load_fast(folder, facts, dtype=dtype, device=device, divider=sharding)
    if sharding is not None and sharding.required:
        raise InvalidRequestError(
            f"the base in {folder} cannot be sharded, as the fast path does not serve it: {reason}; "
            "set GRISTMILL_WORKER_BASE_WEIGHTS to replicated"
        )
    log.info("generic_path", extra={"reason": reason})
    # Imported here: the models of transformers take longer to import than torch, and the fast path has none.
    from gristmill_worker.generic import load_generic

    return load_generic(folder, facts, dtype=dtype, device=device, why=reason)
