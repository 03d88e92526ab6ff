"""What an engine prints: what is kept, and what is taken for the cause of a failure."""

import logging
import multiprocessing
import os

import pytest

from agoge_async.engine.log import KEPT_LINES, LogPump, best_cause, find_cause


def pumped(data: bytes) -> list[str]:
    """Give what a pump keeps of an engine's output."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    pump = LogPump("tiny/0", reader)
    with writer:
        view = memoryview(data)
        while view:
            view = view[os.write(writer.fileno(), view) :]
    pump.join(10)
    return pump.tail()


CORE = "(EngineCore pid=812) ERROR 11-29 12:00:01 [core.py:1080] "
WORKER = "(Worker_TP1 pid=913) ERROR 11-29 12:00:00 [multiproc_executor.py:772] "

OUT_OF_MEMORY = f"""\
INFO 11-29 11:59:58 [model.py:530] Resolved architecture: Qwen2ForCausalLM
(EngineCore pid=812) INFO 11-29 12:00:00 [gpu_model_runner.py:4021] Starting to load model Qwen/Q
{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}  File "/venv/lib/vllm/v1/engine/core.py", line 1071, in run_engine_core
{CORE}    engine_core = EngineCoreProc(*args, **kwargs)
{CORE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has 79.11 GiB
(EngineCore pid=812) Process EngineCore:
(EngineCore pid=812) Traceback (most recent call last):
(EngineCore pid=812) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB.
Traceback (most recent call last):
  File "/venv/lib/agoge_async/engine/host.py", line 80, in _run
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""

NO_CACHE = f"""\
{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}  File "/venv/lib/vllm/v1/core/kv_cache_utils.py", line 690, in _check_enough
{CORE}ValueError: To serve at least one request with max seq len (32768), 3.5 GiB is needed
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""

BAD_MODEL = """\
Traceback (most recent call last):
  File "/venv/lib/vllm/engine/arg_utils.py", line 1490, in create_model_config
    return ModelConfig(
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Invalid repository ID or local directory specified: '/nowhere'. [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""

WORKER_FAILED = f"""\
{WORKER}WorkerProc failed to start.
{WORKER}Traceback (most recent call last):
{WORKER}ValueError: Free memory on device cuda:1 (3.1/79.1 GiB) on startup is less than desired
{CORE}EngineCore failed to start.
{CORE}Exception: WorkerProc initialization failed due to an exception in a background process.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""

CHAINED_IMPORT = """\
Traceback (most recent call last):
  File "/venv/lib/vllm/platforms/cuda.py", line 14, in <module>
ImportError: cannot import name 'x' from partially initialized module 'vllm._C'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
OSError: libcudart.so.13: cannot open shared object file: No such file or directory
"""

LOGS = {
    "out of memory": (
        OUT_OF_MEMORY,
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02",
    ),
    "no room for the cache": (NO_CACHE, "ValueError: To serve at least one request with max seq"),
    "a model that isn't there": (
        BAD_MODEL,
        "ValidationError: 1 validation error for ModelConfig: Value error, Invalid repository ID",
    ),
    "a worker": (WORKER_FAILED, "ValueError: Free memory on device cuda:1 (3.1/79.1 GiB)"),
    "imports": (CHAINED_IMPORT, "OSError: libcudart.so.13: cannot open shared object file"),
    "only an import": (CHAINED_IMPORT[:200], "ImportError: cannot import name 'x'"),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_cause_of_a_failed_start_is_found(name):
    """The first error, not another process's report of it."""
    log, cause = LOGS[name]
    assert (find_cause(pumped(log.encode())) or "").startswith(cause)


@pytest.mark.parametrize(
    "log",
    [
        "",
        "INFO 11-29 11:59:58 [model.py:530] Resolved architecture: Qwen2ForCausalLM\n",
        "Error handling is on\nKilled\n",
        "RuntimeError: Engine core initialization failed. See root cause above.\n",
    ],
)
def test_a_log_without_an_error_has_no_cause(log):
    """Nothing is made up: the exit code tells more."""
    assert find_cause(pumped(log.encode())) is None


def test_only_the_last_lines_are_kept():
    """An engine may run for weeks."""
    lines = [f"line {number}" for number in range(3 * KEPT_LINES)]
    assert pumped("\n".join(lines).encode()) == lines[-KEPT_LINES:]


def test_prefixes_of_vllms_log_are_cut_off():
    """Who, when and where: what is left is what."""
    log = f"{CORE}failed\nINFO 11-29 11:59:58 [model.py:530] resolved\n(Worker pid=3) plain\nbare\n"
    assert ["failed", "resolved", "plain", "bare"] == pumped(log.encode())


def test_progress_bars_are_lines():
    """They end in a carriage return; else one line would grow for ever."""
    assert [
        "loading 10%",
        "loading 90%",
        "done",
    ] == pumped(b"loading 10%\rloading 90%\rdone\r\n\n  \n")


def test_bytes_that_are_no_text_are_replaced():
    """A crash may print anything."""
    assert ["caf\u00e9 \ufffd\x00"] == pumped(b"caf\xc3\xa9 \xff\x00\n")


def test_a_last_line_without_its_end_is_kept():
    """The process may die within it."""
    assert ["whole", "half"] == pumped(b"whole\nhalf")


def test_lines_are_passed_on_to_logging(caplog):
    """With the engine's name, for those who turn on debugging."""
    with caplog.at_level(logging.DEBUG, logger="agoge_async.engine"):
        pumped(b"hello\n")
    assert ["tiny/0: hello"] == [record.getMessage() for record in caplog.records]


def test_a_pipe_is_read_while_nobody_looks():
    """More than it holds: an engine never blocks on its log."""
    assert 401 == len(pumped(b"x" * 79 + b"\n" * 1) + pumped((b"x" * 79 + b"\n") * 20_000))


def test_the_log_completes_a_report_that_only_counts_faults():
    """The child reports a pydantic error's first line; what is wrong stands in the second."""
    reported = "ValidationError: 1 validation error for ModelConfig"
    lines = [
        f"pydantic_core._pydantic_core.{reported}",
        "  Value error, no such dtype [type=value_error, input_value=1]",
    ]
    assert f"{reported}: Value error, no such dtype" == best_cause(reported, lines)


def test_what_the_child_reports_goes_before_the_log():
    """A harmless line of the log isn't taken for the cause."""
    assert "OSError: full" == best_cause("OSError: full", ["ImportError: no libcuda"])
