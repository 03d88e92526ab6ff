"""Where the tensors of a checkpoint lie in a running vLLM model.

vLLM's loaders fuse, cut and pad what they load, each model in its own way. `map_layout` runs the
model's own loader on tensors without data and notes each copy that it would make. So a push that
the model can't take, or that leaves a part of it as it was, is known before anything is touched,
and `compare` finds each tensor again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from agoge_async.errors import WeightSyncError
from agoge_async.weights.plan import TensorMeta

PLAIN_METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""vLLM's ways to compute with a layer that leave its parameters as they are loaded."""
MAX_NAMED = 5
"""Names that an error lists."""


class Window(NamedTuple):
    """Some elements of a tensor, as `torch.as_strided` takes them."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor) -> Window:
        """Say which elements of its storage a view shows."""
        return cls(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Show the same elements of another tensor, which is contiguous."""
        return tensor.as_strided(self.size, self.stride, int(tensor.storage_offset()) + self.offset)


class Place(NamedTuple):
    """Where some elements of a checkpoint's tensor lie in the model."""

    module: str
    parameter: str
    inside: Window
    """Of the parameter."""
    taken: Window
    """Of the checkpoint's tensor."""


class Layout(NamedTuple):
    """Where everything lies."""

    places: dict[str, list[Place]]
    """By the checkpoint's names; a name that this worker has no place for isn't in it."""
    shapes: dict[tuple[str, str], tuple[int, ...]]
    """Of the parameters as a checkpoint fills them, by module and name."""
    is_plain: bool
    """Whether the model computes with nothing but what the checkpoint's tensors are copied to."""


class Comparison(NamedTuple):
    """What became of comparing tensors with the model."""

    differing: list[str]
    unchecked: list[str]
    """Tensors that vLLM holds in a form that they can't be read from."""


def map_layout(
    model: Any, tensors: Iterable[TensorMeta], aliases: dict[str, str], *, may_lack: bool
) -> Layout:
    """Find out where tensors would be loaded to; changes nothing.

    Args:
        model: vLLM's, running; nobody else may use it meanwhile.
        tensors: What a checkpoint holds.
        aliases: Further names of some of them.
        may_lack: Whether the model may have parameters that the tensors don't fill.

    Raises:
        WeightSyncError: The model can't take them, or they leave a part of it unfilled.
    """
    with _unloaded(model) as parameters:
        recorder = _Recorder(parameters)
        last = ""

        def empty() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            names = {meta.name: [meta.name] for meta in tensors}
            for alias, name in aliases.items():
                names[name].append(alias)
            for meta in tensors:
                for name in names[meta.name]:
                    last = f"{name} of shape {list(meta.shape)}"
                    yield name, recorder.offer(name, meta)

        offered = empty()
        try:
            with torch.inference_mode(), recorder:
                model.load_weights(offered)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise WeightSyncError(f"the engine's model can't take {last}: {cause}") from error
        for name, _ in offered:
            raise WeightSyncError(f"the engine's model did not take {name} and what follows it")
        shapes = {place: tuple(tensor.shape) for place, tensor in parameters.items()}
    _add_shared(model, recorder.places, shapes)
    is_plain = not recorder.transforms and _is_plain(model, shapes)
    layout = Layout(recorder.places, shapes, is_plain)
    _check_apart(layout, aliases)
    if not may_lack:
        _check_filled(layout, recorder.filled)
    return layout


