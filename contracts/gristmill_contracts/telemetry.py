"""Logs, as all processes write them.

A log line is one JSON object: a constant event name, and what varies in fields of its own. Never
the text or the tokens of a request.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


class JsonFormatter(logging.Formatter):
    """Time, level, process, logger, event, then every `extra` field."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_json_logging(
    process: str, *, level: str = "INFO", stream: TextIO | None = None
) -> logging.Handler:
    """Send all logs of this process to `stream` (standard error) as JSON lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    return handler
