"""Tiny models and runners; torch on one thread."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gristmill_testing import tiny_models
from gristmill_testing.local_runner import Client, load, make_runner
from gristmill_worker.base_model import BaseModel
from gristmill_worker.runner import Runner

FAMILIES = ("llama", "qwen2", "mistral", "gpt2", "falcon")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def family_dir(models_dir: Path) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, made once."""

    def find(family: str) -> Path:
        folder = models_dir / family
        if not folder.exists():
            getattr(tiny_models, f"build_tiny_{family}")(folder)
        return folder

    return find


@pytest.fixture(scope="session")
def llama_dir(family_dir: Callable[[str], Path]) -> Path:
    return family_dir("llama")


@pytest.fixture(scope="session")
def llama(llama_dir: Path) -> BaseModel:
    return load(llama_dir)


@pytest.fixture(scope="session")
def plain_llama(llama_dir: Path) -> Any:
    """The same model in plain transformers: the oracle of both paths."""
    return AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()


@pytest.fixture
def runner(llama: BaseModel, tmp_path: Path) -> Runner:
    return make_runner(llama, tmp_path / "artifacts")


@pytest.fixture
def client(runner: Runner, tmp_path: Path) -> Client:
    """An open session of rank 8 and alpha 16."""
    opened = Client(runner, "11111111-1111-1111-1111-111111111111", str(tmp_path / "state"))
    opened.open()
    return opened
