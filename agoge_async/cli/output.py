"""How the commands print: a console, errors in one line, the engine's log."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import traceback
from collections.abc import Iterator

import typer
from rich.console import Console

from agoge_async.errors import AgogeError, ConfigError, EngineStartError

CONFIG_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
INSTALL_HINT = "install 'agoge_async[cpu]' or 'agoge_async[gpu]'"


class CommandError(Exception):
    """A command failed for a reason that one line tells."""


def make_console() -> Console:
    """Make the console for stdout: colours on a terminal, plain text elsewhere."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # text that a locale lacks ends no command
    return Console(highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Replace control characters: what a model writes must not steer the terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def write(console: Console, text: str, style: str | None = None) -> None:
    """Print text that came from elsewhere as it is, without a line end."""
    console.print(printable(text), end="", markup=False, style=style)


def error_line(error: Exception) -> str:
    """Say in one line what went wrong and what to do."""
    if isinstance(error, ModuleNotFoundError):
        line = f"there is no {error.name} here, which local engines need; {INSTALL_HINT}"
    else:
        line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, EngineStartError):
        line += " (--verbose shows the engine's log; agoge-async doctor checks this machine)"
    return printable(line)


def print_error(error: Exception) -> None:
    """Print an error's one line to stderr."""
    typer.echo(f"error: {error_line(error)}", err=True)


@contextlib.contextmanager
def reported_errors(*, verbose: bool) -> Iterator[None]:
    """End a command that fails with one line and an exit code; `verbose` adds the traceback."""
    try:
        with engine_log(shown=verbose):
            yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    except (AgogeError, CommandError, ModuleNotFoundError) as error:
        is_ours = not isinstance(error, ModuleNotFoundError) or error.name in {"torch", "vllm"}
        if not is_ours:
            raise
        if verbose:
            traceback.print_exception(error)
        print_error(error)
        code = CONFIG_EXIT_CODE if isinstance(error, ConfigError) else 1
        raise typer.Exit(code) from None


@contextlib.contextmanager
def engine_log(*, shown: bool) -> Iterator[None]:
    """Write the library's log records, an engine's own lines too, to stderr."""
    if not shown:
        yield
        return
    logger = logging.getLogger("agoge_async")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
