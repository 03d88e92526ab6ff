"""Every error that agoge_async raises on purpose.

AgogeError
 +-- ConfigError                 a configuration that can't be used           .key .source
 +-- RequestError                the request is at fault; never retried       .parameter
 |    +-- InvalidRequestError    a field holds a value that can't be sent
 |    +-- UnknownModelError      no model of that name is configured          .model .known
 |    +-- ContextLengthError     the prompt doesn't fit the model             .prompt_tokens
 |    +-- UnsupportedError       the backend can't do what is asked           .capability
 +-- RouterStateError            the router can't be used here or now
 |    +-- RouterClosedError      not started yet, closing or closed
 |    +-- WrongLoopError         used from another event loop than its own
 |    +-- ForkedProcessError     used in a process forked from its own
 +-- RequestTimeoutError         the request's deadline passed (a TimeoutError too)
 +-- QueueFullError              as many requests wait as `max_queued` allows
 +-- WeightSyncError             a push of weights failed                     .culprit .version
 +-- BackendError                a backend failed                             .backend
      +-- NoReplicaError         no replica of the model can serve
      +-- EngineError            a local engine failed                        .log_tail
           +-- EngineStartError  it could not be started                      .cause
           +-- EngineDiedError   its process ended while it was needed        .exit_code
           +-- EngineBusyError   it can't take a control call now, or not in time
           +-- GenerationError   it failed this one request

`retryable` on each class says whether another replica may succeed where this one failed. Every
error survives `pickle`. To add one: subclass, place it in this tree, export it, raise it in a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self


def _restore(cls: type[AgogeError], args: tuple[Any, ...], state: dict[str, Any]) -> AgogeError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    if notes := state.get("__notes__"):
        error.__notes__ = list(notes)  # a copy's notes are its own
    return error


class AgogeError(Exception):
    """Base of all errors of this library."""

    retryable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state, so that subclasses may take any keyword arguments."""
        return _restore, (type(self), self.args, self.__dict__)


class ConfigError(AgogeError):
    """A configuration that can't be used; the message names the key and what to change."""

    def __init__(self, message: str, *, key: str | None = None, source: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        """Dotted path of the offending key, where one is to blame."""
        self.source = source
        """File or preset that holds it, where known."""


class RequestError(AgogeError):
    """The request is at fault: sending it again can't help."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        """Dotted path of the offending field, where one is to blame."""


class InvalidRequestError(RequestError):
    """A field of the request holds a value that can't be sent."""


class UnknownModelError(RequestError):
    """No model of that name is configured."""

    def __init__(self, message: str, *, model: str, known: Sequence[str]) -> None:
        super().__init__(message, parameter="model")
        self.model = model
        self.known = tuple(known)
        """All configured names."""


class ContextLengthError(RequestError):
    """The prompt doesn't fit the model's context."""

    def __init__(self, message: str, *, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(message, parameter="messages")
        self.prompt_tokens = prompt_tokens
        """Length of the prompt. [tokens]"""
        self.max_model_len = max_model_len
        """Prompt and answer together may be this long. [tokens]"""


class UnsupportedError(RequestError):
    """The backend can't do what the request asks for."""

    def __init__(self, message: str, *, capability: str, parameter: str | None = None) -> None:
        super().__init__(message, parameter=parameter)
        self.capability = capability
        """Name of the missing field of `Capabilities`."""


class RouterStateError(AgogeError):
    """The router can't be used here or now."""


class RouterClosedError(RouterStateError):
    """The router isn't started yet, is closing, or is closed."""


class WrongLoopError(RouterStateError):
    """The router belongs to another event loop than the running one."""


class ForkedProcessError(RouterStateError):
    """The router belongs to the process that this one was forked from."""


class RequestTimeoutError(AgogeError, TimeoutError):
    """The request's deadline passed before its answer was complete."""

    def __init__(self, message: str, *, timeout_s: float) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class QueueFullError(AgogeError):
    """As many requests wait for a slot as `max_queued` allows."""

    def __init__(self, message: str, *, model: str, max_queued: int) -> None:
        super().__init__(message)
        self.model = model
        self.max_queued = max_queued


class WeightSyncError(AgogeError):
    """A push of weights that did not happen: the same error on every rank of the trainer."""

    def __init__(
        self, message: str, *, culprit: str | None = None, version: int | None = None
    ) -> None:
        super().__init__(message)
        self.culprit = culprit
        """Whose failure was the first: "rank 1", or an engine's name."""
        self.version = version
        """The version that was to be pushed."""


class BackendError(AgogeError):
    """A backend failed."""

    def __init__(self, message: str, *, backend: str) -> None:
        super().__init__(message)
        self.backend = backend
        """Name of the backend, as in `Router.statistics()`."""


class NoReplicaError(BackendError):
    """No replica of the model can serve, and none is being started."""


class EngineError(BackendError):
    """A local engine failed."""

    def __init__(self, message: str, *, backend: str, log_tail: Sequence[str] = ()) -> None:
        super().__init__(message, backend=backend)
        self.log_tail = tuple(log_tail)
        """The last lines that the engine's processes wrote."""

    def with_log_note(self, lines: int = 20) -> Self:
        """Attach the end of the engine's log as a note, which tracebacks show."""
        if self.log_tail:
            self.add_note("the engine's last lines:\n  " + "\n  ".join(self.log_tail[-lines:]))
        return self


class EngineStartError(EngineError):
    """An engine could not be started; nothing of it is left running."""

    def __init__(
        self, message: str, *, backend: str, cause: str, log_tail: Sequence[str] = ()
    ) -> None:
        super().__init__(message, backend=backend, log_tail=log_tail)
        self.cause = cause
        """One line: why."""


class EngineDiedError(EngineError):
    """An engine's process ended while it was needed."""

    retryable = True

    def __init__(
        self,
        message: str,
        *,
        backend: str,
        exit_code: int | None = None,
        log_tail: Sequence[str] = (),
    ) -> None:
        super().__init__(message, backend=backend, log_tail=log_tail)
        self.exit_code = exit_code
        """Exit code of the engine's process; minus the signal number when a signal ended it."""


class EngineBusyError(EngineError):
    """An engine can't take a control call now, or didn't answer it in time."""


class GenerationError(EngineError):
    """An engine failed this one request; it goes on serving."""

    retryable = True
