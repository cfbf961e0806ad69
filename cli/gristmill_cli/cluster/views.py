"""Sessions and models of the SageMaker API in rows and words. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gristmill_cli.times import age, iso

Shape = dict[str, Any]  # Any: a shape of the SageMaker API as JSON
SESSION_COLUMNS: Final = ("NAME", "STATE", "MODEL", "RANK", "PREFILL", "SAMPLE", "TRAIN", "AGE")
SESSION_NUMBERS: Final = ("RANK", "PREFILL", "SAMPLE", "TRAIN")
MODEL_COLUMNS: Final = ("NAME", "ARCHITECTURE", "DTYPE", "CONTEXT", "TOKENIZER")
USAGE: Final = ("PrefillTokenCount", "SampleTokenCount", "TrainingTokenCount")


def session_rows(sessions: Sequence[Shape]) -> list[tuple[object, ...]]:
    return [
        (
            each["TrainingSessionName"],
            each["TrainingSessionStatus"],
            model_of(each),
            each["LoraConfig"]["Rank"],
            *tokens_of(each),
            age(micros(each["CreationTime"])),
        )
        for each in sessions
    ]


def tokens_of(session: Shape) -> tuple[object, ...]:
    """Prefill, sampled, trained; `unknown` while the gateway cannot ask."""
    usage = session.get("BillableTokenUsage", {})
    return tuple(usage.get(name, "unknown") for name in USAGE)


def model_of(session: Shape) -> str:
    """The NAME of `.../Model/NAME` or `.../Model/NAME/VERSION`."""
    return str(session["ModelConfig"]["BaseModelArn"]).partition("/Model/")[2].partition("/")[0]


def session_lines(session: Shape) -> Iterator[str]:
    """Labelled lines in the manner of kubectl."""
    lora = session["LoraConfig"]
    yield _line("Name", session["TrainingSessionName"])
    yield _line("ARN", session["TrainingSessionArn"])
    yield _line("State", session["TrainingSessionStatus"])
    yield _line("Base model", model_of(session))
    yield _line("LoRA", f"rank {lora['Rank']}, alpha {lora['Alpha']}")
    yield _line("Output", session["OutputConfig"]["S3Location"]["Path"])
    yield _line("Created", moment(session["CreationTime"]))
    yield _line("Ended", moment(session.get("EndTime")))
    yield _line("Last number", str(session["LastReceivedSequenceNumber"]))
    prefill, sample, train = tokens_of(session)
    yield _line("Tokens", f"prefill {prefill}, sample {sample}, train {train}")
    if "ErrorDetails" in session:
        yield _line("Error", session["ErrorDetails"])


def model_facts(model: Shape) -> Shape:
    """Name, and what the hub's document tells."""
    return {"Name": model["HubContentName"], **json.loads(model["HubContentDocument"])}


def model_rows(models: Sequence[Shape]) -> list[tuple[object, ...]]:
    rows = []
    for facts in map(model_facts, models):
        names = ("Name", "Architecture", "Dtype", "ContextLength", "HuggingfaceId")
        rows.append(tuple(facts.get(name, "") for name in names))
    return rows


def model_lines(model: Shape) -> Iterator[str]:
    facts = model_facts(model)
    yield _line("Name", facts["Name"])
    yield _line("ARN", model["HubContentArn"])
    yield _line("Architecture", facts.get("Architecture", "-"))
    yield _line("Weights", facts.get("Dtype", "-"))
    yield _line("Context", f"{facts.get('ContextLength', '-')} tokens")
    yield _line("Vocabulary", f"{facts.get('VocabularySize', '-')} tokens")
    yield _line("Tokenizer", facts.get("HuggingfaceId", "-"))
    yield _line("Revision", facts.get("Revision", "-"))


def micros(seconds: float) -> int:
    return round(seconds * 1_000_000)


def moment(seconds: float | None) -> str:
    return "-" if seconds is None else f"{iso(micros(seconds))} ({age(micros(seconds))} ago)"


def _line(name: str, value: object) -> str:
    return f"{name + ':':<14}{value}"
