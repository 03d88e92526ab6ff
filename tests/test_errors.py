"""Errors: the tree, and what of them survives a copy."""

import copy
import inspect
import pickle
import re

import pytest

from agoge_async import errors
from agoge_async.errors import AgogeError, EngineError, RequestTimeoutError

PLAUSIBLE = {
    "message": "what went wrong",
    "key": "models.tiny.gpus",
    "source": "router.yaml",
    "parameter": "messages.0.content",
    "model": "tiny",
    "known": ["tiny", "judge"],
    "prompt_tokens": 5000,
    "max_model_len": 2048,
    "capability": "vision",
    "timeout_s": 0.5,
    "culprit": "rank 1",
    "version": 7,
    "max_queued": 100,
    "backend": "tiny/0",
    "log_tail": ["first line", "last line"],
    "cause": "ValueError: no memory",
    "exit_code": -9,
}


def all_errors() -> list[type[AgogeError]]:
    """Walk the classes of the library; tests may have made some of their own."""
    found, todo = [], [AgogeError]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls.__module__ == errors.__name__:
            found.append(cls)
    return sorted(found, key=lambda cls: cls.__name__)


def make(cls: type[AgogeError]) -> AgogeError:
    """Make one with every argument of its signature given."""
    if cls.__init__ is Exception.__init__:
        return cls(PLAUSIBLE["message"])
    names = inspect.signature(cls).parameters
    return cls(PLAUSIBLE["message"], **{n: PLAUSIBLE[n] for n in names if n != "message"})


def contents(error: AgogeError) -> tuple[object, ...]:
    return type(error), error.args, str(error), vars(error)


@pytest.mark.parametrize("cls", all_errors())
@pytest.mark.parametrize(
    "duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
)
def test_an_error_survives_a_copy_with_all_it_holds(cls, duplicate):
    """Class, message, attributes and notes."""
    error = make(cls)
    error.add_note("a note")
    twin = duplicate(error)
    assert contents(error) == contents(twin)
    assert twin is not error
    assert ["a note"] == twin.__notes__


@pytest.mark.parametrize("cls", all_errors())
def test_a_note_on_a_copy_is_not_on_the_original(cls):
    """Each caller that gets a copy of one error may add to its own."""
    error = make(cls)
    error.add_note("of both")
    twin = copy.copy(error)
    twin.add_note("of the copy")
    assert ["of both"] == error.__notes__


@pytest.mark.parametrize("cls", all_errors())
def test_an_error_says_its_message(cls):
    """`str` of an error is what a user reads."""
    assert "what went wrong" == str(make(cls))


def test_the_tree_in_the_documentation_is_the_tree():
    """It names every class, under its base."""
    drawn, path = {}, {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"^(?P<indent>[ |]*)(\+-- )?(?P<name>\w+Error)\b", line)
        if match:
            depth = len(match["indent"])
            path = {d: name for d, name in path.items() if d < depth} | {depth: match["name"]}
            above = [d for d in path if d < depth]
            drawn[match["name"]] = path[max(above)] if above else None
    real = {cls.__name__: cls.__bases__[0].__name__ for cls in all_errors()}
    assert real | {"AgogeError": None} == drawn


@pytest.mark.parametrize("cls", all_errors())
def test_the_attributes_in_the_tree_are_those_of_the_class(cls):
    """Each that stands beside a name is what this class adds to its base."""
    [line] = re.findall(rf"^(?:.*[ ])?{cls.__name__}\b.*$", errors.__doc__, re.MULTILINE)
    base = cls.__bases__[0]
    inherited = vars(make(base)) if issubclass(base, AgogeError) else {}
    assert set(re.findall(r" \.(\w+)", line)) <= vars(make(cls)).keys() - inherited.keys()


def test_a_request_timeout_is_a_timeout():
    """`except TimeoutError` catches it."""
    assert issubclass(RequestTimeoutError, TimeoutError)


def test_only_the_errors_of_one_engine_are_retryable():
    """Another replica may succeed where an engine died or failed a request."""
    retryable = {cls.__name__ for cls in all_errors() if cls.retryable}
    assert {"EngineDiedError", "GenerationError"} == retryable


def test_an_engine_error_can_show_the_end_of_its_log():
    """As a note, which tracebacks print."""
    lines = [f"line {number}" for number in range(30)]
    error = EngineError("failed", backend="tiny/0", log_tail=lines).with_log_note(lines=2)
    assert ["the engine's last lines:\n  line 28\n  line 29"] == error.__notes__


def test_an_engine_error_without_a_log_has_no_note():
    """Nothing was written: nothing is shown."""
    error = EngineError("failed", backend="tiny/0").with_log_note()
    assert [] == getattr(error, "__notes__", [])
