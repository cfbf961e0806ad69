"""Preparing a base model: a folder that is whole or absent, and its facts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gristmill_contracts.errors import InvalidRequestError
from gristmill_testing.tiny_models import CONTEXT, build_tiny_llama
from gristmill_worker import prepare
from gristmill_worker.facts import read_facts


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Hugging Face folder."""
    folder = build_tiny_llama(tmp_path_factory.mktemp("source") / "hf")
    (folder / "facts.json").unlink()
    return folder


def facts_of(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """The one line on standard output."""
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, object] = json.loads(out)
    return found


def test_a_folder_is_prepared_and_its_facts_are_printed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "models" / "tiny"
    assert prepare.main([str(source), str(dest), "--name", "mine"]) == 0
    found = facts_of(capsys)
    revision = found.pop("revision")
    assert found == {
        "name": "mine",
        "architecture": "LlamaForCausalLM",
        "vocabulary_size": 512,
        "context_length": 1024,
        "eos_token_ids": [2, 4],
        "dtype": "bfloat16",
        "hugging_face_id": str(dest),
    }
    assert read_facts(dest).revision == revision
    names = {path.name for path in dest.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "facts.json"} <= names
    assert all((dest / name).stat().st_mode & 0o044 for name in names)
    assert [path.name for path in dest.parent.iterdir()] == ["tiny"]
    weights = load_file(dest / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt", "bloom"])
def test_the_length_of_the_context_is_found_under_every_name(
    family: str, family_dir: Callable[[str], Path]
) -> None:
    assert read_facts(family_dir(family)).context_length == CONTEXT


def test_preparing_again_does_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "tiny"
    assert prepare.main([str(source), str(dest)]) == 0
    first, before = facts_of(capsys), (dest / "model.safetensors").stat().st_mtime_ns
    assert prepare.main(["/no/such/source", str(dest)]) == 0
    assert facts_of(capsys) == first
    assert (dest / "model.safetensors").stat().st_mtime_ns == before


def test_the_same_source_has_the_same_revision(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    revisions = []
    for name in ("a", "b"):
        prepare.main([str(source), str(tmp_path / name), "--dtype", "float32"])
        revisions.append(facts_of(capsys)["revision"])
    prepare.main([str(source), str(tmp_path / "c"), "--dtype", "bfloat16"])
    assert revisions[0] == revisions[1] != facts_of(capsys)["revision"]


def test_another_dtype_over_a_prepared_folder_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "tiny"
    prepare.main([str(source), str(dest)])
    capsys.readouterr()
    assert prepare.main([str(source), str(dest), "--dtype", "float32"]) == 1
    assert "prepared as bfloat16, not float32" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["empty folder", "text file", "no model"])
def test_what_is_no_model_leaves_nothing_behind(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    if kind == "text file":
        source.write_text("no model")
    else:
        source.mkdir()
    if kind == "no model":
        (source / "config.json").write_text('{"model_type": "no-such-model"}')
    assert prepare.main([str(source), str(tmp_path / "models" / "dest")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(source) in captured.err
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_with_other_files_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "thesis.txt").write_text("mine")
    assert prepare.main([str(source), str(dest)]) == 1
    assert [path.name for path in dest.iterdir()] == ["thesis.txt"]


def test_a_gguf_file_is_named_by_folder_and_file(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").touch()
    by_file = prepare._locate(str(tmp_path / "one.gguf"))
    assert by_file == prepare._locate(str(tmp_path)) == (str(tmp_path), {"gguf_file": "one.gguf"})
    (tmp_path / "two.gguf").touch()
    with pytest.raises(InvalidRequestError, match="2 GGUF files"):
        prepare._locate(str(tmp_path))
    assert prepare._locate("owner/name") == ("owner/name", {})


def test_a_hugging_face_repository_is_named_as_the_hub_names_it(
    source: Path, tmp_path: Path
) -> None:
    """From a cache that a download left, for there is no hub here; clients are told the repository."""
    repository = tmp_path / "hub" / "models--lab--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(source, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    dest = tmp_path / "models" / "tiny"
    done = subprocess.run(
        [sys.executable, "-m", "gristmill_worker.prepare", "lab/tiny", str(dest)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = read_facts(dest)
    assert (facts.hugging_face_id, facts.vocabulary_size) == ("lab/tiny", 512)


def test_a_revision_is_of_a_repository_alone(llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="has no revisions; leave out --revision v2"):
        prepare.prepare(str(llama_dir), tmp_path / "m", dtype="float32", revision="v2", say=print)
