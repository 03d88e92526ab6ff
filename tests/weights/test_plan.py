"""Buckets and messages: every byte goes once, in one order, within the budget."""

import random

import pytest

from agoge_async.weights.plan import (
    ALIGNMENT,
    ITEM_BYTES,
    TensorMeta,
    cut_messages,
    parts_of,
    plan_buckets,
    shard_messages,
    whole_messages,
)


def random_tensors(seed: int) -> list[TensorMeta]:
    """Scalars, empty tensors, tensors above any budget, all types."""
    chance = random.Random(seed)
    shapes = [(), (0,), (1,), (7,), (64,), (3, 5), (100, 30), (2, 3, 4), (4000,)]
    return [
        TensorMeta(f"layer.{number}", chance.choice(list(ITEM_BYTES)), chance.choice(shapes))
        for number in range(chance.randrange(1, 60))
    ]


@pytest.mark.parametrize("seed", range(30))
def test_each_tensor_lies_in_one_bucket_in_order(seed):
    """Whatever the budget."""
    tensors = random_tensors(seed)
    buckets = plan_buckets(tensors, random.Random(seed).choice([1, 64, 1000, 10_000, 1 << 30]))
    assert tensors == [slice_.tensor for bucket in buckets for slice_ in bucket.slices]
    assert list(range(len(buckets))) == [bucket.index for bucket in buckets]


@pytest.mark.parametrize("seed", range(30))
def test_a_bucket_keeps_to_its_budget_or_is_one_tensor(seed):
    """The peak of a push is bounded by the budget and the largest tensor."""
    budget = random.Random(seed).choice([1, 64, 1000, 10_000])
    for bucket in plan_buckets(random_tensors(seed), budget):
        solid = [slice_ for slice_ in bucket.slices if slice_.tensor.num_bytes]
        assert bucket.num_bytes <= budget or 1 == len(solid)


@pytest.mark.parametrize("seed", range(30))
def test_tensors_of_a_bucket_do_not_overlap(seed):
    """And start where any type may start."""
    for bucket in plan_buckets(random_tensors(seed), 5000):
        end = 0
        for slice_ in bucket.slices:
            assert 0 == slice_.offset % ALIGNMENT
            assert end <= slice_.offset
            end = slice_.offset + slice_.tensor.num_bytes
        assert end == bucket.num_bytes


def test_a_budget_is_used_up():
    """Nothing is sent alone that fits with what comes before it."""
    tensors = [TensorMeta(f"{number}", "float32", (16,)) for number in range(10)]
    sizes = [len(bucket.slices) for bucket in plan_buckets(tensors, 64 * 4)]
    assert [4, 4, 2] == sizes


@pytest.mark.parametrize(
    ("tensors", "budget", "message"),
    [
        ([TensorMeta("w", "float32", (1,))], 0, "must be positive, got 0"),
        ([TensorMeta("w", "float32", (1,))] * 2, 10, "the name w comes twice"),
        ([TensorMeta("w", "complex64", (1,))], 10, "w: can't send the type complex64"),
    ],
    ids=["budget", "twice", "type"],
)
def test_what_cannot_be_planned_is_refused(tensors, budget, message):
    """With the name of what is wrong."""
    with pytest.raises(ValueError, match=message):
        plan_buckets(tensors, budget)


def test_sources_take_turns():
    """Bucket i comes from source i, round and round."""
    buckets = plan_buckets([TensorMeta(f"{i}", "uint8", (64,)) for i in range(5)], 64)
    assert [2, 5, 2, 5, 2] == [m.source for m in whole_messages(buckets, [2, 5])]


@pytest.mark.parametrize("num_ranks", [None, 1, 3])
@pytest.mark.parametrize("limit", [64, 1000, 100_000])
@pytest.mark.parametrize("seed", range(10))
def test_messages_that_are_cut_hold_the_same_within_the_limit(seed, limit, num_ranks):
    """Each element once, in order, and messages of a bucket follow each other."""
    buckets = plan_buckets(random_tensors(seed), 5000)
    whole = (
        whole_messages(buckets, [0]) if num_ranks is None else shard_messages(buckets, num_ranks)
    )
    cut = cut_messages(whole, buckets, limit)
    assert elements(whole, buckets) == elements(cut, buckets)
    for message in cut:
        assert message.num_bytes <= limit
        end = 0
        for part in parts_of(message, buckets[message.bucket]):
            assert 0 == part.offset % ALIGNMENT
            assert end <= part.offset
            item = buckets[message.bucket].slices[part.slice].tensor.item_bytes
            end = part.offset + part.num_items * item
        assert end == message.num_bytes


def elements(messages, buckets):
    """List the elements that messages hold, by their sources, in order."""
    return [
        (message.bucket, message.source, part.slice, number)
        for message in messages
        for part in parts_of(message, buckets[message.bucket])
        for number in range(part.first, part.first + part.num_items)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_shards_cover_each_element_once(seed, num_ranks):
    """Uneven sizes, and tensors with fewer elements than there are ranks, included."""
    buckets = plan_buckets(random_tensors(seed), 5000)
    seen: dict[tuple[int, int], list[int]] = {}
    for message in shard_messages(buckets, num_ranks):
        end = 0
        for part in message.parts:
            tensor = buckets[message.bucket].slices[part.slice].tensor
            length = -(-tensor.num_items // num_ranks)
            assert message.source * length == part.first
            assert end <= part.offset
            end = part.offset + part.num_items * tensor.item_bytes
            seen.setdefault((message.bucket, part.slice), []).extend(
                range(part.first, part.first + part.num_items)
            )
        assert end == message.num_bytes
    for bucket in buckets:
        for index, slice_ in enumerate(bucket.slices):
            expected = list(range(slice_.tensor.num_items))
            assert expected == seen.get((bucket.index, index), [])
