"""Engine arguments, known before any engine is started."""

import importlib.util

import pytest

from agoge_async import ConfigError
from agoge_async.engine import arguments
from agoge_async.engine.arguments import check_engine_args, known_engine_args

SOURCE = """
class EngineArgs:
    model: str = "m"
    seed: int = 0

    def method(self): ...

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False

class Other:
    no_argument: int = 0
"""


@pytest.fixture
def own_vllm(tmp_path, monkeypatch):
    """Put a vLLM of three arguments in the place of the installed one."""
    folder = tmp_path / "vllm" / "engine"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "arg_utils.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(
        "vllm", tmp_path / "vllm" / "__init__.py", submodule_search_locations=[str(folder.parent)]
    )
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda _name: spec)
    known_engine_args.cache_clear()
    yield
    known_engine_args.cache_clear()


def test_arguments_are_the_fields_of_both_classes(own_vllm):
    """Read, not imported."""
    assert {"model", "seed", "enable_log_requests"} == known_engine_args()


def test_an_unknown_argument_is_refused_with_the_nearest(own_vllm):
    """The key says where it stands."""
    with pytest.raises(ConfigError, match="did you mean 'seed'") as caught:
        check_engine_args(["model", "sead"], "models.m.engine_args")
    assert "models.m.engine_args.sead" == caught.value.key


def test_without_vllm_every_argument_passes(monkeypatch):
    """A configuration can be checked where no engine can run."""
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda _name: None)
    known_engine_args.cache_clear()
    try:
        check_engine_args(["anything"], "models.m.engine_args")
    finally:
        known_engine_args.cache_clear()


def test_the_installed_vllm_is_read():
    """Its engine takes hundreds of arguments, those of the preset among them."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    preset = {"model", "dtype", "max_model_len", "max_num_seqs", "enforce_eager"}
    assert preset < known_engine_args()
