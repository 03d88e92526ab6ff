"""What the workers of an engine are told of a push before its first byte: plain data."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from agoge_async.weights.plan import Bucket, Message, TensorMeta

DIGEST_BYTES = 16
"""Room behind each message for its trailer."""


class GroupRoute(msgspec.Struct, frozen=True, tag="group"):
    """Messages come by broadcast, in a process group for each source.

    The source is rank 0 of its group; the workers of all engines are the ranks from 1 on.
    """

    backend: str
    """gloo or nccl."""
    host: str
    port: int
    """Of the store that the groups meet at."""
    epoch: str
    """Names the groups; another one means that they are to be made anew."""
    sources: tuple[int, ...]
    num_workers: int

    is_live: ClassVar[bool] = True
    """Whether engines receive while the ranks send; else they read what was written."""
    is_lasting: ClassVar[bool] = False
    """Whether what was sent can be read again later."""

    @property
    def name(self) -> str:
        """The transport, as users name it."""
        return self.backend


class SharedMemoryRoute(msgspec.Struct, frozen=True, tag="shm"):
    """Messages are written into a segment that the workers map; one follows the other."""

    segment: str
    num_bytes: int

    is_live: ClassVar[bool] = True
    is_lasting: ClassVar[bool] = True
    name: ClassVar[str] = "shm"


class IpcHandle(msgspec.Struct, frozen=True, array_like=True):
    """One process's access to another's GPU memory, as torch shares storages."""

    memory: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool


class CudaIpcRoute(msgspec.Struct, frozen=True, tag="cuda_ipc"):
    """Messages are written into memory of the GPU that trainer and workers share."""

    handles: tuple[IpcHandle, ...]
    """One for each worker of all engines."""
    num_bytes: int

    is_live: ClassVar[bool] = False
    is_lasting: ClassVar[bool] = False
    name: ClassVar[str] = "cuda_ipc"


class DiskRoute(msgspec.Struct, frozen=True, tag="disk"):
    """Messages are files of a folder."""

    folder: str

    is_live: ClassVar[bool] = False
    is_lasting: ClassVar[bool] = True
    name: ClassVar[str] = "disk"


Route = GroupRoute | SharedMemoryRoute | CudaIpcRoute | DiskRoute


class Manifest(msgspec.Struct, frozen=True):
    """All that a worker needs to know to receive and load a push."""

    version: int
    stamp: int
    """Tells the messages of this push from those of any other; positive."""
    buckets: tuple[Bucket, ...]
    messages: tuple[Message, ...]
    """In the order in which they are sent."""
    aliases: dict[str, str]
    """Names of tied parameters, and the tensor that each is."""
    route: Route
    timeout_s: float
    is_staged: bool
    """Received whole before the first tensor is loaded."""
    checks_digests: bool
    first_worker: int = 1
    """Number of this engine's first worker among those of all engines, from 1 on."""
    adapter: str | None = None
    """PEFT's configuration, as JSON, of the LoRA adapter that the tensors are; None: they are the
    model's weights."""

    @property
    def tensors(self) -> list[TensorMeta]:
        """What is sent, in order."""
        return [slice_.tensor for bucket in self.buckets for slice_ in bucket.slices]


def encode_manifest(manifest: Manifest) -> str:
    """Write a manifest for the engine's control calls, which take text."""
    return msgspec.json.encode(manifest).decode()


def decode_manifest(text: str) -> Manifest:
    """Read what `encode_manifest` wrote."""
    return msgspec.json.decode(text, type=Manifest)
