"""Which GPUs and which environment an engine gets."""

import getpass
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agoge_async import ConfigError
from agoge_async.engine.devices import (
    assign_gpus,
    engine_environment,
    make_work_dir,
    visible_gpus,
)

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "VLLM_DP_RANK": "1",
}


def environment_of(parent: dict[str, str] | None = None, **changes) -> dict[str, str]:
    arguments = {"gpus": [], "num_threads": 4, "work_dir": "/tmp/x", "extra": {}}
    return engine_environment(parent or {}, **arguments | changes)


@st.composite
def free_choices(draw):
    """Models of 1 to 3 replicas of 1 or 2 GPUs that leave the choice, and enough GPUs."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    replicas = {name: draw(st.integers(1, 3)) for name in names}
    sizes = {name: draw(st.integers(1, 2)) for name in names}
    needed = sum(replicas[name] * sizes[name] for name in names)
    return replicas, sizes, needed + draw(st.integers(0, 3))


@given(free_choices(), st.data())
def test_every_replica_gets_gpus_of_its_own(choices, data):
    """As many as it spans, each once, whether they are given or chosen; given ones are kept."""
    replicas, sizes, num_visible = choices
    order = data.draw(st.permutations(range(num_visible)))
    wanted: dict[str, list[list[int]] | None] = dict.fromkeys(replicas)
    for name in data.draw(st.sets(st.sampled_from(sorted(replicas)))):
        wanted[name] = [[order.pop() for _ in range(sizes[name])] for _ in range(replicas[name])]
    assigned = assign_gpus(wanted, replicas, sizes, num_visible)
    used = [gpu for lists in assigned.values() for gpus in lists for gpu in gpus]
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(num_visible))
    shapes = {name: [len(gpus) for gpus in lists] for name, lists in assigned.items()}
    assert {name: [sizes[name]] * replicas[name] for name in replicas} == shapes
    given_lists = {name: lists for name, lists in wanted.items() if lists is not None}
    assert {name: assigned[name] for name in given_lists} == given_lists


@given(free_choices())
def test_one_gpu_too_few_is_refused(choices):
    """The message counts, and says what to lower."""
    replicas, sizes, _ = choices
    needed = sum(replicas[name] * sizes[name] for name in replicas)
    if needed == 1:
        return  # without any GPU, engines run on the CPU
    with pytest.raises(ConfigError, match=rf"of {needed - 1}; lower num_workers") as caught:
        assign_gpus(dict.fromkeys(replicas), replicas, sizes, needed - 1)
    assert caught.value.key in {f"models.{name}.num_workers" for name in replicas}


@given(free_choices())
def test_without_gpus_every_replica_runs_on_the_cpu(choices):
    """However many GPUs it would span."""
    replicas, sizes, _ = choices
    assigned = assign_gpus(dict.fromkeys(replicas), replicas, sizes, 0)
    assert {name: [[]] * count for name, count in replicas.items()} == assigned


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([[0], [0]], r"GPU 0 is given twice"),
        ([[0], [4]], r"GPU 4 doesn't exist; this process sees 0 to 3"),
        ([[0]], r"1 lists for 2 replicas"),
        ([[0], [1, 2]], r"\[1, 2\] holds 2 GPUs"),
        ([[0], []], r"\[\] holds 0 GPUs"),
    ],
)
def test_lists_that_cannot_be_are_refused(lists, said):
    """The message names the key and the GPU."""
    with pytest.raises(ConfigError, match=rf"models\.m\.gpus.*{said}") as caught:
        assign_gpus({"m": lists}, {"m": 2}, {"m": 1}, 4)
    assert "models.m.gpus" == caught.value.key


def test_two_models_cannot_be_given_one_gpu():
    """Both keys are told."""
    with pytest.raises(ConfigError, match=r"models\.b\.gpus: GPU 1 .*models\.a\.gpus has it"):
        assign_gpus({"a": [[1]], "b": [[1]]}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, 2)


def test_a_gpu_twice_in_one_replica_is_refused():
    """Tensor parallelism needs different ones."""
    with pytest.raises(ConfigError, match="given twice"):
        assign_gpus({"m": [[1, 1]]}, {"m": 1}, {"m": 2}, 2)


def test_gpus_given_where_there_are_none_are_refused():
    """The process may see none, whatever the machine has."""
    with pytest.raises(ConfigError, match="this process sees none"):
        assign_gpus({"m": [[0]]}, {"m": 1}, {"m": 1}, 0)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("0,1", ["0", "1"]),
        (" 2 , 3 ", ["2", "3"]),
        ("GPU-8932f937,MIG-1", ["GPU-8932f937", "MIG-1"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
    ],
)
def test_cuda_visible_devices_limits_the_gpus(variable, expected):
    """As CUDA reads it: from an invalid name on, there is nothing."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": variable}) == expected


