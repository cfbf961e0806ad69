"""`python -m gristmill_worker.prepare SOURCE DEST`: make a prepared base model, once.

SOURCE is a Hugging Face folder, a Hugging Face repository, or a GGUF file. DEST gets config.json,
model.safetensors, the tokenizer's files and facts.json; it appears whole or not at all. The facts
are printed as one line of JSON, progress goes to standard error.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from gristmill_contracts.errors import ConflictError, GristmillError, InvalidRequestError
from gristmill_worker.facts import (
    WEIGHTS_FILE,
    ModelFacts,
    gather_facts,
    read_facts,
    write_facts,
)

ASIDE: Final = ".preparing-"
ONE_FILE: Final = "100TB"
"""Shard size that no model reaches, so that the weights stay in one file."""

Say = Callable[[str], None]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done (or done before), 1 the source cannot be prepared, 2 bad arguments."""
    given = _parser().parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the worker itself, see there
    try:
        facts = prepare(
            given.source, given.dest, dtype=given.dtype, hugging_face_id=given.hugging_face_id,
            revision=given.revision, say=_to_stderr,
        )  # fmt: skip
    except GristmillError as error:
        _to_stderr(error.message)
        return 1
    line = {"name": given.name or given.dest.name, **msgspec.to_builtins(facts)}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    return 0


def prepare(
    source: str,
    dest: Path,
    *,
    dtype: str,
    hugging_face_id: str = "",
    revision: str = "",
    say: Say,
) -> ModelFacts:
    """Prepare `dest`, or find that it is prepared.

    Raises ConflictError if it is prepared with another dtype, InvalidRequestError if the source is
    not a causal language model that transformers loads.
    """
    known = _prepared(dest)
    if known is not None:
        if known.dtype != dtype:
            raise ConflictError(
                f"{dest} is prepared as {known.dtype}, not {dtype}; remove it or name another folder"
            )
        say(f"{dest} is prepared already")
        return known
    aside = dest.with_name(f"{ASIDE}{dest.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        tokenizer_eos = _convert(_locate(source, revision), source, aside, dtype, say)
        is_repository = not Path(source).exists()
        public = hugging_face_id or (source if is_repository else str(dest.resolve()))
        say("hashing the weights")
        facts = gather_facts(
            aside, tokenizer_eos=tokenizer_eos, dtype=dtype, hugging_face_id=public
        )
        write_facts(aside, facts)
        _put_in_place(aside, dest)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    say(f"prepared {dest}")
    return facts


def _prepared(dest: Path) -> ModelFacts | None:
    try:
        facts = read_facts(dest)
    except (OSError, msgspec.MsgspecError):
        return None
    return facts if (dest / WEIGHTS_FILE).is_file() else None


def _put_in_place(aside: Path, dest: Path) -> None:
    for file in aside.iterdir():
        file.chmod(0o644)  # safetensors makes its own private, whatever the umask
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if dest.exists():
        if any(dest.iterdir()):
            raise ConflictError(f"{dest} exists and is no prepared model; name another folder")
        dest.rmdir()
    aside.rename(dest)
    parent = os.open(dest.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _convert(
    located: tuple[str, dict[str, Any]], source: str, folder: Path, dtype: str, say: Say
) -> int | None:
    """Write model and tokenizer; returns the tokenizer's end token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, options = located
    say(f"loading {source}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype), **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequestError(
            f"{source} is neither a folder, a repository nor a GGUF file of a causal language model "
            f"that transformers can load: {error}"
        ) from error
    if hasattr(model.config, "quantization_config"):
        model = _unquantised(model)
    say("writing safetensors")
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=ONE_FILE)
    tokenizer.save_pretrained(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise InvalidRequestError(f"{source} did not give one {WEIGHTS_FILE}")
    eos: int | None = tokenizer.eos_token_id
    return eos


def _locate(source: str, revision: str = "") -> tuple[str, dict[str, Any]]:
    """What from_pretrained is given: a GGUF file is named by its folder and file name."""
    path = Path(source)
    if revision and path.exists():
        raise InvalidRequestError(
            f"{source} is on this machine and has no revisions; leave out --revision {revision}"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise InvalidRequestError(
                f"{source} holds no config.json and {len(files)} GGUF files; name the file"
            )
        path = files[0]
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidRequestError(f"{source} is a file, but not a .gguf file")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        return str(path), {"local_files_only": True}
    return source, {"revision": revision} if revision else {}


def _unquantised(model: Any) -> Any:
    """A fresh model of the same weights: transformers refuses to save what was read quantised."""
    config = model.config
    del config.quantization_config
    fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict())
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_worker.prepare",
        description="Prepare a base model: convert once, write its facts.",
    )
    parser.add_argument("source", help="Hugging Face folder or repository, or a .gguf file")
    parser.add_argument("dest", type=Path, help="folder to make")
    parser.add_argument("--name", default="", help="name to print; default: the folder's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument(
        "--revision", default="", help="branch, tag or commit of a repository; default: main"
    )
    parser.add_argument(
        "--hugging-face-id", default="", help="what clients give AutoTokenizer; default: the "
        "repository, else the folder made",
    )  # fmt: skip
    return parser


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
