"""Frames, their memory and digests; which way weights take."""

import datetime
import os
import threading

import pytest
import torch
from torch.distributed import HashStore

from agoge_async.backends.base import WeightShape
from agoge_async.errors import WeightSyncError
from agoge_async.weights.digest import CHUNK_WORDS, digest, multilinear
from agoge_async.weights.frames import FramePool
from agoge_async.weights.groups import Group
from agoge_async.weights.manifest import GroupRoute
from agoge_async.weights.ranks import host_address
from agoge_async.weights.routes import pick_transport
from agoge_async.weights.segments import Segment


@pytest.mark.parametrize("hashed", [digest, multilinear], ids=["cpu", "gpu"])
@pytest.mark.parametrize("num_words", [1, 7, CHUNK_WORDS, 3 * CHUNK_WORDS + 5])
def test_a_digest_sees_every_bit_and_every_place(hashed, num_words):
    """One bit that flips, two words that change places, bytes that are missing."""
    torch.manual_seed(num_words)
    data = torch.randint(0, 256, (8 * num_words,), dtype=torch.uint8)
    seen = {hashed(data)}
    for place in {0, 5, 8 * num_words - 1}:
        changed = data.clone()
        changed[place] ^= 16
        seen.add(hashed(changed))
    swapped = data.view(torch.int64).flip(0).contiguous().view(torch.uint8)
    if num_words > 1:
        seen |= {hashed(swapped), hashed(data[8:])}
    assert len(seen) == 1 + len({0, 5, 8 * num_words - 1}) + 2 * (num_words > 1)
    assert hashed(data.clone()) == hashed(data)


def test_frames_are_used_again_once_nobody_looks():
    """A loader that keeps a tensor keeps its memory; no other message is written into it."""
    pool = FramePool()
    first, second = pool.take(4096), pool.take(4096)
    first.fill_(1)
    address, other = first.data_ptr(), second.data_ptr()
    kept = first[104:112].view(torch.int64)
    del first
    third = pool.take(4096)
    assert third.data_ptr() not in {address, other}
    assert kept.item() == 0x0101010101010101
    del kept
    assert address == pool.take(4000).data_ptr()
    assert pool.take(1000).data_ptr() not in {address, other}, "no large one for a small message"


@pytest.mark.parametrize(
    ("devices", "own", "sources", "is_one_host", "expected"),
    [
        (["cpu", "cpu"], "cpu", [0], True, "shm"),
        (["cpu"], "cpu", [0, 1], True, "shm"),
        (["cpu"], "cpu", [0, 1], False, "gloo"),
        (["cpu"], "cpu", [0], False, "shm"),
        (["gpu-1"], "cpu", [0], True, "shm"),
        (["cpu"], "gpu-0", [0], True, "shm"),
        (["gpu-1", "gpu-2"], "gpu-0", [0], True, "nccl"),
        (["gpu-1", "gpu-2"], "gpu-0", [0, 8], False, "nccl"),
        (["gpu-0"], "gpu-0", [0], True, "cuda_ipc"),
        (["gpu-0", "gpu-0"], "gpu-0", [0], True, "cuda_ipc"),
        (["gpu-0"], "gpu-0", [0, 1], True, "shm"),
        (["gpu-0", "gpu-1"], "gpu-0", [0], True, "shm"),
        (["gpu-1", "gpu-1"], "gpu-0", [0], True, "shm"),
    ],
)
def test_the_transport_follows_the_places_of_weights(devices, own, sources, is_one_host, expected):
    """NCCL has no two ranks of a group on one GPU; CUDA's IPC needs the same one."""
    engines = [
        WeightShape(incarnation=index, devices=(device,), dtype="bfloat16")
        for index, device in enumerate(devices)
    ]
    assert expected == pick_transport(engines, own, sources, is_one_host=is_one_host)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"LOCAL_WORLD_SIZE": "1"}, "127.0.0.1"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0"}, "127.0.0.1"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0"}, "node-0"),
    ],
    ids=["alone", "alone beside vLLM", "one host", "two hosts"],
)
def test_the_address_of_rank_0(monkeypatch, variables, expected):
    """The loopback where all ranks are here; vLLM leaves a variable of torchrun's behind."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert expected == host_address()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_without_nccl_a_group_over_it_is_refused():
    """Not silently left out: uninitialised weights would be loaded."""
    route = GroupRoute("nccl", "127.0.0.1", 1, "epoch", (0,), 1)
    store = HashStore()
    store.set_timeout(datetime.timedelta(seconds=1))
    with pytest.raises(WeightSyncError, match="this torch has no NCCL; take transport='gloo'"):
        Group(store, route, 0, 0, torch.device("cpu"), 1.0)


def test_a_segment_that_threads_close_at_once_is_closed_once():
    """Else a file that was opened in between would be closed under its owner."""
    for _ in range(200):
        segment = Segment.make(4096)
        barrier = threading.Barrier(2)
        opened = []

        def close(segment=segment, barrier=barrier, opened=opened) -> None:
            barrier.wait()
            segment.close()
            opened.append(os.open("/dev/null", os.O_RDONLY))

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for descriptor in opened:
            os.close(descriptor)
