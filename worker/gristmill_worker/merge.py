"""The base model with an adapter added to its weights, as a folder that transformers loads."""

from pathlib import Path

import torch
from safetensors import SafetensorError

from gristmill_worker.adapter import Adapter
from gristmill_worker.base_model import BaseModel


@torch.no_grad()
def write_merged(base: BaseModel, adapter: Adapter, folder: Path) -> None:
    """Weights, config and tokenizer: W + (alpha / r) B A of every layer, summed in float32, rounded once.

    The weights are read anew: the worker's own may be fused or packed. Embeddings are untouched, so that
    tied ones stay tied. Raises OSError.
    """
    folder.mkdir(parents=True)
    from transformers import AutoModelForCausalLM  # as slow to import as torch, and rarely needed

    model = AutoModelForCausalLM.from_pretrained(
        base.folder, dtype=base.dtype, local_files_only=True
    )
    for name, (a, b) in zip(base.names, adapter.layout.views(adapter.weights), strict=True):
        weight = model.get_submodule(name).weight
        update = (b @ a).cpu() * adapter.scale
        weight.copy_(weight.float() + (update.t() if base.transposed else update))
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error
    base.tokenizer.save_pretrained(folder)
    as_others = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(as_others)  # safetensors makes its own private, whatever the umask
