"""Slots: the right to one request in flight, handed out in order of arrival."""

from __future__ import annotations

import anyio

from agoge_async.errors import QueueFullError


class Slots:
    """Counts requests in flight, and makes those above a limit wait.

    Args:
        model: Whose slots, for the error.
        capacity: Requests in flight at once; None: no limit.
        max_queued: Requests that may wait; None: no limit.
    """

    def __init__(
        self, model: str, *, capacity: int | None = None, max_queued: int | None = None
    ) -> None:
        self._model = model
        self._max_queued = max_queued
        self._semaphore = anyio.Semaphore(capacity, fast_acquire=True) if capacity else None
        self.in_use = 0
        """Requests in flight."""
        self.queued = 0
        """Requests that wait."""

    async def acquire(self) -> None:
        """Take a slot; first come, first served.

        Raises:
            QueueFullError: `max_queued` requests wait already.
        """
        if self._semaphore is not None:
            try:
                self._semaphore.acquire_nowait()
            except anyio.WouldBlock:
                await self._wait(self._semaphore)
        self.in_use += 1

    async def _wait(self, semaphore: anyio.Semaphore) -> None:
        if self._max_queued is not None and self.queued >= self._max_queued:
            raise QueueFullError(
                f"{self.queued} requests wait for {self._model} already (max_queued); send fewer "
                "at once, or raise the limit",
                model=self._model,
                max_queued=self._max_queued,
            )
        self.queued += 1
        try:
            await semaphore.acquire()
        finally:
            self.queued -= 1

    async def __aenter__(self) -> None:
        """Take a slot, as `acquire` does."""
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        """Give the slot back."""
        self.release()

    def release(self) -> None:
        """Give a slot back."""
        self.in_use -= 1
        if self._semaphore is not None:
            self._semaphore.release()
