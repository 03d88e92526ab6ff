"""Routing policies, each alone."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agoge_async.routing import (
    Candidate,
    Imbalance,
    LeastLoaded,
    PrefixAffinity,
    RoundRobin,
    RoutingContext,
    StickySession,
    make_policy,
)

POLICIES = ["least_loaded", "round_robin", "sticky_session", "prefix_affinity"]
NOBODY = RoutingContext()


def replicas(*in_flight: int) -> list[Candidate]:
    return [Candidate(name=f"r{i}", in_flight=count) for i, count in enumerate(in_flight)]


def choose(policy, candidates, **context) -> str:
    return policy.choose(RoutingContext(**context), candidates).name


contexts = st.builds(
    RoutingContext,
    session_id=st.none() | st.sampled_from("ab"),
    group_id=st.none() | st.sampled_from("xy"),
    prefix=st.text("pq", max_size=12),
)
loads = st.lists(st.integers(0, 200), min_size=1, max_size=5)


@pytest.mark.parametrize("name", POLICIES)
@given(history=st.lists(st.tuples(contexts, loads), max_size=20))
def test_a_policy_always_picks_a_candidate(name, history):
    """Whatever came before, and whichever replicas are gone."""
    policy = make_policy(name)
    for context, counts in history:
        candidates = replicas(*counts)
        assert policy.choose(context, candidates) in candidates


@given(loads)
def test_least_loaded_picks_the_fewest_in_flight(counts):
    """Always."""
    chosen = LeastLoaded().choose(NOBODY, replicas(*counts))
    assert min(counts) == chosen.in_flight


@given(st.integers(1, 6), st.integers(1, 5))
def test_least_loaded_lets_equals_take_turns(size, rounds):
    """Else the first one would get all requests that come one at a time."""
    policy = LeastLoaded()
    counts = collections.Counter(
        choose(policy, replicas(*[3] * size)) for _ in range(size * rounds)
    )
    assert [rounds] * size == list(counts.values())


@given(st.integers(1, 6), st.integers(1, 5))
def test_round_robin_is_even(size, rounds):
    """Each gets the same number, in turn, however busy it is."""
    policy = RoundRobin()
    busy = replicas(*range(size))
    names = [choose(policy, busy) for _ in range(size * rounds)]
    assert [candidate.name for candidate in busy] * rounds == names


STICKY = [StickySession, PrefixAffinity]


@pytest.mark.parametrize("policy_class", STICKY)
@pytest.mark.parametrize("key", ["session_id", "group_id"])
def test_a_session_stays_where_it_began(policy_class, key):
    """Also when another replica is less busy now."""
    policy = policy_class()
    home = choose(policy, replicas(5, 0, 5), **{key: "s"})
    later = [choose(policy, replicas(0, 20, count), **{key: "s"}) for count in range(20)]
    assert "r1" == home
    assert {"r1"} == set(later)


@pytest.mark.parametrize("policy_class", STICKY)
def test_a_session_counts_more_than_its_group(policy_class):
    """A conversation goes on where its own prefix is."""
    policy = policy_class()
    choose(policy, replicas(0, 9), session_id="s")
    choose(policy, replicas(9, 0), group_id="g")
    assert "r0" == choose(policy, replicas(5, 5), session_id="s", group_id="g")


@pytest.mark.parametrize("policy_class", STICKY)
def test_a_session_moves_when_its_replica_is_gone(policy_class):
    """And then stays at its new home, also when the old one is back."""
    policy = policy_class()
    both = replicas(0, 1)
    choose(policy, both, session_id="s")
    moved = choose(policy, both[1:], session_id="s")
    assert ["r1", "r1"] == [moved, choose(policy, both, session_id="s")]


@pytest.mark.parametrize("policy_class", STICKY)
@pytest.mark.parametrize(
    ("counts", "expected"),
    [((64, 0), "r0"), ((65, 0), "r1"), ((200, 134), "r0"), ((215, 140), "r1")],
)
def test_a_session_moves_when_its_replica_is_too_busy(policy_class, counts, expected):
    """More than 64 ahead and more than half as many again, as in vllm-router."""
    policy = policy_class()
    choose(policy, replicas(0, 1), session_id="s")
    assert choose(policy, replicas(*counts), session_id="s") == expected


def test_requests_without_a_session_go_to_the_idlest():
    """Stickiness is for those who ask for it."""
    policy = StickySession()
    assert ["r1"] * 3 == [choose(policy, replicas(2, 1, 3)) for _ in range(3)]


def test_sessions_longest_unused_are_forgotten():
    """Memory is bounded; a session in use is kept."""
    policy = StickySession(max_keys=2)
    choose(policy, replicas(0, 9), session_id="old")
    choose(policy, replicas(0, 9), session_id="used")
    choose(policy, replicas(9, 9), session_id="old")
    choose(policy, replicas(9, 0), session_id="new")
    homes = [choose(policy, replicas(9, 0), session_id=key) for key in ("old", "used")]
    assert ["r0", "r1"] == homes


@given(st.lists(st.integers(0, 50)))
def test_sessions_never_take_more_memory_than_allowed(keys):
    """However many there are."""
    policy = StickySession(max_keys=10)
    for key in keys:
        choose(policy, replicas(0, 0), session_id=f"s{key}")
    assert len(policy._homes) <= 10


def test_a_group_spreads_only_with_its_session():
    """The samples of one group share a replica, different groups don't have to."""
    policy = StickySession()
    names = {choose(policy, replicas(0, 0, 0, 0), group_id=str(group)) for group in range(4)}
    assert 4 == len(names)


