"""Which replica a request goes to. Policies are pure: they see candidates, never backends.

A policy is made per model, chooses among the replicas that serve now, and keeps at most a bounded
memory of its own choices. The router calls `choose` for each attempt, without awaiting between the
choice and the slot it takes.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A replica that could take the request."""

    name: str
    in_flight: int
    """Requests it is answering."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingContext:
    """What a policy may know of the request."""

    session_id: str | None = None
    group_id: str | None = None
    prefix: str = ""
    """Text that starts alike for prompts that share a prefix."""


class Policy(Protocol):
    """Chooses a replica."""

    def choose(self, context: RoutingContext, candidates: Sequence[Candidate]) -> Candidate:
        """Pick one of the candidates, of which there is at least one."""
        ...


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """Give the candidate with the fewest requests in flight; the first of equals."""
    return min(candidates, key=lambda candidate: candidate.in_flight)


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """When affinity gives way: a replica may lead the least loaded one by so much.

    Source of the rule: vllm-router's `cache_aware` policy (`max - min > 64 and max > 1.5 min`).
    """

    absolute: int = 64
    relative: float = 1.5

    def is_exceeded(self, preferred: Candidate, candidates: Sequence[Candidate]) -> bool:
        """Say whether the preferred candidate is too far ahead of the others."""
        fewest = least_loaded(candidates).in_flight
        lead = preferred.in_flight - fewest
        return lead > self.absolute and preferred.in_flight > self.relative * fewest


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, context: RoutingContext, candidates: Sequence[Candidate]) -> Candidate:
        """Pick the next one."""
        del context
        self._turn += 1
        return candidates[(self._turn - 1) % len(candidates)]


class LeastLoaded:
    """The replica with the fewest requests in flight; equals take turns."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, context: RoutingContext, candidates: Sequence[Candidate]) -> Candidate:
        """Pick the idlest one."""
        del context
        fewest = least_loaded(candidates).in_flight
        idlest = [candidate for candidate in candidates if candidate.in_flight == fewest]
        self._turn += 1
        return idlest[self._turn % len(idlest)]


class StickySession:
    """Requests of one session (else of one group) stay on one replica, the others go to the idlest.

    A session moves when its replica is gone or too far ahead of the idlest (see `Imbalance`).

    Args:
        imbalance: When a session moves.
        max_keys: Sessions remembered; the ones longest unused are forgotten.
    """

    def __init__(self, imbalance: Imbalance | None = None, *, max_keys: int = 100_000) -> None:
        self._imbalance = imbalance or Imbalance()
        self._max_keys = max_keys
        self._homes: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._fallback = LeastLoaded()

    def choose(self, context: RoutingContext, candidates: Sequence[Candidate]) -> Candidate:
        """Pick the session's home, or make the idlest replica its home."""
        key = context.session_id or context.group_id
        if key is None:
            return self._fallback.choose(context, candidates)
        home = self._homes.get(key)
        preferred = next((c for c in candidates if c.name == home), None)
        if preferred is None or self._imbalance.is_exceeded(preferred, candidates):
            preferred = self._fallback.choose(context, candidates)
        self._homes[key] = preferred.name
        self._homes.move_to_end(key)
        if len(self._homes) > self._max_keys:
            self._homes.popitem(last=False)
        return preferred


class PrefixAffinity:
    """Requests go where the longest part of their prompt was sent before.

    Sessions and groups are sticky as in `StickySession`. Prompts are cut into blocks; a block is
    known by the hash of all text up to its end, so that one lookup a block finds the longest known
    prefix. Less than `min_match` of the prompt known: the idlest replica takes it.

    Source of the idea: the approximate prefix trees of vllm-router's `cache_aware` policy.

    Args:
        imbalance: When affinity gives way to load.
        block_chars: Length of a block. [characters]
        min_match: Share of the prompt's blocks that makes affinity worth it.
        max_blocks: Blocks remembered; the ones longest unused are forgotten.
    """

    def __init__(
        self,
        imbalance: Imbalance | None = None,
        *,
        block_chars: int = 128,
        min_match: float = 0.3,
        max_blocks: int = 200_000,
    ) -> None:
        self._imbalance = imbalance or Imbalance()
        self._block_chars = block_chars
        self._min_match = min_match
        self._max_blocks = max_blocks
        self._sticky = StickySession(self._imbalance)
        self._fallback = LeastLoaded()
        self._homes: collections.OrderedDict[int, str] = collections.OrderedDict()

    def choose(self, context: RoutingContext, candidates: Sequence[Candidate]) -> Candidate:
        """Pick the replica that knows most of the prompt, if it isn't overloaded."""
        if context.session_id or context.group_id:
            return self._sticky.choose(context, candidates)
        blocks = self._blocks(context.prefix)
        preferred = self._best_known(blocks, candidates)
        if preferred is None or self._imbalance.is_exceeded(preferred, candidates):
            preferred = self._fallback.choose(context, candidates)
        for block in blocks:
            self._homes[block] = preferred.name
            self._homes.move_to_end(block)
        while len(self._homes) > self._max_blocks:
            self._homes.popitem(last=False)
        return preferred

    def _blocks(self, prefix: str) -> list[int]:
        size = self._block_chars
        blocks: list[int] = []
        for start in range(0, len(prefix) - size + 1, size):
            before = blocks[-1] if blocks else 0
            blocks.append(hash((before, prefix[start : start + size])))
        return blocks

    def _best_known(
        self, blocks: Sequence[int], candidates: Sequence[Candidate]
    ) -> Candidate | None:
        by_name = {candidate.name: candidate for candidate in candidates}
        for index in range(len(blocks) - 1, -1, -1):
            if index + 1 < self._min_match * len(blocks):
                return None
            home = self._homes.get(blocks[index])
            if home in by_name:
                return by_name[home]
        return None


PolicyName = Literal["least_loaded", "round_robin", "sticky_session", "prefix_affinity"]


def make_policy(name: PolicyName) -> Policy:
    """Make the policy of a configured name."""
    policies: dict[PolicyName, type[Policy]] = {
        "least_loaded": LeastLoaded,
        "round_robin": RoundRobin,
        "sticky_session": StickySession,
        "prefix_affinity": PrefixAffinity,
    }
    return policies[name]()
