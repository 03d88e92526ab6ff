"""The replicas of one model: which can serve, how busy each is, who gets the next request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import anyio

from agoge_async.backends.base import Backend
from agoge_async.errors import NoReplicaError
from agoge_async.limits import Slots
from agoge_async.metrics import BackendStatistics, ModelStatistics
from agoge_async.routing import Candidate, LeastLoaded, Policy, PrefixAffinity, RoutingContext


@dataclass(slots=True)
class Replica:
    """A backend and what the pool counts of it."""

    backend: Backend
    in_flight: int = 0
    attempts: int = 0


class Pool:
    """All replicas of one model.

    Args:
        model: Its name.
        backends: Its replicas; their names must differ.
        policy: How requests are spread over them.
        slots: How many requests may be in flight.
    """

    def __init__(
        self,
        model: str,
        backends: Sequence[Backend],
        *,
        policy: Policy | None = None,
        slots: Slots | None = None,
    ) -> None:
        names = [backend.name for backend in backends]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"model {model!r} needs backends of different names, got {names}")
        self.model = model
        self.slots = slots or Slots(model)
        self._policy = policy or LeastLoaded()
        self._replicas = {backend.name: Replica(backend) for backend in backends}
        self._changed = anyio.Event()
        for backend in backends:
            backend.on_change = self._wake

    @property
    def uses_prefixes(self) -> bool:
        """Whether the policy looks at prompts."""
        return isinstance(self._policy, PrefixAffinity) and len(self._replicas) > 1

    @property
    def backends(self) -> list[Backend]:
        """The replicas' backends, in order."""
        return [replica.backend for replica in self._replicas.values()]

    async def choose(self, context: RoutingContext, excluded: Collection[str]) -> Replica:
        """Wait for a replica that serves, and count the request as its.

        Args:
            context: For the policy.
            excluded: Names of replicas that failed this request before.

        Raises:
            NoReplicaError: None serves, and none will without help.
        """
        while True:
            serving = self._serving(excluded)
            waiting = [r for r in self._fresh(excluded) if r.backend.may_serve_later]
            if not serving and not waiting:
                serving = self._serving(())  # one that failed before is better than none
            if serving:
                replica = self._pick(context, serving)
                replica.in_flight += 1
                replica.attempts += 1
                return replica
            if not waiting:
                raise self._nobody()
            await self._changed.wait()

    def release(self, replica: Replica) -> None:
        """Take note that a request has left a replica."""
        replica.in_flight -= 1

    def has_other(self, excluded: Collection[str]) -> bool:
        """Say whether a replica serves that isn't excluded."""
        return bool(self._serving(excluded))

    def statistics(self) -> ModelStatistics:
        """Count what goes on now."""
        return ModelStatistics(
            in_flight=self.slots.in_use,
            queued=self.slots.queued,
            backends={
                name: BackendStatistics(
                    state=replica.backend.status.state,
                    in_flight=replica.in_flight,
                    attempts=replica.attempts,
                    restarts=replica.backend.status.restarts,
                    error=str(replica.backend.status.error or "") or None,
                )
                for name, replica in self._replicas.items()
            },
        )

    def _fresh(self, excluded: Collection[str]) -> list[Replica]:
        return [replica for name, replica in self._replicas.items() if name not in excluded]

    def _serving(self, excluded: Collection[str]) -> list[Replica]:
        return [replica for replica in self._fresh(excluded) if replica.backend.is_serving]

    def _pick(self, context: RoutingContext, serving: Sequence[Replica]) -> Replica:
        if len(serving) == 1:
            return serving[0]
        candidates = [
            Candidate(name=replica.backend.name, in_flight=replica.in_flight) for replica in serving
        ]
        return self._replicas[self._policy.choose(context, candidates).name]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _nobody(self) -> NoReplicaError:
        states = [
            f"{name} {replica.backend.status.state}"
            + (f" ({replica.backend.status.error})" if replica.backend.status.error else "")
            for name, replica in self._replicas.items()
        ]
        message = f"no replica of {self.model} can serve: {'; '.join(states)}"
        return NoReplicaError(message, backend=self.model)
