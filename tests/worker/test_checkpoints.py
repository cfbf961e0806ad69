"""Checkpoints: PEFT's layout both ways, and training that goes on as if it had not stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gristmill_contracts.errors import (
    InvalidRequestError,
    NotFoundError,
    OperationFailedError,
)
from gristmill_contracts.ids import checkpoint_id, parse_op_id
from gristmill_contracts.operations import (
    CheckpointRef,
    LoadWeightsForSampling,
    SaveResult,
    SaveState,
    SaveWeights,
)
from gristmill_testing.local_runner import Client, datum, load, make_runner, ref
from gristmill_testing.lossy_disk import Crash, LossyDisk
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_worker import peft_files
from gristmill_worker.adapter import make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.checkpoints import Checkpoints
from gristmill_worker.folders import damage
from gristmill_worker.runner import Runner

# PEFT reads attributes that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

UID = "44444444-4444-4444-4444-444444444444"
TOKENS = list(range(10, 40))
DATA = [datum(TOKENS), datum([9, 8, 7]), datum([100, 50])]
FAMILIES = (
    "llama", "qwen2", "gpt2", "falcon", "falcon_alibi", "bloom", "mpt", "gemma2",
)  # fmt: skip


def other_session(client: Client, uid: str = UID, **changes: Any) -> Client:
    values = {"rank": client.rank, "alpha": client.alpha, **changes}
    other = Client(client.runner, uid, client.state_dir + uid, **values)
    other.open()
    return other


def train(client: Client, turns: int, first: int = 0) -> list[float]:
    losses = []
    for turn in range(first, first + turns):
        losses.append(client.train(DATA).metrics["loss_sum"])
        client.step(rate=1e-2 / (turn + 1), weight_decay=0.01)
    return losses


def same(left: Client, right: Client) -> bool:
    pairs = zip(left.session.buffers().values(), right.session.buffers().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def folder_of(client: Client, saved: SaveResult) -> Path:
    return client.runner.checkpoints.root / saved.path


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_what_we_save(
    family: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    base = load(family_dir(family))
    client = Client(make_runner(base, tmp_path / "a"), UID, "")
    client.open()
    train(client, 2)
    saved = client.save_weights()
    model = AutoModelForCausalLM.from_pretrained(family_dir(family), dtype=torch.float32).eval()
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([TOKENS])).logits[0]
        peft = PeftModel.from_pretrained(model, folder_of(client, saved))
        theirs = peft(input_ids=torch.tensor([TOKENS])).logits[0]
        with base.selected(client.session.adapter):
            ours = base.head.logits(base.hidden(torch.tensor([TOKENS])))
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(plain, theirs, atol=1e-2)


def test_we_load_what_peft_saves(llama: BaseModel, llama_dir: Path, tmp_path: Path) -> None:
    """An adapter on two of the seven kinds of layers: the others stay as they are."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    peft = get_peft_model(
        model, LoraConfig(r=6, lora_alpha=9, target_modules=["q_proj", "down_proj"])
    ).eval()
    torch.manual_seed(0)
    for name, value in peft.named_parameters():
        if "lora_B" in name:
            value.data.normal_(std=0.1)
    peft.save_pretrained(tmp_path / "peft")
    layout, alpha, weights = peft_files.parse_adapter(
        llama,
        (tmp_path / "peft" / "adapter_config.json").read_bytes(),
        (tmp_path / "peft" / "adapter_model.safetensors").read_bytes(),
        "theirs",
    )
    adapter = make_adapter(layout, alpha, weights, device=llama.device, dtype=llama.dtype)
    assert (adapter.rank, adapter.alpha) == (6, 9)
    with torch.no_grad():
        theirs = peft(input_ids=torch.tensor([TOKENS])).logits[0]
        with llama.selected(adapter):
            ours = llama.head.logits(llama.hidden(torch.tensor([TOKENS])))
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "only plain LoRA"),
        ({"bias": "all"}, "only plain LoRA"),
        ({"r": 3}, "has shape"),
    ],
)
def test_adapters_that_we_would_misread_are_refused(
    client: Client, llama: BaseModel, change: dict[str, object], message: str
) -> None:
    files = peft_files.adapter_files(llama, client.session.adapter)
    config = json.loads(files[peft_files.CONFIG_FILE]) | change
    with pytest.raises(InvalidRequestError, match=message):
        peft_files.parse_adapter(
            llama, json.dumps(config).encode(), files[peft_files.WEIGHTS_FILE], "theirs"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_is_the_base_with_the_adapter(
    family: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Qwen2 and GPT-2 tie their embeddings, and still do when they are loaded again."""
    base = load(family_dir(family))
    client = Client(make_runner(base, tmp_path / "a"), UID, "")
    client.open()
    train(client, 2)
    folder = folder_of(client, client.save_weights(merge=True)) / "merged"
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = merged(input_ids=torch.tensor([TOKENS])).logits[0]
        with base.selected(client.session.adapter):
            ours = base.head.logits(base.hidden(torch.tensor([TOKENS])))
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-3)
    tied = merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    config = json.loads((base.folder / "config.json").read_text())
    assert tied == config.get("tie_word_embeddings", family == "gpt2")
    assert (folder / "tokenizer.json").is_file()


def test_a_resumed_run_is_the_uninterrupted_one_and_not_a_cold_start(client: Client) -> None:
    """Three ways: uninterrupted == resumed with the optimizer != resumed without it."""
    train(client, 3)
    saved = client.save_state()
    warm, cold = other_session(client, UID), other_session(client, "cold")
    warm.load_state(saved)
    assert same(warm, client)
    cold.load_state(saved, with_optimizer=False)
    assert torch.equal(cold.session.adapter.weights, client.session.adapter.weights)
    assert not bool(cold.session.m.any())
    assert cold.session.counters.step == 0
    expected = train(client, 3, first=3)
    assert train(warm, 3, first=3) == expected
    assert same(warm, client)
    assert warm.session.counters.step == 6
    colder = train(cold, 3, first=3)
    assert colder[0] == expected[0]
    assert colder[2] != expected[2]


def test_gradients_that_no_step_used_are_saved_too(client: Client) -> None:
    train(client, 1)
    client.train(DATA)
    saved = client.save_state()
    warm, cold = other_session(client, UID), other_session(client, "cold")
    warm.load_state(saved)
    assert warm.step() == client.step()
    assert same(warm, client)
    cold.load_state(saved, with_optimizer=False)
    with pytest.raises(OperationFailedError, match="without a forward_backward"):
        cold.step()


def test_the_rates_of_a_step_come_from_the_request_after_a_load(client: Client) -> None:
    train(client, 1)
    saved = client.save_state()
    slow, fast = other_session(client, "slow"), other_session(client, "fast")
    for other in (slow, fast):
        other.load_state(saved)
        other.train(DATA)
    assert fast.step(1e-2)["update_norm"] > 10 * slow.step(1e-4)["update_norm"]


def test_a_session_that_trained_nothing_takes_on_rank_and_alpha(client: Client) -> None:
    train(client, 1)
    saved = client.save_state()
    other = other_session(client, rank=4, alpha=32)
    assert other.load_state(saved) == other.load_state(saved)
    assert (other.session.adapter.rank, other.session.adapter.alpha) == (8, 16)
    assert same(other, client)
    other.train(DATA)


def test_a_session_that_trained_refuses_another_rank(client: Client) -> None:
    train(client, 1)
    saved = client.save_state()
    other = other_session(client, rank=4, alpha=32)
    other.train(DATA)
    before = other.session.adapter.weights.clone()
    with pytest.raises(InvalidRequestError, match=r"rank 8 and alpha 16, .* rank 4 and alpha 32"):
        other.load_state(saved)
    assert torch.equal(other.session.adapter.weights, before)
    client.load_state(saved)


def test_weights_alone_load_without_the_optimizer(client: Client) -> None:
    train(client, 1)
    saved = client.save_weights()
    other = other_session(client)
    with pytest.raises(InvalidRequestError, match="weights alone"):
        other.load_state(saved)
    other.load_state(saved, with_optimizer=False)
    assert torch.equal(other.session.adapter.weights, client.session.adapter.weights)


def test_another_base_model_is_refused_naming_both(client: Client, tmp_path: Path) -> None:
    saved = client.save_state()
    base = load(build_tiny_llama(tmp_path / "other", seed=5))
    other = Client(make_runner(base, client.runner.checkpoints.root), UID, "")
    other.open()
    for act in (
        lambda: other.load_state(saved),
        lambda: other.sample(adapter=ref(saved)),
        lambda: other.run(LoadWeightsForSampling(adapter=ref(saved))),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            act()
        assert base.facts.revision[:16] in caught.value.message
        assert client.runner.base.facts.revision[:16] in caught.value.message


def test_saving_again_finds_the_same_checkpoint(client: Client) -> None:
    train(client, 1)
    first = client.save_state()
    folder = folder_of(client, first)
    inode = folder.stat().st_ino
    client.applied -= 1
    client.session.counters.applied -= 1
    assert client.save_state() == first
    assert folder.stat().st_ino == inode


def test_saving_again_replaces_a_damaged_one(client: Client) -> None:
    train(client, 1)
    first = client.save_state()
    file = folder_of(client, first) / peft_files.WEIGHTS_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(OperationFailedError, match="damaged") as told:
        client.sample(adapter=ref(first))
    assert str(file.parents[1]) not in str(told.value)
    file.parent.joinpath("manifest.json").rename(file.parent / "kept")
    with pytest.raises(OperationFailedError, match="no readable manifest") as told:
        client.sample(adapter=ref(first))
    assert str(file.parents[1]) not in str(told.value)
    file.parent.joinpath("kept").rename(file.parent / "manifest.json")
    client.applied = client.session.counters.applied = client.applied - 1
    assert client.save_state() == first
    assert file.read_bytes() == whole
    client.sample(adapter=ref(first))


def test_a_replayed_save_writes_nothing(client: Client) -> None:
    executed = client.executed(
        SaveWeights(location="acme/bucket", merge=False, description=""), replay=True
    )
    assert (executed.result, executed.error) == (None, None)
    assert list(client.runner.checkpoints.root.iterdir()) == []


@pytest.mark.parametrize("location", ["../outside", "/etc", "a/../../b"])
def test_paths_stay_inside_the_artifact_folder(client: Client, location: str) -> None:
    before = sorted(client.runner.checkpoints.root.parent.iterdir())
    with pytest.raises(InvalidRequestError, match="leaves the artifact folder"):
        client.run(SaveWeights(location=location, merge=False, description=""))
    reference = CheckpointRef(id="x", path=location, name="arn:x")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="leaves the artifact folder"):
        client.sample(adapter=reference)
    assert sorted(client.runner.checkpoints.root.parent.iterdir()) == before


def test_a_checkpoint_that_is_gone_is_not_found(client: Client) -> None:
    reference = CheckpointRef(id="x", path="acme/bucket/x", name="arn:x")  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="arn:x is gone"):
        client.sample(adapter=reference)


def test_a_full_disk_fails_the_save_and_leaves_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client.runner.checkpoints.disk, "write", full)
    with pytest.raises(OperationFailedError, match="No space left"):
        client.save_weights()
    monkeypatch.undo()
    assert client.save_weights().size_bytes > 0


@pytest.mark.parametrize("kind", ["weights", "state"])
def test_a_crash_at_any_call_of_the_disk_leaves_a_whole_checkpoint_or_none(
    client: Client, tmp_path: Path, kind: str
) -> None:
    """And the same operation, run again after it, has its checkpoint whatever was left."""
    train(client, 1)
    root, outcomes = tmp_path / "lossy", set()
    op_id = f"{UID}/train/3"
    operations = {
        "weights": SaveWeights(location="acme/bucket", merge=False, description=""),
        "state": SaveState(location="acme/bucket", description=""),
    }
    call, crashed = 0, True
    while crashed:
        disk = LossyDisk()
        checkpoints = Checkpoints(disk, client.runner.base, root, cached_max=1)
        disk.calls_left = call
        try:
            saved = checkpoints.save(client.session, operations[kind], op_id)
            crashed = False
        except Crash:
            pass
        disk.crash()
        folder = root / f"acme/bucket/{checkpoint_id(parse_op_id(op_id))}"
        assert disk.exists(folder) or crashed
        if disk.exists(folder):
            assert damage(disk, folder) == "", call
        outcomes.add(disk.exists(folder))
        again = checkpoints.save(client.session, operations[kind], op_id)
        assert damage(disk, folder) == ""
        assert torch.equal(checkpoints.adapter(ref(again)).weights, client.session.adapter.weights)
        call += 1
    assert again == saved
    assert outcomes == {False, True}
    assert call >= 8


def test_the_facts_of_a_save(client: Client, runner: Runner) -> None:
    saved = client.save_weights()
    folder = folder_of(client, saved)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    assert saved.path == f"acme/bucket/{saved.checkpoint_id}"
    assert (saved.kind, saved.rank, saved.alpha) == ("weights", 8, 16)
    sizes = [(folder / name).stat().st_size for name in files[:2]]
    assert saved.size_bytes == sum(sizes)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["base_revision"] == runner.base.facts.revision
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (8, 16, False)


def test_every_file_of_a_checkpoint_has_the_same_permissions(client: Client) -> None:
    """In a pod the meter, another user of the group, reads them all."""
    client.train([datum([1, 2, 3])])
    saved = client.save_weights(merge=True)
    folder = client.runner.checkpoints.folder(saved.path)
    assert len({file.stat().st_mode for file in folder.rglob("*") if file.is_file()}) == 1