def copy_in_place(model: Any, layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a checkpoint's tensors to where they lie in a plain model.

    Args:
        model: vLLM's, running.
        layout: Of these tensors; plain.
        tensors: By name, contiguous.
    """
    with torch.inference_mode():
        for name, tensor in tensors:
            for place in layout.places.get(name, ()):
                parameter = getattr(model.get_submodule(place.module), place.parameter)
                place.inside.on(parameter.data).copy_(place.taken.on(tensor))


def compare(model: Any, layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]]) -> Comparison:
    """Compare a checkpoint's tensors with what the model computes with.

    Args:
        model: vLLM's, running.
        layout: Of these tensors.
        tensors: By name, contiguous.
    """
    found = Comparison([], [])
    with torch.inference_mode():
        for name, tensor in tensors:
            for place in layout.places.get(name, ()):
                module = model.get_submodule(place.module)
                shape = layout.shapes[place.module, place.parameter]
                held = list(_held(module, place.parameter, shape))
                if not held and name not in found.unchecked:
                    found.unchecked.append(name)
                expected = place.taken.on(tensor)
                equal = all(_is_equal(place.inside.on(h), expected) for h in held)
                if not equal and name not in found.differing:
                    found.differing.append(name)
    return found


def _held(module: Any, name: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Give a parameter as a checkpoint has it, in each of the forms that the module holds.

    vLLM's CPU layers compute with a packed copy of `weight` (`model_executor/layers/utils.py`); a
    product with the identity matrix has exactly its elements.
    """
    parameter = getattr(module, name)
    if tuple(parameter.shape) == shape and parameter.is_contiguous():
        yield parameter.data
    if name == "weight" and len(shape) == 2 and hasattr(module, "cpu_linear"):
        identity = torch.eye(shape[1], dtype=parameter.dtype)
        yield module.cpu_linear(identity, parameter, None).T.contiguous()


def _is_equal(held: torch.Tensor, expected: torch.Tensor) -> bool:
    expected = expected.to(device=held.device, dtype=held.dtype)
    return bool(((held == expected) | (held.isnan() & expected.isnan())).all())


@contextmanager
def _unloaded(model: Any) -> Iterator[dict[tuple[str, str], torch.Tensor]]:
    """Give the model the parameters that it had before anything was loaded, without data."""
    layers = [(name, layer, get_layerwise_info(layer)) for name, layer in model.named_modules()]
    for _, layer, info in layers:
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    try:
        for _, layer, info in layers:
            restore_layer_on_meta(layer, info)
        parameters: dict[tuple[str, str], Any] = {
            (name, own): tensor
            for name, layer, _ in layers
            for own, tensor in layer._parameters.items()
            if tensor is not None and own not in SKIP_LOAD_TENSORS
        }
        for tensor in parameters.values():  # an earlier reload left its wrappers on them
            tensor.weight_loader = _get_original_loader(tensor)
        yield parameters
    finally:
        for _, layer, info in layers:
            _place_kernel_tensors(layer, info)
            info.reset()


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch types it as Any
    """Notes what a loader would copy where, and keeps it from copying."""

    def __init__(self, parameters: dict[tuple[str, str], torch.Tensor]) -> None:
        super().__init__()
        self.places: dict[str, list[Place]] = {}
        self.filled: dict[tuple[str, str], int] = {}
        """Elements, by parameter; those of padding, which loaders zero, included."""
        self.transforms = False
        """Whether a loader computes what it writes."""
        self._targets = {_storage(tensor): place for place, tensor in parameters.items()}
        self._offered: dict[int, tuple[str, torch.Tensor]] = {}

    def offer(self, name: str, meta: TensorMeta) -> torch.Tensor:
        """Give a tensor for the loader to take."""
        tensor = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
        self._offered[_storage(tensor)] = name, tensor
        return tensor

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let pass what doesn't write to a parameter."""
        del types
        if operator in _WRITES:
            target = self._targets.get(_storage(args[0]))
            if target is not None:
                self._note(target, *args)
                return args[0]
        return operator(*args, **(kwargs or {}))

    def _note(self, target: tuple[str, str], into: torch.Tensor, value: Any) -> None:
        self.filled[target] = self.filled.get(target, 0) + into.numel()
        if not isinstance(value, torch.Tensor):
            return
        offered = self._offered.get(_storage(value))
        if offered is None:
            self.transforms = True
        else:
            taken = value.expand(into.shape)
            place = Place(*target, Window.of(into), Window.of(taken))
            self.places.setdefault(offered[0], []).append(place)


_WRITES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_plain(model: nn.Module, shapes: dict[tuple[str, str], tuple[int, ...]]) -> bool:
    """Say whether no module packs, moves or derives anything after it was loaded (vLLM 0.32)."""
    for (module, own), shape in shapes.items():
        parameter = getattr(model.get_submodule(module), own)
        if tuple(parameter.shape) != shape or not parameter.is_contiguous():
            return False
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        packed = getattr(getattr(layer, "cpu_linear", None), "__closure__", None)
        is_latent = hasattr(layer, "kv_b_proj")  # multi-head latent attention, which absorbs it
        if type(method).__name__ not in PLAIN_METHODS or packed is not None or is_latent:
            return False
    return True


def _add_shared(
    model: nn.Module,
    places: dict[str, list[Place]],
    shapes: dict[tuple[str, str], tuple[int, ...]],
) -> None:
    """Add the modules that hold a parameter of another one: a tied head packs it once more."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.numel():
                owners.setdefault(parameter.data_ptr(), []).append((name, own))
    shared = {own: others for others in owners.values() for own in others if len(others) > 1}
    for held in places.values():
        for place in list(held):
            for other in shared.get((place.module, place.parameter), ()):
                if shapes.get(other) == shapes[place.module, place.parameter]:
                    twin = place._replace(module=other[0], parameter=other[1])
                    if twin not in held:
                        held.append(twin)


def _check_filled(layout: Layout, filled: dict[tuple[str, str], int]) -> None:
    """Refuse what would leave a part of the model as it was.

    Args:
        layout: What would be loaded.
        filled: Elements that loaders would write, by parameter.
    """
    filling = _names_by_parameter(layout)
    lacking = [".".join(owner) for owner in layout.shapes if owner not in filling]
    if lacking:
        raise WeightSyncError(
            f"the trainer's model has nothing for the engine's {_listed(lacking)}"
        )
    for owner, names in filling.items():
        written = filled.get(owner)  # none of one that only shares another's memory
        if written is not None and written < torch.Size(layout.shapes[owner]).numel():
            raise WeightSyncError(
                f"the trainer's model fills a part of the engine's {'.'.join(owner)} only: "
                f"{_listed(names)}"
            )


def _check_apart(layout: Layout, aliases: dict[str, str]) -> None:
    """Refuse two tensors that would be loaded to the same place, where the last one would stay."""
    for owner, names in _names_by_parameter(layout).items():
        apart = {aliases.get(name, name) for name in names}
        size = sum(
            torch.Size(place.taken.size).numel()
            for name in apart
            for place in layout.places.get(name, ())
            if (place.module, place.parameter) == owner
        )
        if size > torch.Size(layout.shapes[owner]).numel():
            raise WeightSyncError(
                f"the trainer has {_listed(sorted(apart))} apart, the engine has one tensor for "
                f"them, {'.'.join(owner)}"
            )


def _names_by_parameter(layout: Layout) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for name, places in layout.places.items():
        for place in places:
            found.setdefault((place.module, place.parameter), []).append(name)
    return found


def _listed(names: Iterable[str]) -> str:
    named = list(names)
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return ", ".join(named[:MAX_NAMED]) + more
