"""The base model with an adapter added to its weights, as a folder that transformers loads."""

from pathlib import Path

import torch
from torch import Tensor

from gristmill_worker.adapter import Adapter
from gristmill_worker.base_model import BaseModel


@torch.no_grad()
def merged_state(base: BaseModel, adapter: Adapter) -> dict[str, Tensor]:
    """W + (alpha / r) B A of every layer, summed in float32 and rounded once."""
    state: dict[str, Tensor] = dict(base.model.state_dict())
    for (name, layer), (a, b) in zip(
        base.layers.items(), adapter.layout.views(adapter.weights), strict=True
    ):
        update = (b @ a) * adapter.scale
        full = layer.weight.float() + (update.t() if layer.transposed else update)
        state[f"{name}.weight"] = full.to(layer.weight.dtype)
    return state


def write_merged(base: BaseModel, adapter: Adapter, folder: Path) -> None:
    """Weights, config and tokenizer. Embeddings are untouched, so that tied ones stay tied."""
    folder.mkdir(parents=True)
    base.model.save_pretrained(folder, state_dict=merged_state(base, adapter))
    base.tokenizer.save_pretrained(folder)
    as_others = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(as_others)  # safetensors makes its own private, whatever the umask
