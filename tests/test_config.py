"""Configuration: where it comes from, how it is merged, and what is said of its faults."""

import anyio
import hydra.utils
import pytest
from omegaconf import OmegaConf

from agoge_async import ConfigError, Router, RouterClosedError
from agoge_async.config import (
    PRESETS_DIR,
    RestartConfig,
    RouterConfig,
    VLLMConfig,
    load_config,
    preset_names,
)
from agoge_async.launch import make_pools

MODELS = {"models": {"tiny": {"engine_args": {"model": "org/tiny"}}}}


def write(path, text: str):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def yaml_file(tmp_path):
    """A small configuration in a file."""
    return write(tmp_path / "router.yaml", "models:\n  tiny:\n    num_workers: 2\n")


# Sources


def test_defaults_are_filled_in():
    """One model without any settings is a configuration."""
    config = load_config({"models": {"org/tiny": {}}})
    assert config == RouterConfig(models={"org/tiny": VLLMConfig()})
    assert config.models["org/tiny"].restart == RestartConfig(max_restarts=3, backoff_s=1.0)


def test_every_preset_can_be_loaded():
    """By its name."""
    assert "tiny" in preset_names()
    assert [list(load_config(name).models) for name in preset_names()] == [
        [name] for name in preset_names()
    ]


@pytest.mark.parametrize("as_given", [str, lambda path: path], ids=["str", "Path"])
def test_a_file_can_be_loaded(yaml_file, as_given):
    """By its path."""
    assert 2 == load_config(as_given(yaml_file)).models["tiny"].num_workers


def test_a_dictconfig_can_be_loaded():
    """Its interpolations are resolved."""
    settings = {"models": {"tiny": {"start_timeout_s": "${request_timeout_s}"}}}
    config = load_config(OmegaConf.create({"request_timeout_s": 7} | settings))
    assert 7 == config.models["tiny"].start_timeout_s


def test_a_dictconfig_inside_a_mapping_can_be_loaded():
    """As Hydra gives it to a function."""
    node = OmegaConf.create({"tiny": {"gpus": [[0], [1]], "num_workers": 2}})
    assert [[0], [1]] == load_config({"models": node}).models["tiny"].gpus


def test_later_sources_win_key_by_key(yaml_file):
    """Mappings are merged, all else is replaced."""
    first = {"models": {"tiny": {"engine_args": {"dtype": "auto", "seed": 1}, "gpus": [[0], [1]]}}}
    last = OmegaConf.create({"models": {"tiny": {"engine_args": {"seed": 2}, "gpus": [[3]]}}})
    tiny = load_config([first, yaml_file, last, {"request_timeout_s": 5}]).models["tiny"]
    assert {"dtype": "auto", "seed": 2} == tiny.engine_args
    assert (2, [[3]]) == (tiny.num_workers, tiny.gpus)


def test_a_preset_can_be_changed_in_part():
    """The rest of it stays."""
    changed = load_config(["tiny", {"models": {"tiny": {"num_workers": 2}}}])
    preset = load_config("tiny")
    assert changed.models["tiny"] == preset.models["tiny"].model_copy(update={"num_workers": 2})


def test_merging_leaves_the_sources_as_they_were():
    """A configuration may be used again."""
    first = {"models": {"tiny": {"env": {"A": "1"}}}}
    load_config([first, {"models": {"tiny": {"env": {"B": "2"}}}}])
    assert {"models": {"tiny": {"env": {"A": "1"}}}} == first


def test_engine_arguments_come_through_as_they_are():
    """Whatever they hold: vLLM checks them."""
    arguments = {"a": None, "b": {"c": [1, 2.5, {"d": "${vllm}"}]}, "e": "", "f": [[]]}
    config = load_config({"models": {"m": {"engine_args": arguments}}})
    assert config.models["m"].engine_args == arguments


# References


