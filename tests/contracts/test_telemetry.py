"""A log line is one JSON object with a constant event and its fields."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from gristmill_contracts.telemetry import setup_json_logging


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    setup_json_logging("meter", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_names_time_level_process_logger_event_and_fields(lines: io.StringIO) -> None:
    logging.getLogger("gristmill_meter.log").warning(
        "log_full", extra={"session": "s-1", "free_bytes": 7}
    )
    line = json.loads(lines.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "WARNING",
        "process": "meter",
        "logger": "gristmill_meter.log",
        "event": "log_full",
        "session": "s-1",
        "free_bytes": 7,
    }


def test_an_error_keeps_its_traceback_in_the_one_line(lines: io.StringIO) -> None:
    try:
        int("no")
    except ValueError:
        logging.getLogger("x").exception("it_failed", extra={"what": object})
    text = lines.getvalue()
    assert text.count("\n") == 1
    assert "ValueError: invalid literal" in json.loads(text)["traceback"]


def test_what_is_below_the_level_is_left_out(lines: io.StringIO) -> None:
    logging.getLogger("x").debug("detail")
    assert lines.getvalue() == ""
