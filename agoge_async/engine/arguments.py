"""Which arguments vLLM's engine takes, read from its source: importing it takes ten seconds."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from agoge_async.errors import ConfigError

_CLASSES = {"EngineArgs", "AsyncEngineArgs"}


@functools.cache
def known_engine_args() -> frozenset[str]:
    """Name the fields of the installed vLLM's `AsyncEngineArgs`; empty where they can't be read."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    names: set[str] = set()
    for folder in folders or ():
        source = Path(folder, "engine", "arg_utils.py")
        if not source.is_file():
            continue
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
                names |= {
                    field.target.id
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
    return frozenset(names)


def check_engine_args(arguments: Iterable[str], key: str) -> None:
    """Refuse what vLLM doesn't know; without a vLLM here, all passes.

    Args:
        arguments: Names of the arguments.
        key: Where in the configuration they stand.

    Raises:
        ConfigError: Names the argument and the nearest one that there is.
    """
    known = known_engine_args()
    for name in arguments:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{key}.{name}: vLLM's engine has no such argument{hint}", key=f"{key}.{name}"
            )