def affinity(**options) -> PrefixAffinity:
    return PrefixAffinity(block_chars=4, **options)


def test_prompts_with_a_shared_prefix_go_together():
    """The replica that computed it has it in its cache."""
    policy = affinity()
    choose(policy, replicas(1, 0, 1), prefix="you are a judge: first question")
    later = choose(policy, replicas(0, 5, 0), prefix="you are a judge: second one")
    assert "r1" == later


def test_the_longest_known_prefix_wins():
    """A whole history beats the system prompt that many share."""
    policy = affinity()
    choose(policy, replicas(0, 1), prefix="systemAA")
    choose(policy, replicas(80, 0), prefix="systemAAhistory1")
    assert "r1" == choose(policy, replicas(0, 0), prefix="systemAAhistory1more")


def test_a_prompt_of_which_little_is_known_goes_to_the_idlest():
    """Three tenths of its blocks by default."""
    policies = affinity(), affinity()
    for policy in policies:
        choose(policy, replicas(0, 1), prefix="same")
    assert "r0" == choose(policies[0], replicas(1, 0), prefix="same" + "x" * 8)
    assert "r1" == choose(policies[1], replicas(1, 0), prefix="same" + "x" * 12)


def test_prefix_affinity_gives_way_to_load():
    """A replica too far ahead loses the prefix to the idlest, which then keeps it."""
    policy = affinity(imbalance=Imbalance(absolute=2, relative=1.0))
    prompt = "a shared prompt"
    choose(policy, replicas(0, 1), prefix=prompt)
    moved = choose(policy, replicas(3, 0), prefix=prompt)
    assert ["r1", "r1"] == [moved, choose(policy, replicas(0, 0), prefix=prompt)]


def test_a_prefix_whose_replica_is_gone_moves():
    """And is known at its new home."""
    policy = affinity()
    both = replicas(0, 9)
    choose(policy, both, prefix="a shared prompt")
    moved = choose(policy, both[1:], prefix="a shared prompt")
    assert ["r1", "r1"] == [moved, choose(policy, both, prefix="a shared prompt")]


def test_the_same_block_in_another_place_is_another_block():
    """A cache holds prefixes, not pieces."""
    policy = affinity()
    choose(policy, replicas(0, 1), prefix="aaaabbbb")
    assert "r1" == choose(policy, replicas(1, 0), prefix="bbbbaaaa")


@given(st.lists(st.text("ab", max_size=60), max_size=30))
def test_prefixes_never_take_more_memory_than_allowed(prompts):
    """However many and however long they are."""
    policy = affinity(max_blocks=20)
    for prompt in prompts:
        choose(policy, replicas(0, 0), prefix=prompt)
    assert len(policy._homes) <= 20


def test_short_prompts_go_to_the_idlest():
    """Less than a block isn't worth a cache's while."""
    policy = affinity()
    assert ["r1"] * 3 == [choose(policy, replicas(1, 0), prefix="abc") for _ in range(3)]