def test_env_is_replaced_by_a_variable(monkeypatch):
    """Anywhere in a string, in lists too."""
    monkeypatch.setenv("AGOGE_TEST_ROOT", "/data")
    arguments = {"model": "${env:AGOGE_TEST_ROOT}/m", "list": ["${env:AGOGE_TEST_ROOT}"]}
    config = load_config({"models": {"m": {"engine_args": arguments}}})
    assert {"model": "/data/m", "list": ["/data"]} == config.models["m"].engine_args


def test_a_missing_variable_is_named_with_its_key(monkeypatch):
    """Both ways out are told."""
    monkeypatch.delenv("AGOGE_TEST_NOWHERE", raising=False)
    arguments = {"engine_args": {"paths": ["x", "${env:AGOGE_TEST_NOWHERE}"]}}
    with pytest.raises(ConfigError, match=r"no variable AGOGE_TEST_NOWHERE; set it") as caught:
        load_config({"models": {"m": arguments}})
    assert "models.m.engine_args.paths.1" == caught.value.key


def test_here_is_the_folder_of_the_file(tmp_path):
    """So that a file may name its neighbours, wherever it is used from."""
    text = 'models:\n  m:\n    engine_args:\n      model: "${here}/weights"\n'
    config = load_config(write(tmp_path / "a.yaml", text))
    assert config.models["m"].engine_args["model"] == f"{tmp_path.resolve()}/weights"


def test_here_means_nothing_in_a_mapping():
    """It is refused, not guessed."""
    with pytest.raises(ConfigError, match="files only") as caught:
        load_config({"models": {"m": {"chat_template": "${here}/t.jinja"}}})
    assert "models.m.chat_template" == caught.value.key


# Faults


