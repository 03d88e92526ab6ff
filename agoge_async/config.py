"""Configuration: what models there are and how they are served.

A source is a YAML file's path, a preset's name, a mapping, an OmegaConf `DictConfig`, or a list of
these, merged in order: mappings are merged key by key, anything else is replaced. `${env:NAME}` is
replaced by an environment variable, `${here}` by the folder of the file that it stands in.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)

from agoge_async.errors import ConfigError
from agoge_async.routing import PolicyName

PRESETS_DIR = Path(__file__).parent / "presets"

ConfigSource = str | os.PathLike[str] | Mapping[str, Any]
"""One source; an OmegaConf `DictConfig` counts as a mapping."""


class ConfigModel(BaseModel):
    """Base of configuration sections: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", defer_build=True, frozen=True)


_PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
)
_OWN_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES", "TMPDIR", "VLLM_RPC_BASE_PATH"})


class LimitsConfig(ConfigModel):
    """How many requests of a model may be on their way."""

    max_concurrency: Annotated[int, Field(ge=1)] | None = None
    """Requests in flight at once, over all replicas; more wait in order. None: no limit."""
    max_queued: Annotated[int, Field(ge=0)] | None = None
    """Requests that may wait; more are refused. None: no limit."""


class RestartConfig(ConfigModel):
    """When a dead engine is started again."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Deaths in a row after which a replica stays down."""
    backoff_s: Annotated[float, Field(gt=0)] = 1.0
    """Pause before the first restart; doubled for each that follows. [seconds]"""


class VLLMConfig(ConfigModel):
    """A model that this process serves with local vLLM engines."""

    backend: Literal["vllm"] = "vllm"
    engine_args: dict[str, Any] = {}
    """vLLM's `AsyncEngineArgs`; `model` is the model's name in this configuration by default."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Replicas: engines with the whole model each."""
    gpus: list[list[Annotated[int, Field(ge=0)]]] | None = None
    """One list of GPU indices a replica; None: the next free ones, or the CPU without any."""
    env: dict[str, SecretStr] = {}
    """Environment variables of the engine's processes; their values appear nowhere."""
    tool_call_parser: str | None = None
    """vLLM's parser for tool calls, such as hermes; without one, tools are refused."""
    reasoning_parser: str | None = None
    """vLLM's parser that sets thinking apart, such as qwen3."""
    chat_template: str | None = None
    """A Jinja template, or the path of one, in place of the model's own."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long an engine may take to start. [seconds]"""
    restart: RestartConfig = RestartConfig()
    limits: LimitsConfig = LimitsConfig()
    routing: PolicyName = "least_loaded"
    """How requests are spread over the replicas."""

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for size in _PARALLEL_SIZES:
            value = arguments.get(size, 1)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{size} must be a whole number of at least 1, got {value!r}")
        if arguments.get("data_parallel_size", 1) != 1:
            raise ValueError("data_parallel_size: use num_workers, which makes whole replicas")
        if "worker_extension_cls" in arguments:
            raise ValueError("worker_extension_cls is taken: agoge_async has its own in there")
        model = arguments.get("model")
        if isinstance(model, str) and model.startswith("/"):
            return arguments | {"model": os.path.normpath(model)}  # ${here}/../somewhere
        return arguments

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, SecretStr]) -> dict[str, SecretStr]:
        if taken := _OWN_VARIABLES & env.keys():
            raise ValueError(f"{', '.join(sorted(taken))}: set by agoge_async; GPUs go in gpus")
        return env

    @property
    def gpus_per_replica(self) -> int:
        """GPUs that one engine spans."""
        return math.prod(self.engine_args.get(size, 1) for size in _PARALLEL_SIZES)


