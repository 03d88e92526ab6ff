"""A push and vLLM's model: what it would fill, loading it, comparing with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from agoge_async.engine.layout import Comparison, Layout, compare, copy_in_place, map_layout
from agoge_async.errors import WeightSyncError
from agoge_async.weights.manifest import Manifest
from agoge_async.weights.plan import TensorMeta

Tensors = Iterator[tuple[str, torch.Tensor]]


class ModelWeights:
    """The weights of one worker's model, under the names of a checkpoint.

    Args:
        worker: vLLM's.
    """

    def __init__(self, worker: Any) -> None:
        self._model = worker.get_model()
        self._config = worker.model_config
        self._device: torch.device = worker.device
        self._layout: tuple[list[TensorMeta], dict[str, str], Layout] | None = None

    def expect(self, manifest: Manifest) -> list[str]:
        """Take note of what comes; gives the parameters that this worker has no place for.

        Raises:
            WeightSyncError: The model can't take it, or it leaves a part of the model as it was.
        """
        tensors = manifest.tensors
        if self._layout is None or self._layout[:2] != (tensors, manifest.aliases):
            # Quantization adds parameters, such as scales, that no trainer has.
            may_lack = self._config.quantization is not None
            layout = map_layout(self._model, tensors, manifest.aliases, may_lack=may_lack)
            self._layout = tensors, manifest.aliases, layout
        places = self._layout[2].places
        placed = {manifest.aliases.get(name, name) for name in places}
        return [meta.name for meta in tensors if not meta.is_buffer and meta.name not in placed]

    def load(self, tensors: Tensors) -> None:
        """Put the tensors that are expected into the running model, in place.

        vLLM loads a checkpoint by making each layer anew and copying it over the old one, which
        takes several times longer, and memory. Where layers are what was copied to them, that is
        all that is done.
        """
        assert self._layout is not None
        if self._layout[2].is_plain:
            copy_in_place(self._model, self._layout[2], tensors)
        else:
            self._load_by_layer(tensors)
        if self._device.type == "cuda":  # what is read may be overwritten from now on
            torch.cuda.synchronize(self._device)

    def _load_by_layer(self, tensors: Tensors) -> None:
        with torch.inference_mode():
            initialize_layerwise_reload(self._model)
            self._model.load_weights(tensors)
            for name, _ in tensors:  # a loader that stops early would leave the rest unread
                raise WeightSyncError(f"the model did not take {name} and what follows it")
            finalize_layerwise_reload(self._model, self._config)

    def compare(self, tensors: Tensors) -> Comparison:
        """Compare the tensors that are expected with those that the model computes with."""
        assert self._layout is not None
        return compare(self._model, self._layout[2], tensors)
