"""Checkpoints that cannot be read or written: what is said, and what is left."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gristmill_contracts.errors import InvalidRequestError, OperationFailedError
from gristmill_testing.local_runner import Client, datum, ref
from gristmill_worker import peft_files
from gristmill_worker.base_model import BaseModel
from gristmill_worker.folders import MANIFEST_FILE, Manifest


@contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    """This process's files end there: what the system says of it, as of a full disk, is an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_merged_export_that_does_not_fit_on_the_disk_fails_and_leaves_nothing(
    client: Client,
) -> None:
    """The adapter's own files fit; safetensors has an error of its own for the model that does not."""
    client.train([datum([5, 6, 7])])
    client.step()
    adapter_bytes = client.save_weights().size_bytes
    root = client.runner.checkpoints.root
    before = sorted(root.rglob("*"))
    with no_file_above(2 * adapter_bytes), pytest.raises(OperationFailedError) as raised:
        client.save_weights(merge=True)
    assert "was not written" in raised.value.message
    assert "free space and save again" in raised.value.message
    assert sorted(root.rglob("*")) == before
    assert client.save_weights(merge=True).size_bytes > 2 * adapter_bytes


@pytest.mark.parametrize("name", [peft_files.CONFIG_FILE, peft_files.WEIGHTS_FILE])
def test_a_file_that_the_manifest_does_not_name_is_not_trusted(client: Client, name: str) -> None:
    adapter = ref(client.save_weights())
    path = client.runner.checkpoints.root / adapter.path / MANIFEST_FILE
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    files = {other: facts for other, facts in manifest.files.items() if other != name}
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(OperationFailedError, match=f"damaged: its manifest does not name {name}"):
        client.sample(adapter=adapter)


@pytest.mark.parametrize("damage", ["cut", "gone", "flipped", "link"])
def test_a_damaged_file_is_named_and_the_session_goes_on(
    client: Client, tmp_path: Path, damage: str
) -> None:
    saved = client.save_state()
    path = client.runner.checkpoints.root / saved.path / peft_files.WEIGHTS_FILE
    whole = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "link":
        (tmp_path / "other").write_bytes(b"another's file")
        path.symlink_to(tmp_path / "other")
    before = client.session.checksum()
    with pytest.raises(OperationFailedError, match=rf"is damaged: .*{peft_files.WEIGHTS_FILE}"):
        client.load_state(saved)
    assert client.session.checksum() == before
    client.train([datum([5, 6, 7])])
    client.step()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "not a PEFT adapter"),
        ({"r": [8]}, "not a PEFT adapter"),
        ({"r": float("inf")}, "not a PEFT adapter"),
        ({"r": 0}, "r is 0 and lora_alpha 16"),
        ({"r": -8}, "r is -8"),
        ({"r": 10**9}, "r is 1000000000"),
        ({"lora_alpha": 0.5}, "lora_alpha 0.5"),
        ({"lora_alpha": 16.5}, "lora_alpha 16.5"),
        ({"init_lora_weights": "pissa_niter_16"}, "also changes the base model"),
        ({"init_lora_weights": "olora"}, "also changes the base model"),
    ],
)
def test_a_config_that_we_cannot_read_is_refused(
    client: Client, llama: BaseModel, config: object, message: str
) -> None:
    files = peft_files.adapter_files(llama, client.session.adapter)
    if isinstance(config, dict):
        config = json.loads(files[peft_files.CONFIG_FILE]) | config
    with pytest.raises(InvalidRequestError, match=message):
        peft_files.parse_adapter(
            llama, json.dumps(config).encode(), files[peft_files.WEIGHTS_FILE], "theirs"
        )


def test_an_alpha_that_is_a_whole_number_may_be_written_as_a_fraction(
    client: Client, llama: BaseModel
) -> None:
    files = peft_files.adapter_files(llama, client.session.adapter)
    config = json.loads(files[peft_files.CONFIG_FILE]) | {"lora_alpha": 16.0}
    _, alpha, _ = peft_files.parse_adapter(
        llama, json.dumps(config).encode(), files[peft_files.WEIGHTS_FILE], "theirs"
    )
    assert alpha == 16
