"""A saved adapter as vLLM reads it. vLLM itself runs on accelerators alone; its rules are written down here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gristmill_testing.local_runner import Client, datum, load, make_runner

VLLM_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Of Llama-shaped models; vLLM knows the layers that it fuses by these names."""


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_a_saved_adapter_keeps_to_what_vllm_asks_of_one(
    family: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Names, shapes and options by vLLM's own rules; it serves the bare base where a name does not match."""
    base = load(family_dir(family))
    client = Client(make_runner(base, tmp_path / "a"), "u", "")
    client.open()
    client.train([datum(range(10, 40))])
    client.step()
    folder = tmp_path / "a" / client.save_weights().path
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (client.rank, client.alpha)
    refused = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "fan_in_fan_out")
    assert not any(config.get(name) for name in refused)
    assert config["bias"] == "none"
    assert set(config["target_modules"]) == VLLM_MODULES
    assert not (folder / "adapter_model.bin").exists()
    tensors = load_file(folder / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(family_dir(family), dtype=torch.float32)
    expected = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in VLLM_MODULES:
            key = f"base_model.model.{name}"
            expected[f"{key}.lora_A.weight"] = (client.rank, module.in_features)
            expected[f"{key}.lora_B.weight"] = (module.out_features, client.rank)
    assert {name: tuple(value.shape) for name, value in tensors.items()} == expected
    assert all(bool(value.any()) for value in tensors.values())
