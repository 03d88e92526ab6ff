"""A module imports only from the layers below its own; lazy and typing-only imports count."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "agoge_async"
ROOT = Path(__file__).parents[1] / PACKAGE

# Lowest first. "name.*" takes each module of that package that isn't listed by its own name.
LAYERS = [
    {"deadlines", "errors", "tasks"},
    {"messages"},
    {"requests", "responses"},
    {"assembly", "limits", "metrics", "progress", "routing", "weights", "weights.plan"},
    {"weights.adapters", "weights.digest", "weights.manifest"},
    {"config"},
    {"backends.base", "engine.arguments", "engine.devices", "engine.messages"},
    {"weights.frames", "weights.sources", "weights.transport"},
    {"weights.files", "weights.groups", "weights.segments"},
    {"engine", "engine.*"},
    {"weights.ranks"},
    {"weights.sending"},
    {"backends", "backends.*"},
    {"pool"},
    {"dispatch"},
    {"launch"},
    {"router"},
    {"weights.engines", "weights.routes"},
    {"weights.syncer"},
    {"cli", "cli.*"},
    {"__init__"},
]

HEAVY = {"torch", "vllm"}
# They run in the engine's processes, which is what loads vLLM, or in a trainer's.
WITH_TORCH = {
    "engine.adapters",
    "engine.host",
    "engine.layout",
    "engine.loading",
    "engine.receiver",
    "engine.serving",
    "engine.worker",
    "weights.adapters",
    "weights.digest",
    "weights.files",
    "weights.frames",
    "weights.groups",
    "weights.ranks",
    "weights.routes",
    "weights.segments",
    "weights.sending",
    "weights.sources",
    "weights.syncer",
    "weights.transport",
}

Modules = dict[str, ast.Module]


def load_modules(root: Path) -> Modules:
    """Parse a package's modules, named "__init__", "engine" (engine/__init__.py), "engine.host"."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        modules[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return modules


