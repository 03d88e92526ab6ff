"""What `import agoge_async` gives, and what it costs."""

import inspect
import subprocess
import sys

import pytest

import agoge_async

EXPECTED: list[str] = [
    "AgogeError",
    "AssistantMessage",
    "Backend",
    "BackendError",
    "BackendStatus",
    "Capabilities",
    "Chat",
    "ChatChunk",
    "ChatStream",
    "ConfigError",
    "ContextLengthError",
    "EngineBusyError",
    "EngineDiedError",
    "EngineError",
    "EngineStartError",
    "FakeBackend",
    "ForkedProcessError",
    "FunctionCall",
    "FunctionDefinition",
    "GenerationError",
    "ImagePart",
    "ImageURL",
    "InferenceRequest",
    "InferenceResponse",
    "InvalidRequestError",
    "NoReplicaError",
    "Outcome",
    "Pool",
    "ParamSyncer",
    "PushRecord",
    "QueueFullError",
    "RequestError",
    "RequestRecord",
    "RequestTimeoutError",
    "ResponseFormat",
    "Router",
    "RouterClosedError",
    "RouterStateError",
    "RouterStatistics",
    "StructuredOutputs",
    "SystemMessage",
    "TextPart",
    "TokenRequest",
    "TokenResponse",
    "Tool",
    "ToolCall",
    "ToolMessage",
    "UnknownModelError",
    "UnsupportedError",
    "UserMessage",
    "VerifyRecord",
    "VersionSpan",
    "WeightSyncError",
    "WrongLoopError",
]

HEAVY = ["aiohttp", "anthropic", "deepspeed", "openai", "torch", "vllm"]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def seconds_to_import(module: str) -> float:
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return float(run_python(code))


def test_all_is_pinned_and_sorted():
    assert list(agoge_async.__all__) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_public_name_is_importable_and_documented(name):
    thing = getattr(agoge_async, name)
    if inspect.isclass(thing):
        doc = vars(thing).get("__doc__")  # not an inherited one
    elif inspect.isroutine(thing):
        doc = thing.__doc__
    else:
        return  # a constant or a type alias can't have a docstring
    assert doc, f"{name} has no docstring"
    assert doc.strip(), f"{name} has an empty docstring"
    assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"


def test_import_loads_nothing_heavy():
    code = f"import sys, agoge_async; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code) == ""


def test_import_takes_less_than_a_third_of_the_time_of_import_openai():
    ours, openai = [], []
    for _ in range(5):
        ours.append(seconds_to_import("agoge_async"))
        openai.append(seconds_to_import("openai"))
    # Noise only adds time, so the shortest run of each is the nearest to the truth.
    assert min(ours) < min(openai) / 3, f"{ours=} {openai=}"
