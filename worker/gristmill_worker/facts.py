"""What a prepared base model is: `facts.json` beside its weights."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import msgspec

FACTS_FILE: Final = "facts.json"
WEIGHTS_FILE: Final = "model.safetensors"
CONTEXT_LENGTH_DEFAULT: Final = 2048
_CONTEXT_FIELDS: Final = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length",
)  # fmt: skip
_READ_BYTES: Final = 2**20


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a prepared folder. `revision` names config and weights in every checkpoint."""

    architecture: str
    vocabulary_size: int
    context_length: int
    eos_token_ids: list[int]
    revision: str
    dtype: str
    hugging_face_id: str
    """What a client gives AutoTokenizer: a repository, or an absolute folder."""


def revision_of(folder: Path) -> str:
    """SHA-256 over config.json and the weights, as hex."""
    digest = hashlib.sha256()
    for name in ("config.json", WEIGHTS_FILE):
        digest.update(f"{name}\0".encode())
        with (folder / name).open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _ids(value: Any) -> list[int]:  # Any: JSON has an int, a list or null here
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(entry) for entry in value]


def _json(path: Path) -> dict[str, Any]:  # Any: Hugging Face's files are free-form
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def end_token_ids(folder: Path, tokenizer_eos: int | None) -> list[int]:
    """Every token that ends a sequence: of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found.update(_ids(_json(folder / name).get("eos_token_id")))
    found.update(_ids(tokenizer_eos))
    return sorted(found)


def gather_facts(
    folder: Path, *, tokenizer_eos: int | None, dtype: str, hugging_face_id: str
) -> ModelFacts:
    """Read a folder with config.json and model.safetensors. Raises OSError or KeyError if it is not one."""
    config = _json(folder / "config.json")
    text = config.get("text_config", config)
    context = next((text[name] for name in _CONTEXT_FIELDS if text.get(name)), None)
    return ModelFacts(
        architecture=(config.get("architectures") or [config["model_type"]])[0],
        vocabulary_size=int(text["vocab_size"]),
        context_length=int(context or CONTEXT_LENGTH_DEFAULT),
        eos_token_ids=end_token_ids(folder, tokenizer_eos),
        revision=revision_of(folder),
        dtype=dtype,
        hugging_face_id=hugging_face_id,
    )


def write_facts(folder: Path, facts: ModelFacts) -> None:
    text = msgspec.json.format(msgspec.json.encode(facts), indent=2)
    (folder / FACTS_FILE).write_bytes(text + b"\n")


def read_facts(folder: Path) -> ModelFacts:
    """Raises FileNotFoundError if the folder was not prepared."""
    return msgspec.json.decode((folder / FACTS_FILE).read_bytes(), type=ModelFacts)
