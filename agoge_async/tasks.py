"""Awaiting several things at once, where the first failure ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

_One = TypeVar("_One")
_Other = TypeVar("_Other")


async def await_all(*calls: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Await all; the first failure ends the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call())
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def await_both(one: Awaitable[_One], other: Awaitable[_Other]) -> tuple[_One, _Other]:
    """Await two; the first failure ends the other and is raised itself."""
    results: dict[int, Any] = {}

    async def keep(index: int, call: Awaitable[Any]) -> None:
        results[index] = await call

    await await_all(lambda: keep(0, one), lambda: keep(1, other))
    return results[0], results[1]