class RouterConfig(ConfigModel):
    """A whole configuration."""

    models: Annotated[dict[str, VLLMConfig], Field(min_length=1)]
    """By the name that requests use."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of requests that bring none. [seconds]"""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Replicas that a request may try."""


def load_config(sources: ConfigSource | Sequence[ConfigSource]) -> RouterConfig:
    """Read, merge and validate a configuration.

    Raises:
        ConfigError: A source can't be read, or a key or value is wrong; the message says where.
    """
    listed = as_sources(sources)
    merged: dict[str, Any] = {}
    for source in listed:
        merged = _merge(merged, _read(source))
    names = ", ".join(str(s) for s in listed if isinstance(s, str | os.PathLike))
    try:
        return RouterConfig.model_validate(merged)
    except ValidationError as error:
        raise _config_error(error, names or "configuration") from None


def as_sources(sources: ConfigSource | Sequence[ConfigSource]) -> list[ConfigSource]:
    """Give a list, whether one source or several are given."""
    if isinstance(sources, str | os.PathLike | Mapping):
        return [sources]
    return list(sources)


def preset_names() -> list[str]:
    """List the presets that come with the library."""
    return sorted(path.stem for path in PRESETS_DIR.glob("*.yaml"))


def _read(source: ConfigSource) -> dict[str, Any]:
    if isinstance(source, Mapping):
        mapping: dict[str, Any] = _interpolate(source, here=None, source="configuration")
        return mapping
    path = Path(source)
    if not path.suffix and path.name == str(source):
        preset = PRESETS_DIR / f"{source}.yaml"
        if not preset.is_file() and not path.exists():
            raise ConfigError(
                f"no preset {str(source)!r}; the presets are {', '.join(preset_names())}; a file's "
                "name ends in .yaml",
                source=str(source),
            )
        path = preset if preset.is_file() else path
    return _read_yaml(path)


def _plain(value: Any) -> Any:
    """Turn an OmegaConf node into plain containers, its interpolations resolved."""
    if type(value).__module__.partition(".")[0] != "omegaconf":
        return value
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"OmegaConf: {error}", key=getattr(error, "full_key", None)) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", source=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} isn't UTF-8 text: {error}", source=str(path)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context
        raise ConfigError(f"{path}, {where}{problem}", source=str(path)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2024-99-99; [[[[...
        raise ConfigError(f"{path} isn't YAML: {error}", source=str(path)) from error
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} must hold a mapping with the key models, not {type(document).__name__}",
            source=str(path),
        )
    try:
        mapping: dict[str, Any] = _interpolate(
            document, here=path.resolve().parent, source=str(path)
        )
    except RecursionError as error:
        raise ConfigError(
            f"{path}: an alias stands inside its own anchor", source=str(path)
        ) from error
    return mapping


_REFERENCE = re.compile(r"\$\{(?:env:([^}]*)|(here))\}")


def _interpolate(value: Any, *, here: Path | None, source: str, key: str = "") -> Any:
    """Replace references in all strings; `key` is where `value` stands."""
    value = _plain(value)
    if isinstance(value, Mapping):
        return {
            str(name): _interpolate(item, here=here, source=source, key=f"{key}.{name}".strip("."))
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _interpolate(item, here=here, source=source, key=f"{key}.{index}")
            for index, item in enumerate(value)
        ]
    if not isinstance(value, str):
        return value

    def resolve(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            if here is None:
                raise ConfigError(
                    f"{key}: ${{here}} has a meaning in files only", key=key, source=source
                )
            return str(here)
        if name not in os.environ:
            raise ConfigError(
                f"{key}: the environment has no variable {name}; set it, or change ${{env:{name}}}",
                key=key,
                source=source,
            )
        return os.environ[name]

    return _REFERENCE.sub(resolve, value)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


_SECTIONS: dict[str, type[ConfigModel]] = {
    "": RouterConfig,
    "models": VLLMConfig,
    "limits": LimitsConfig,
    "restart": RestartConfig,
}


def _config_error(error: ValidationError, source: str) -> ConfigError:
    fault = error.errors(include_url=False, include_input=False)[0]
    steps = [str(step) for step in fault["loc"]]
    key = ".".join(steps)
    if fault["type"] == "extra_forbidden":
        section = steps[-2] if len(steps) > 1 else ""
        known = _SECTIONS.get("models" if len(steps) == 3 else section, RouterConfig).model_fields
        near = difflib.get_close_matches(steps[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        message = f"unknown key {key!r}; {hint}"
    elif fault["type"] == "missing":
        message = f"{key} is required"
    else:
        problem = fault["msg"].removeprefix("Value error, ")
        if fault["type"] != "value_error":
            problem = problem[0].lower() + problem[1:]
        message = f"{key}: {problem}"
    return ConfigError(f"{source}: {message}", key=key, source=source)