@pytest.mark.parametrize(
    ("config", "key", "near"),
    [
        ({"model": {}, **MODELS}, "model", "models"),
        ({"models": {"m": {"num_worker": 1}}}, "models.m.num_worker", "num_workers"),
        (
            {"models": {"m": {"limits": {"max_queue": 1}}}},
            "models.m.limits.max_queue",
            "max_queued",
        ),
        ({"models": {"m": {"restart": {"backoff": 1}}}}, "models.m.restart.backoff", "backoff_s"),
        ({"models": {"limits": {"num_gpus": 1}}}, "models.limits.num_gpus", "gpus"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(config, key, near):
    """Of the section that it stands in."""
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{near}'") as caught:
        load_config(config)
    assert caught.value.key == key


def test_an_unknown_key_without_a_near_one_is_refused_with_all():
    """What there is instead."""
    with pytest.raises(ConfigError, match="known are max_concurrency, max_queued"):
        load_config({"models": {"m": {"limits": {"zzz": 1}}}})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num_workers": 0}, "models.m.num_workers"),
        ({"num_workers": "two"}, "models.m.num_workers"),
        ({"gpus": [[-1]]}, "models.m.gpus.0.0"),
        ({"gpus": [0]}, "models.m.gpus.0"),
        ({"start_timeout_s": 0}, "models.m.start_timeout_s"),
        ({"limits": {"max_concurrency": 0}}, "models.m.limits.max_concurrency"),
        ({"routing": "random"}, "models.m.routing"),
        ({"backend": "sglang"}, "models.m.backend"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(settings, key):
    """In the message and in `key`."""
    with pytest.raises(ConfigError, match=key) as caught:
        load_config({"models": {"m": settings}})
    assert caught.value.key == key


def test_a_fault_in_a_file_names_the_file(tmp_path):
    """And the key."""
    path = write(tmp_path / "bad.yaml", "models:\n  m:\n    num_workers: 0\n")
    with pytest.raises(ConfigError, match=rf"{path}: models\.m\.num_workers") as caught:
        load_config(path)
    assert caught.value.source == str(path)


@pytest.mark.parametrize("empty", [{}, {"models": {}}])
def test_a_configuration_without_models_is_refused(empty):
    """There would be nothing to ask."""
    with pytest.raises(ConfigError, match="models") as caught:
        load_config(empty)
    assert "models" == caught.value.key


def test_broken_yaml_is_refused_with_line_and_column(tmp_path):
    """Where the parser gave up."""
    path = write(tmp_path / "bad.yaml", "models:\n  tiny: [1, 2\n  other: 3\n")
    with pytest.raises(ConfigError, match=rf"{path}, line 3, column \d+: "):
        load_config(path)


@pytest.mark.parametrize(
    "text", ["models: {a: {engine_args: {x: 2024-99-99}}}", "[" * 5000, "models: &m {a: *m}"]
)
def test_yaml_that_breaks_its_reader_is_a_config_error(tmp_path, text):
    """A date that isn't one, brackets without end, an alias inside its anchor."""
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.yaml"):
        load_config(path)


@pytest.mark.parametrize(("text", "kind"), [("- a\n", "list"), ("", "NoneType"), ("hi\n", "str")])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path, text, kind):
    """What it holds is told."""
    with pytest.raises(ConfigError, match=f"must hold a mapping .*not {kind}"):
        load_config(write(tmp_path / "bad.yaml", text))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """With its path and the system's reason."""
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file") as caught:
        load_config(tmp_path / "nowhere.yaml")
    assert caught.value.source == str(tmp_path / "nowhere.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    """Somebody gave the weights, perhaps."""
    path = tmp_path / "model.yaml"
    path.write_bytes(b"models: \xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(path)


def test_an_unknown_preset_is_refused_with_the_presets():
    """All that there are."""
    with pytest.raises(ConfigError, match=f"no preset 'large'; .* are {preset_names()[0]}"):
        load_config("large")


def test_a_missing_value_of_omegaconf_is_refused_with_its_key():
    """`???` means that somebody must give it."""
    node = OmegaConf.create({"models": {"tiny": {"num_workers": "???"}}})
    with pytest.raises(ConfigError, match="num_workers") as caught:
        load_config(node)
    assert "models.tiny.num_workers" == caught.value.key


# From a configuration to a router


def test_hydra_makes_a_router_that_is_not_started():
    """A `_target_` node with models and settings."""
    node = OmegaConf.create(
        {"_target_": "agoge_async.Router.from_config", "request_timeout_s": 5, **MODELS}
    )
    router = hydra.utils.instantiate(node)
    assert "<Router ['tiny'] new>" == repr(router)
    assert "starting" == router.statistics().models["tiny"].backends["tiny/0"].state


def test_hydra_can_change_a_preset():
    """`config` names it, the other keys are merged last."""
    node = OmegaConf.create(
        {
            "_target_": "agoge_async.Router.from_config",
            "config": "tiny",
            "models": {"tiny": {"num_workers": 2}},
        }
    )
    router = hydra.utils.instantiate(node)
    assert ["tiny/0", "tiny/1"] == list(router.statistics().models["tiny"].backends)


def test_from_config_takes_what_load_config_takes(yaml_file):
    """A list of sources, and sections as keyword arguments."""
    router = Router.from_config([yaml_file, MODELS], models={"tiny": {"num_workers": 3}})
    assert 3 == len(router.statistics().models["tiny"].backends)


def test_a_router_of_a_configuration_says_how_to_start_it():
    """Nothing has been started yet."""
    router = Router.from_config(MODELS)
    with pytest.raises(RouterClosedError, match="async with"):
        anyio.run(router.chat_many, [])


def pools_of(monkeypatch, visible: str, **settings):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config({"models": {"m": {"engine_args": {"model": "org/m"}} | settings}})
    return make_pools(config, lambda _replica, _stage: None)


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        ({"num_workers": 2, "gpus": [[0], [0]]}, "models.m.gpus", "GPU 0 is given twice"),
        ({"gpus": [[7]]}, "models.m.gpus", "GPU 7 doesn't exist"),
        ({"num_workers": 2, "gpus": [[0]]}, "models.m.gpus", "1 lists for 2 replicas"),
        ({"num_workers": 3}, "models.m.num_workers", "need 3, free are 2"),
        (
            {"engine_args": {"model": "org/m", "tensor_parallel_size": 2}, "gpus": [[0]]},
            "models.m.gpus",
            "tensor_parallel_size",
        ),
        ({"engine_args": {"model": "./nowhere"}}, "models.m.engine_args.model", "no folder"),
        ({"engine_args": {"model": "/"}}, "models.m.engine_args.model", "holds no model"),
        ({"engine_args": {"modl": "x"}}, "models.m.engine_args.modl", "did you mean 'model'"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_with_its_key(monkeypatch, settings, key, said):
    """Before anything is started."""
    with pytest.raises(ConfigError, match=said) as caught:
        pools_of(monkeypatch, "0,1", **settings)
    assert caught.value.key == key


def test_each_replica_gets_a_name(monkeypatch):
    """Model and number, as in statistics and errors."""
    [pool] = pools_of(monkeypatch, "4,5", num_workers=2).values()
    assert ["m/0", "m/1"] == [backend.name for backend in pool.backends]


def test_limits_of_a_configuration_are_those_of_the_pool(monkeypatch):
    """A full queue refuses."""
    limits = {"max_concurrency": 1, "max_queued": 0}
    [pool] = pools_of(monkeypatch, "", limits=limits).values()

    async def take_two() -> int:
        await pool.slots.acquire()
        try:
            await pool.slots.acquire()
        finally:
            pool.slots.release()

    with pytest.raises(Exception, match="max_queued"):
        anyio.run(take_two)


def arguments_on_the_cpu(monkeypatch, env: dict[str, str] | None = None, **engine_args):
    engine_args = {"model": "org/m"} | engine_args
    [pool] = pools_of(monkeypatch, "", engine_args=engine_args, env=env or {}).values()
    return pool.backends[0].make_spec("/tmp/x").engine_args


def test_a_cpu_engine_of_one_worker_runs_it_in_engine_core(monkeypatch):
    """A process less to start, and to pass each step on to."""
    executor = arguments_on_the_cpu(monkeypatch)["distributed_executor_backend"]
    assert executor.endswith(".UniProcExecutor")


@pytest.mark.parametrize(
    ("visible", "engine_args", "env", "expected"),
    [
        ("", {}, {}, (True, "1")),
        ("", {"enforce_eager": True}, {}, (True, "1")),
        ("", {"enforce_eager": False}, {}, (False, None)),
        ("", {"enforce_eager": True}, {"TORCH_COMPILE_DISABLE": "0"}, (True, "0")),
        ("0", {"enforce_eager": True}, {}, (True, None)),
    ],
)
def test_a_cpu_engine_compiles_only_when_it_is_told_to(
    monkeypatch, visible, engine_args, env, expected
):
    """It takes a minute a start, and a C++ compiler."""
    engine_args = {"model": "org/m"} | engine_args
    [pool] = pools_of(monkeypatch, visible, engine_args=engine_args, env=env).values()
    spec = pool.backends[0].make_spec("/tmp/x")
    said = spec.engine_args["enforce_eager"], spec.environment.get("TORCH_COMPILE_DISABLE")
    assert expected == said


@pytest.mark.parametrize(
    ("env", "engine_args", "expected"),
    [
        ({}, {"distributed_executor_backend": "mp"}, "mp"),
        ({}, {"tensor_parallel_size": 2}, None),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, {}, None),
    ],
)
def test_an_engine_that_needs_a_worker_process_has_one(monkeypatch, env, engine_args, expected):
    """For more workers, for bound threads, or because the configuration says so."""
    arguments = arguments_on_the_cpu(monkeypatch, env, **engine_args)
    assert expected == arguments.get("distributed_executor_backend")


def test_presets_are_files_of_the_package():
    """They come with the wheel."""
    assert (PRESETS_DIR / "tiny.yaml").is_file()
