"""How a message gets from a rank to the workers: what all ways have in common."""

from __future__ import annotations

from typing import Protocol

import torch

from agoge_async.weights.manifest import Manifest, Route
from agoge_async.weights.plan import Message


class Lane(Protocol):
    """One rank's way to all workers."""

    @property
    def num_bytes(self) -> int:
        """Memory that it holds of its own."""
        ...

    @property
    def takes_any_order(self) -> bool:
        """Whether messages may be written at once, by several threads, and sent in any order."""
        ...

    def frame(self, message: Message) -> torch.Tensor:
        """Give the memory that a message is to be written to; waits until it is free."""
        ...

    def send(self, message: Message, frame: torch.Tensor) -> None:
        """Begin to send it."""
        ...

    def flush(self) -> None:
        """Wait until all is sent."""
        ...

    def close(self) -> None:
        """Give everything back; ends what waits, too."""
        ...


class Inlet(Protocol):
    """A worker's end of the way; kept from push to push while the route is the same."""

    @property
    def route(self) -> Route:
        """What it leads along."""
        ...

    def begin(self, manifest: Manifest) -> None:
        """Get ready for a push."""
        ...

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for the next message; gives its frame."""
        ...

    def close(self) -> None:
        """Leave; ends what waits, too."""
        ...
