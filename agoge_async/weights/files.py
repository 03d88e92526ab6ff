"""Messages in files: a folder of safetensors, as a checkpoint has it, for engines of any host."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from agoge_async.errors import WeightSyncError
from agoge_async.weights.frames import FramePool, frame_bytes
from agoge_async.weights.manifest import DIGEST_BYTES, DiskRoute, Manifest
from agoge_async.weights.plan import Message


def new_folder(root: Path, version: int) -> Path:
    """Make the folder that a push is written to; removes what failed pushes left.

    Raises:
        WeightSyncError: It can't be made.
    """
    try:
        for left in root.glob("v*.partial"):
            shutil.rmtree(left)
        folder = root / f"v{version}.partial"
        folder.mkdir(parents=True)
    except OSError as error:
        raise WeightSyncError(f"can't write weights to {root}: {error.strerror}") from error
    return folder


def publish(folder: Path) -> Path:
    """Give a folder whose files are complete its name, in one step."""
    done = folder.with_suffix("")
    if done.exists():
        shutil.rmtree(done)
    folder.rename(done)
    return done


def remove_others(folder: Path) -> None:
    """Remove the folders of other pushes than the one that was committed."""
    for other in folder.parent.glob("v*"):
        if other != folder and other.name.removesuffix(".partial")[1:].isdecimal():
            shutil.rmtree(other, ignore_errors=True)


class DiskLane:
    """Writes a file a message."""

    takes_any_order = False

    def __init__(self, folder: Path, manifest: Manifest, largest: int) -> None:
        self._folder = folder
        self._manifest = manifest
        self._frame = torch.empty(largest, dtype=torch.uint8)
        self.num_bytes = largest
        """Memory that it holds."""

    def frame(self, message: Message) -> torch.Tensor:
        """Give the frame: what it held is written. Its gaps are zero, as they are when read."""
        return self._frame[: frame_bytes(message)].zero_()

    def send(self, message: Message, frame: torch.Tensor) -> None:
        """Write the tensors of a bucket.

        Raises:
            WeightSyncError: The disk is full, or fails.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._folder / file_name(message, len(self._manifest.messages))
        tensors = tensors_of(self._manifest, message, frame)
        trailer = frame[-DIGEST_BYTES:].view(torch.int64).tolist()
        try:
            save_file(
                tensors, path, metadata={"format": "pt", "agoge": f"{trailer[0]} {trailer[1]}"}
            )
            with path.open("rb") as file:
                os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"can't write {path}: {error}") from error

    def flush(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """Nothing is held."""


class DiskInlet:
    """Reads files that are complete."""

    def __init__(self, route: DiskRoute, pool: FramePool) -> None:
        self.route = route
        self._pool = pool
        self._manifest: Manifest

    def begin(self, manifest: Manifest) -> None:
        """Take note of what the files hold."""
        self._manifest = manifest

    def receive(self, message: Message) -> torch.Tensor:
        """Read a file.

        Raises:
            WeightSyncError: It can't be read.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(self.route.folder) / file_name(message, len(self._manifest.messages))
        frame = self._pool.take(frame_bytes(message)).zero_()
        try:
            with safe_open(path, framework="pt") as file:
                trailer = [int(word) for word in file.metadata()["agoge"].split()]
                frame[-DIGEST_BYTES:].view(torch.int64).copy_(torch.tensor(trailer))
                for name, tensor in tensors_of(self._manifest, message, frame).items():
                    tensor.copy_(file.get_tensor(name))
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise WeightSyncError(f"can't read {path}: {error}") from error
        return frame

    def close(self) -> None:
        """Nothing is held."""


def file_name(message: Message, count: int) -> str:
    """Name the file of a message, as sharded checkpoints do."""
    return f"model-{message.bucket + 1:05d}-of-{count:05d}.safetensors"


def tensors_of(
    manifest: Manifest, message: Message, frame: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Show the tensors of a whole bucket in its frame."""
    shown = {}
    for slice_ in manifest.buckets[message.bucket].slices:
        meta = slice_.tensor
        piece = frame[slice_.offset : slice_.offset + meta.num_bytes]
        shown[meta.name] = piece.view(getattr(torch, meta.dtype)).view(meta.shape)
    return shown
