"""What a terminal shows while engines start and batches run. rich is loaded when it is needed."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)


class StartDisplay:
    """Shows how engines start: a line that spins on a terminal, log records elsewhere.

    Args:
        shown: Draw on stderr; None: when that is a terminal.
    """

    def __init__(self, shown: bool | None = None) -> None:
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._stages: dict[str, str] = {}
        self._line: Progress | None = None

    def report(self, replica: str, stage: str) -> None:
        """Take note that a replica has come to a stage."""
        logger.info("%s: %s", replica, stage)
        self._stages[replica] = stage
        if self._line is not None:
            stages = ", ".join(f"{replica}: {stage}" for replica, stage in self._stages.items())
            self._line.update(self._line.task_ids[0], description=stages)

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._shown:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (
                SpinnerColumn(),
                TextColumn("starting"),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self._line = Progress(*columns, console=Console(stderr=True), transient=True)
            self._line.add_task("", total=None)
            self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wipe the line."""
        if self._line is not None:
            self._line.stop()
            self._line = None


@contextlib.contextmanager
def batch_progress(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Draw a bar on stderr; gives the function that moves it on by one."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
