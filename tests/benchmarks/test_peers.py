"""The peer's three ways to write a batch are the same work: otherwise their speeds would not compare."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_testing.contenders import random_batch
from gristmill_testing.peers import Peft
from gristmill_testing.tiny_models import VOCABULARY, build_tiny_llama

# PEFT reads attributes that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("peers") / "model")


def gradients(
    model: Path, way: str, batch: list[list[int]], attention: str = "sdpa"
) -> list[torch.Tensor]:
    """Of the adapter, after one step's backward pass; the step itself is left out."""
    torch.manual_seed(1)
    peer = Peft(model, torch.float32, attention)
    optimizer: Any = peer.optimizer
    optimizer.step = optimizer.zero_grad = lambda: None
    assert getattr(peer, way)(batch) == sum(map(len, batch))
    found = {name: each.grad for name, each in peer.model.named_parameters() if each.requires_grad}
    assert found
    return [each for each in found.values() if each is not None]


def assert_alike(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert max(float(each.abs().max()) for each in wanted) > 0.01


def test_packed_and_padded_rows_have_the_same_gradients(model: Path) -> None:
    batch = random_batch(VOCABULARY, [5, 12, 3], seed=1)
    assert_alike(gradients(model, "train_packed", batch), gradients(model, "train_padded", batch))


def test_rows_of_one_length_need_neither(model: Path) -> None:
    batch = random_batch(VOCABULARY, [8, 8], seed=2)
    plain = gradients(model, "train", batch)
    assert_alike(gradients(model, "train_padded", batch), plain)
    assert_alike(gradients(model, "train", batch, "eager"), plain)


def test_another_batch_has_other_gradients(model: Path) -> None:
    one, other = (gradients(model, "train", random_batch(VOCABULARY, [8, 8], s)) for s in (3, 4))
    assert any(
        not torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(one, other, strict=True)
    )
