"""The LoRA adapters of an engine: one for each version, gone after its last request.

Runs in the child. vLLM reads an adapter from a folder, and may read it again whenever it has more
adapters than it keeps: the folder stays until no request is left that needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import msgspec
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from agoge_async.weights.manifest import Manifest


@dataclasses.dataclass(slots=True, eq=False)
class Adapter:
    """One version."""

    version: int
    request: LoRARequest
    """What vLLM is told of it with each request that uses it."""
    num_users: int = 0
    """Requests that have begun with it and not ended."""


class Adapters:
    """Brings adapters to the engine and takes them away.

    Args:
        engine: Started with LoRA, or no adapter ever comes.
        model: What the adapters are named after.
        folder: Of their folders.
    """

    def __init__(self, engine: AsyncLLM, model: str, folder: Path) -> None:
        self._engine = engine
        self._model = model
        self._folder = folder
        self._current: Adapter | None = None
        self._coming: Adapter | None = None
        self._drops: set[asyncio.Task[None]] = set()
        self.versions: tuple[int, ...] = ()
        """Those that vLLM has."""
        self.seconds: dict[str, float] = {}
        """What the last one took: receive_s, load_s."""

    @property
    def is_coming(self) -> bool:
        """Whether the push that was begun is an adapter."""
        return self._coming is not None

    async def begin(self, manifest: Manifest) -> None:
        """Take note of a push that begins."""
        await self.give_up()
        if manifest.adapter is None:
            return
        folder = self._folder / str(manifest.version)
        request = LoRARequest(f"{self._model}-v{manifest.version}", manifest.version, str(folder))
        folder.mkdir(parents=True)
        self._coming = Adapter(manifest.version, request)
        folder.joinpath("adapter_config.json").write_text(manifest.adapter)

    async def load(self) -> None:
        """Have vLLM take what its workers have received; no request uses it yet."""
        assert self._coming is not None
        request = self._coming.request
        started = time.monotonic()
        path = str(Path(request.lora_path, "adapter_model.safetensors"))
        saves = await self._engine.collective_rpc("agoge_save_push", args=(path,))
        await self._engine.add_lora(msgspec.structs.replace(request, load_inplace=True))
        await self._look()
        self.seconds = {
            "receive_s": max(save["receive_s"] for save in saves),
            "load_s": time.monotonic() - started,
        }

    def adopt(self) -> None:
        """Have requests that come from now on use it."""
        old, self._current, self._coming = self._current, self._coming, None
        if old is not None:
            self._drop_unused(old)

    async def give_up(self) -> None:
        """Take away what came and was not adopted."""
        coming, self._coming = self._coming, None
        if coming is not None:
            await self._drop(coming)

    @contextlib.contextmanager
    def use(self) -> Iterator[Adapter | None]:
        """Give the adapter of a request that begins; it stays until the block is left."""
        adapter = self._current
        if adapter is None:
            yield None
            return
        adapter.num_users += 1
        try:
            yield adapter
        finally:
            adapter.num_users -= 1
            self._drop_unused(adapter)

    def _drop_unused(self, adapter: Adapter) -> None:
        if adapter is not self._current and adapter.num_users == 0:
            task = asyncio.get_running_loop().create_task(self._drop(adapter))
            self._drops.add(task)
            task.add_done_callback(self._drops.discard)

    async def _drop(self, adapter: Adapter) -> None:
        with contextlib.suppress(EngineDeadError):  # whoever watches the engine tells of it
            await self._engine.remove_lora(adapter.request.lora_int_id)
            await self._look()
        await anyio.to_thread.run_sync(shutil.rmtree, adapter.request.lora_path)

    async def _look(self) -> None:
        self.versions = tuple(sorted(await self._engine.list_loras()))
