"""`agoge-async chat`: a conversation with a configured model.

The router runs in a thread of its own. The main thread reads lines and waits for answers, so that
Ctrl-C interrupts whichever of the two goes on, and no more.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console

from agoge_async.cli.output import print_error, write
from agoge_async.config import ConfigSource, preset_names
from agoge_async.errors import AgogeError, ConfigError
from agoge_async.messages import AssistantMessage, Message
from agoge_async.requests import InferenceRequest
from agoge_async.responses import ChatChunk, InferenceResponse
from agoge_async.router import Router

DEFAULT_MODEL = "tiny"

ABORT_S = 5.0
"""How long an aborted answer may take to end."""

HELP = """\
/model        list the models
/model NAME   go on with another model
/system TEXT  set the system prompt; without a text, remove it
/reset        forget the conversation
/quit         leave (Ctrl-D too)
Ctrl-C aborts an answer."""

ReadLine = Callable[[], str | None]
"""Gives the user's next line, or None at the end."""


def chat_source(argument: str | None) -> ConfigSource:
    """Turn the argument of `chat` into a configuration.

    Args:
        argument: A preset's name, a YAML file, a model's folder, or a hub id; None: the default.

    Raises:
        ConfigError: It is none of these.
    """
    argument = argument or DEFAULT_MODEL
    path = Path(argument).expanduser()
    if argument in preset_names() or path.suffix in {".yaml", ".yml"}:
        return argument if argument in preset_names() else path
    if path.is_dir():
        return _one_model(path.resolve().name or "model", str(path.resolve()))
    owner, slash, name = argument.partition("/")
    if slash and owner not in {"", ".", "..", "~"} and name and "/" not in name:
        return _one_model(name, argument)
    raise ConfigError(
        f"{argument!r} is no preset ({', '.join(preset_names())}), no YAML file, no folder and no "
        "hub id (OWNER/NAME)",
        source=argument,
    )


def _one_model(name: str, model: str) -> ConfigSource:
    return {"models": {name: {"backend": "vllm", "engine_args": {"model": model}}}}


class ChatSession:
    """A conversation: its model, its history, how answers are shown.

    Args:
        router: Answers; it must run when `answer` is called.
        console: Shows.
        temperature: For all answers; None: the model's own default.
        max_tokens: Longest answer. [tokens]
    """

    def __init__(
        self,
        router: Router,
        console: Console,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.model = router.models[0]
        self.system: str | None = None
        self.history: list[Message] = []
        self._id = uuid.uuid4().hex
        self._router = router
        self._console = console
        self._settings = {"temperature": temperature, "max_tokens": max_tokens}
        self._is_midline = False

    async def answer(self, text: str) -> None:
        """Stream the answer to a user's turn; one that fails or is aborted leaves no trace.

        Raises:
            AgogeError: There is no whole answer.
        """
        request = self._request(text)
        stream = self._router.stream(request)
        try:
            async with contextlib.aclosing(stream):
                async for chunk in stream:
                    self._show(chunk)
        finally:
            self.end_line()
        if stream.response is not None:
            self._remember(request.messages[-1], stream.response)

    def obey(self, line: str) -> bool:
        """Do what a line that begins with a slash says; False: leave."""
        name, _, rest = line[1:].strip().partition(" ")
        commands = {"model": self._set_model, "system": self._set_system}
        if name in {"quit", "exit"}:
            return False
        if name == "reset":
            self.history.clear()
            self.note("The conversation is forgotten.")
        elif name in commands:
            commands[name](rest.strip())
        elif name == "help":
            self._console.print(HELP, markup=False)
        else:
            self.note(f"There is no command /{name}; /help lists them.")
        return True

    def note(self, text: str) -> None:
        """Say something that isn't the model's."""
        write(self._console, f"{text}\n", "dim")

    def end_line(self) -> None:
        """End a line that an answer left open."""
        if self._is_midline:
            self._is_midline = False
            self._console.print()

    def _request(self, text: str) -> InferenceRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        turn = {"role": "user", "content": text}
        return InferenceRequest.model_validate(
            {
                "model": self.model,
                "messages": [*system, *self.history, turn],
                "session_id": self._id,
                **self._settings,
            }
        )

    def _show(self, chunk: ChatChunk) -> None:
        for choice in chunk.choices:
            delta = choice.delta
            for text, style in ((delta.reasoning, "dim italic"), (delta.content, None)):
                if text:
                    write(self._console, text, style)
                    self._is_midline = not text.endswith("\n")

    def _remember(self, turn: Message, response: InferenceResponse) -> None:
        choice = response.choices[0]
        # Templates of reasoning models want the answers alone.
        said = AssistantMessage(content=choice.message.content or "")
        self.history += [turn, said]
        if choice.finish_reason == "length":
            self.note("(cut: the answer reached the longest length)")

    def _set_model(self, name: str) -> None:
        names = self._router.models
        if name in names:
            self.model = name
            self.note(f"{name} answers from now on.")
        elif name:
            self.note(f"There is no model {name}; there are {', '.join(names)}.")
        else:
            for known in names:
                self._console.print(f"{'*' if known == self.model else ' '} {known}", markup=False)

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self.note("The system prompt is set." if text else "There is no system prompt now.")


def run_chat(
    router: Router,
    console: Console,
    read_line: ReadLine,
    *,
    interactive: bool,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> bool:
    """Start a router, talk until the lines end, and stop it.

    Args:
        router: Not started yet.
        console: Shows the answers.
        read_line: Gives the user's lines.
        interactive: Ctrl-C aborts an answer and no more; else it ends all.
        temperature: As for `ChatSession`.
        max_tokens: As for `ChatSession`.

    Returns:
        Whether every turn was answered or aborted, none failed.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(router),
    ):
        session = ChatSession(router, console, temperature=temperature, max_tokens=max_tokens)
        if interactive:
            session.note(f"{session.model} listens. /help lists the commands, /quit leaves.")
        lines = _lines(session, read_line, interactive)
        failed = sum(not _take_turn(portal, session, line, interactive) for line in lines)
    return failed == 0


def _lines(session: ChatSession, read_line: ReadLine, interactive: bool) -> Iterator[str]:
    """Give the user's turns; commands are obeyed on the way."""
    while True:
        try:
            line = read_line()
        except KeyboardInterrupt:
            if not interactive:
                raise
            session.note("\n/quit or Ctrl-D leaves.")
            continue
        if line is None:
            return
        line = line.strip()
        if line.startswith("/"):
            if not session.obey(line):
                return
        elif line:
            yield line


def _take_turn(portal: BlockingPortal, session: ChatSession, line: str, interactive: bool) -> bool:
    """Answer one turn; False: it failed."""
    ended = threading.Event()

    async def take() -> None:
        try:
            await session.answer(line)
        finally:
            ended.set()

    answer = portal.start_task_soon(take)
    try:
        answer.result()
    except KeyboardInterrupt:
        answer.cancel()
        if not interactive:
            raise
        ended.wait(ABORT_S)
        session.note("Aborted; that turn is forgotten.")
    except AgogeError as error:
        print_error(error)
        return False
    return True


def terminal_line() -> str | None:
    """Read a line at a prompt; None after Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # its import gives `input` a history and editing keys
    try:
        return input("> ")
    except EOFError:
        typer.echo()  # the shell's prompt comes next
        return None


def piped_line() -> str | None:
    """Read a line of a pipe or file; None at its end."""
    return sys.stdin.readline() or None
