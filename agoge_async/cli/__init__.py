"""The command line: `agoge-async demo`, `chat`, `check` and `doctor`."""

from agoge_async.cli.commands import app

__all__ = ["app"]
