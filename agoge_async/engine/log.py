"""What an engine's processes print: kept for error messages, passed on to `logging`.

A thread reads the pipe, so that an engine never blocks on its own log while the user's event loop
is busy.
"""

from __future__ import annotations

import collections
import logging
import re
import threading
from multiprocessing.connection import Connection

logger = logging.getLogger("agoge_async.engine")

KEPT_LINES = 400
"""Enough for a Python traceback out of each process of an engine."""

_ERROR_LINE = re.compile(r"(?:^|\s|:)((?:\w+\.)*(\w*(?:Error|Exception|Interrupt))): (.+)$")
_SECONDHAND = re.compile(r"Engine core initialization failed|WorkerProc initialization failed")
"""Errors by which vLLM's outer processes report that an inner one failed."""
_FAULT_COUNT = re.compile(r"\d+ validation errors? for ")
"""A pydantic error's first line, which doesn't say what is wrong: the second one does."""
_LOG_PREFIX = re.compile(r"^(\(\w+[^)]*\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\] )?")


def find_cause(lines: list[str]) -> str | None:
    """Find the error in a log that tells best why an engine failed, as one line.

    That is the first which isn't one process's report of another's failure.
    """
    found = None
    for line, next_line in zip(lines, [*lines[1:], ""], strict=False):
        match = _ERROR_LINE.search(line)
        if match is None or _SECONDHAND.search(line):
            continue
        found = f"{match[2]}: {match[3].strip()}"
        if _FAULT_COUNT.match(match[3]):
            found += f": {next_line.partition(' [type=')[0].strip()}"
        if not match[3].startswith("cannot"):
            break
    return found


def best_cause(reported: str | None, lines: list[str]) -> str | None:
    """Choose between what the child says and what the log says of a failure."""
    if reported is None or _SECONDHAND.search(reported) or _FAULT_COUNT.search(reported):
        return find_cause(lines) or reported
    return reported


class LogPump:
    """Reads a pipe to its end in a thread."""

    def __init__(self, name: str, pipe: Connection) -> None:
        self._name = name
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(
            target=self._pump, args=(pipe,), name=f"agoge-log-{name}", daemon=True
        )
        self._thread.start()

    def _pump(self, pipe: Connection) -> None:
        with (
            pipe,
            open(pipe.fileno(), encoding="utf-8", errors="replace", closefd=False) as lines,
        ):
            for line in lines:
                text = _LOG_PREFIX.sub("", line.rstrip())
                if text:
                    self._lines.append(text)
                    logger.debug("%s: %s", self._name, text)

    def tail(self) -> list[str]:
        """Give the last lines, oldest first."""
        return list(self._lines)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the pipe: every process of the engine has closed it."""
        self._thread.join(timeout_s)