def absolute_base(node: ast.ImportFrom, importer: str, modules: Modules) -> str:
    """Return the module named after `from`, with a relative one made absolute."""
    if not node.level:
        return node.module or ""
    is_package = importer == "__init__" or any(name.startswith(f"{importer}.") for name in modules)
    parts = [PACKAGE, *([] if importer == "__init__" else importer.split("."))]
    parts = parts[: len(parts) + is_package - node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def imported_names(importer: str, modules: Modules) -> Iterator[str]:
    """Yield the absolute dotted name of each thing that a module imports, wherever it does."""
    for node in ast.walk(modules[importer]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, importer, modules)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def internal_imports(importer: str, modules: Modules) -> set[str]:
    """Return the modules of the package that a module imports."""
    found = set()
    for name in imported_names(importer, modules):
        top, *parts = name.split(".")
        if top != PACKAGE:
            continue
        while parts and ".".join(parts) not in modules:
            parts.pop()  # a name inside a module
        found.add(".".join(parts) or "__init__")
    return found


def layer_of(module: str) -> int | None:
    for entry in (module, f"{module.rpartition('.')[0]}.*"):
        for index, layer in enumerate(LAYERS):
            if entry in layer:
                return index
    return None


def top_package(module: str) -> str | None:
    return module.split(".")[0] if layer_of(f"{module.split('.')[0]}.x") is not None else None


def layering_errors(modules: Modules) -> list[str]:
    errors = [
        f"{module} is in no layer: add it to the list LAYERS"
        for module in modules
        if layer_of(module) is None
    ]
    for module in modules:
        for target in sorted(internal_imports(module, modules)):
            own, other = layer_of(module), layer_of(target)
            if own is None or other is None or other < own:
                continue
            if other == own and top_package(module) == top_package(target) is not None:
                continue
            errors.append(f"{module} (layer {own}) imports {target} (layer {other})")
    return errors


def top_level_heavy_imports(tree: ast.AST) -> set[str]:
    """Return which of HEAVY are imported outside functions."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= top_level_heavy_imports(node)
    return found & HEAVY


@pytest.fixture(scope="module")
def modules() -> Modules:
    return load_modules(ROOT)


def test_modules_import_only_from_lower_layers(modules):
    errors = layering_errors(modules)
    assert not errors, "\n".join(errors)


def test_each_listed_module_exists(modules):
    listed = {entry for layer in LAYERS for entry in layer if not entry.endswith(".*")}
    assert listed <= modules.keys(), "remove it from the list LAYERS"


def test_no_import_cycles(modules):
    graph = {module: internal_imports(module, modules) for module in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_only_engines_and_trainers_import_torch_or_vllm_at_module_level(modules):
    found = {
        module: heavy
        for module, tree in modules.items()
        if module not in WITH_TORCH and (heavy := top_level_heavy_imports(tree))
    }
    assert not found, f"import them inside the function that needs them: {found}"


@pytest.fixture
def fake_layers(monkeypatch):
    layers = [
        {"errors"},
        {"limits", "metrics"},
        {"backends.base", "engine.messages"},
        {"engine", "engine.*"},
        {"router"},
        {"__init__"},
    ]
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", layers)


def fake_package(root: Path, files: dict[str, str]) -> Modules:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return load_modules(root)


@pytest.mark.parametrize(
    ("file", "source", "error"),
    [
        ("errors.py", "from .limits import X", "errors (layer 0) imports limits (layer 1)"),
        ("errors.py", "from . import limits", "errors (layer 0) imports limits (layer 1)"),
        ("errors.py", "import agoge_async", "errors (layer 0) imports __init__ (layer 5)"),
        (
            "metrics.py",
            "def f():\n    from agoge_async.router import Router",
            "metrics (layer 1) imports router (layer 4)",
        ),
        (
            "engine/messages.py",
            "if TYPE_CHECKING:\n    import agoge_async.engine.process",
            "engine.messages (layer 2) imports engine.process (layer 3)",
        ),
        (
            "backends/base.py",
            "from ..engine.messages import Hello",
            "backends.base (layer 2) imports engine.messages (layer 2)",
        ),
        ("limits.py", "from .metrics import X", "limits (layer 1) imports metrics (layer 1)"),
        ("stray.py", "", "stray is in no layer: add it to the list LAYERS"),
    ],
)
@pytest.mark.usefixtures("fake_layers")
def test_the_check_finds(tmp_path, file, source, error):
    names = ["__init__", "limits", "metrics", "router", "engine/__init__", "engine/messages"]
    files = dict.fromkeys([f"{name}.py" for name in [*names, "engine/process"]], "")
    assert layering_errors(fake_package(tmp_path, {**files, file: source})) == [error]


@pytest.mark.usefixtures("fake_layers")
def test_the_check_allows_lower_layers_and_the_same_package(tmp_path):
    files = {
        "__init__.py": "from .router import Router\n__version__ = '1'",
        "errors.py": "",
        "router.py": "import anyio\nfrom agoge_async.engine import X\nfrom . import errors",
        "engine/__init__.py": "from .process import LocalEngine",
        "engine/messages.py": "from ..errors import X",
        "engine/process.py": "from . import messages\nfrom .child import main",
        "engine/child.py": "from agoge_async.engine.messages import Hello",
    }
    modules = fake_package(tmp_path, files)
    assert layering_errors(modules) == []
    assert internal_imports("engine.process", modules) == {"engine.messages", "engine.child"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn", {"torch"}),
        ("try:\n    from vllm import LLM\nexcept ImportError:\n    pass", {"vllm"}),
        ("class A:\n    import torch", {"torch"}),
        ("class A:\n    async def f(self):\n        import torch", set()),
        ("import torchvision", set()),
    ],
)
def test_the_check_for_heavy_imports_finds(source, found):
    assert top_level_heavy_imports(ast.parse(source)) == found
