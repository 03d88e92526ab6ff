"""When a request must have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Fails what runs inside it once its time has come; may be entered again and again.

    Cancels as `asyncio.timeout` does, but has one timer for all the steps of a request: a stream
    has a step a chunk, and a timer each would cost more than reading the chunk.

    Args:
        timeout_s: Time from now. [seconds]
        too_late: Makes the error that is raised then.
    """

    def __init__(self, timeout_s: float, too_late: Callable[[], Exception]) -> None:
        self._error: Exception | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._timer = asyncio.get_running_loop().call_later(
            timeout_s, lambda: self.end_with(too_late())
        )

    def end_with(self, error: Exception) -> None:
        """Fail now, with an error of the caller's; does nothing once it has failed."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    def close(self) -> None:
        """Take note that there are no more steps."""
        self._timer.cancel()

    def __enter__(self) -> None:
        """Begin a step.

        Raises:
            Exception: That of `too_late` or `end_with`, when the time has come already.
        """
        if self._error is not None:
            raise self._error
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End a step; turns a cancellation of its own into the error."""
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        is_ours_alone = task.uncancel() <= self._cancelling
        if is_ours_alone and kind is asyncio.CancelledError:
            raise self._error from None