def test_an_engine_sees_its_own_gpus_only():
    """By the names that its parent sees them under."""
    environment = environment_of({"CUDA_VISIBLE_DEVICES": "5,7,GPU-a"}, gpus=[2, 0])
    assert "GPU-a,5" == environment["CUDA_VISIBLE_DEVICES"]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment


def test_variables_of_torchrun_are_left_out():
    """They would make vLLM join the trainer's group."""
    environment = environment_of(TORCHRUN | {"PATH": "/bin", "HF_HOME": "/hf"}, gpus=[])
    assert {"OMP_NUM_THREADS"} == {name for name in TORCHRUN if name in environment}
    assert ("/bin", "/hf") == (environment["PATH"], environment["HF_HOME"])


def test_a_cpu_engine_gets_threads_and_is_bound_to_no_core():
    """vLLM would bind every engine to the same cores."""
    environment = environment_of({"OMP_NUM_THREADS": "1"}, num_threads=3)
    assert "3" == environment["OMP_NUM_THREADS"]
    assert "nobind" == environment["VLLM_CPU_OMP_THREADS_BIND"]
    assert "" == environment["CUDA_VISIBLE_DEVICES"]


def test_a_gpu_engine_does_not_get_the_trainers_threads():
    """torchrun sets OMP_NUM_THREADS=1 for its own."""
    environment = environment_of(
        {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}, gpus=[0], num_threads=3
    )
    assert "OMP_NUM_THREADS" not in environment


def test_a_users_binding_of_threads_is_kept():
    """Whoever sets it knows why."""
    environment = environment_of({"VLLM_CPU_OMP_THREADS_BIND": "0-3"})
    assert "0-3" == environment["VLLM_CPU_OMP_THREADS_BIND"]


def test_variables_of_the_configuration_win():
    """Over the parent's and over ours."""
    extra = {"A": "config", "OMP_NUM_THREADS": "9", "RANK": "0"}
    environment = environment_of({"A": "parent", "B": "parent"}, extra=extra)
    assert {
        "A": "config",
        "B": "parent",
        "OMP_NUM_THREADS": "9",
        "RANK": "0",
    } == {name: environment[name] for name in ("A", "B", "OMP_NUM_THREADS", "RANK")}


def test_temporary_files_go_to_the_engines_own_folder():
    """It is removed with the engine; no statistics leave the machine."""
    environment = environment_of(work_dir="/tmp/agoge-abc")
    assert {"/tmp/agoge-abc"} == {environment[name] for name in ("TMPDIR", "VLLM_RPC_BASE_PATH")}
    assert "1" == environment["VLLM_NO_USAGE_STATS"]


@pytest.mark.parametrize("name", ["short", "deep" * 20])
def test_an_engines_folder_has_a_path_short_enough_for_sockets(tmp_path, monkeypatch, name):
    """A Unix socket's path has 107 characters at most, and vLLM's name for one has 37."""
    parent = tmp_path / name
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    folder = make_work_dir()
    shutil.rmtree(folder)
    assert len(folder) + len("/") + 37 <= 107


def test_two_engines_have_different_folders():
    """Each removes its own."""
    folders = [make_work_dir(), make_work_dir()]
    for folder in folders:
        shutil.rmtree(folder)
    assert 2 == len(set(folders))


def test_what_torch_compiles_outlives_the_engines_folder(tmp_path, monkeypatch):
    """It takes minutes to make; torch puts a part of it in TMPDIR, whatever it is told."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    folder = Path(make_work_dir())
    (folder / "torchinductor_ann" / "header.gch").touch()
    shutil.rmtree(folder)
    assert (tmp_path / "torchinductor_ann" / "header.gch").exists()


@given(st.dictionaries(st.text("ABC_", min_size=1), st.text(max_size=3)))
def test_the_parents_environment_is_not_changed(parent):
    """Only a copy of it is."""
    before = dict(parent)
    environment_of(parent)
    assert parent == before
