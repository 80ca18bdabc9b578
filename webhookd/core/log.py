"""Log format: JSON for machines, readable lines for a terminal. Fields are passed with `extra=`."""

import json
import logging
import sys
import time
from typing import Literal, TextIO

# The attributes of every record; all others were passed with `extra=`.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure(level: str, form: Literal["auto", "text", "json"], stream: TextIO = sys.stderr) -> None:
    """Set up the root logger, at start and at each reload."""
    if form == "auto":
        form = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)

    converter = staticmethod(time.gmtime)


class TextFormatter(logging.Formatter):
    """Writes time, level, message and fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():7} {record.getMessage()}"
        if fields:
            line += f"  {fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        key: value for key, value in record.__dict__.items() if key not in _STANDARD and value is not None
    }
