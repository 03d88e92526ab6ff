"""`agoge-async demo`: three requests to the embedded model."""

from __future__ import annotations

import ast
import contextlib
import json
import operator
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from agoge_async.cli.output import CommandError, printable, write
from agoge_async.messages import ToolCall, ToolMessage
from agoge_async.requests import InferenceRequest
from agoge_async.responses import InferenceResponse
from agoge_async.router import Router

STREAM_QUESTION = "Tom has 7 apples and buys 5 more. How many apples does Tom have now?"
STREAM_ANSWER = 12
TOOL_QUESTION = "Mia has 8 boxes with 6 shells in each. How many shells does Mia have?"
TOOL_ANSWER = 48
JSON_QUESTION = "What is 4 times 6? Reply in JSON."
JSON_ANSWER = 24

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
# The order counts: the model writes the equation first, and reads the answer off it.
ANSWER_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"expression": {"type": "string"}, "answer": {"type": "integer"}},
            "required": ["expression", "answer"],
            "additionalProperties": False,
        },
    },
}
MAX_TOKENS = 200
LABEL_WIDTH = 13
MAX_EXPRESSION = 200

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Evaluate an expression of numbers, + - * / and brackets.

    Raises:
        ValueError: It is something else, or has no value.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"longer than {MAX_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.12g}"
    except SyntaxError:
        raise ValueError(f"not an arithmetic expression: {expression!r}") from None
    except (ArithmeticError, RecursionError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from None


def _value(node: ast.expr) -> float:
    number = node.value if isinstance(node, ast.Constant) else None
    if isinstance(number, int | float) and not isinstance(number, bool):
        return number
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"only numbers, + - * / and brackets, not {ast.unparse(node)!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTiming:
    """How long one request took."""

    name: str
    tokens: int
    first_token_s: float | None
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token, where that is known; else over the whole time."""
        if self.first_token_s is None or self.tokens < 2:
            return self.tokens / max(self.total_s, 1e-9)
        return (self.tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)


async def run_demo(router: Router, console: Console) -> None:
    """Start a router, show three requests and their timings, and stop it.

    Raises:
        AgogeError: The engine can't be started, or fails.
        CommandError: An answer isn't what it should be.
    """
    console.print("Starting the embedded model: a local vLLM engine in its own process ...")
    began = time.perf_counter()
    async with router:
        start_s = time.perf_counter() - began
        console.print(f"[green]Ready[/green] in {start_s:.1f} s.")
        demo = _Demo(router, console)
        await demo.stream_answer()
        await demo.use_tool()
        await demo.answer_as_json()
        demo.show_timings(start_s)
        began = time.perf_counter()
    console.print(f"Stopped in {time.perf_counter() - began:.1f} s; nothing is left running.")


class _Demo:
    """The demo's three parts, on a router that runs."""

    def __init__(self, router: Router, console: Console) -> None:
        self._router = router
        self._console = console
        self._timings: list[CallTiming] = []

    async def stream_answer(self) -> None:
        self._title("1. A word problem, streamed")
        self._say("user", STREAM_QUESTION)
        self._label("model")
        request = self._request(messages=STREAM_QUESTION)
        began = time.perf_counter()
        first_token_s = None
        stream = self._router.stream(request)
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                if chunk.text and first_token_s is None:
                    first_token_s = time.perf_counter() - began
                self._write_indented(chunk.text)
        self._console.print()
        response = stream.response
        assert response is not None  # the loop has come to the stream's end
        self._note_timing("streamed", response, first_token_s)
        _check_number(response.text, STREAM_ANSWER)

    async def use_tool(self) -> None:
        self._title("2. A tool that the model may call")
        self._say("user", TOOL_QUESTION)
        request = self._request(messages=TOOL_QUESTION, tools=[CALCULATOR])
        response = await self._router.chat(request)
        self._note_timing("tool call", response)
        message = response.choices[0].message
        if not message.tool_calls:
            raise CommandError(f"the model called no tool; it said {response.text!r}")
        results = [self._run_tool(call) for call in message.tool_calls]
        request = self._request(messages=[*request.messages, message, *results], tools=[CALCULATOR])
        response = await self._router.chat(request)
        self._note_timing("tool's result", response)
        self._say("model", response.text)
        _check_number(response.text, TOOL_ANSWER)

    async def answer_as_json(self) -> None:
        self._title("3. An answer that follows a JSON schema")
        self._say("user", JSON_QUESTION)
        request = self._request(messages=JSON_QUESTION, response_format=ANSWER_FORMAT)
        response = await self._router.chat(request)
        self._note_timing("JSON", response)
        self._say("model", response.text)
        answer = _read_answer(response.text)
        if answer != JSON_ANSWER:
            # The engine vouches for the form alone, and this model is weak at numbers in JSON.
            write(self._console, f"The form is right; the number should be {JSON_ANSWER}.\n", "dim")

    def show_timings(self, start_s: float) -> None:
        self._title("Timings")
        self._console.print(f"start-up: {start_s:.1f} s")
        table = Table(box=box.SIMPLE_HEAD if self._console.is_terminal else None)
        table.add_column("request")
        for column in ("tokens", "first token", "tokens/s", "total"):
            table.add_column(column, justify="right")
        for timing in self._timings:
            first = timing.first_token_s
            table.add_row(
                timing.name,
                str(timing.tokens),
                "-" if first is None else f"{first * 1000:.0f} ms",
                f"{timing.tokens_per_s:.0f}",
                f"{timing.total_s * 1000:.0f} ms",
            )
        self._console.print(table)

    def _request(self, **fields: Any) -> InferenceRequest:
        settings = {"model": self._router.models[0], "temperature": 0, "max_tokens": MAX_TOKENS}
        return InferenceRequest.model_validate(settings | fields)

    def _run_tool(self, call: ToolCall) -> ToolMessage:
        self._say("tool call", f"{call.function.name}({call.function.arguments})")
        result = _tool_result(call)
        self._say("tool result", result)
        return ToolMessage(content=result, tool_call_id=call.id)

    def _note_timing(
        self, name: str, response: InferenceResponse, first_token_s: float | None = None
    ) -> None:
        timings, usage = response.timings, response.usage
        timing = CallTiming(
            name=name,
            tokens=usage.completion_tokens if usage else 0,
            first_token_s=first_token_s,
            total_s=timings.total_s if timings else 0.0,
        )
        self._timings.append(timing)

    def _title(self, title: str) -> None:
        self._console.print()
        if self._console.is_terminal:
            self._console.rule(f"[bold]{title}[/bold]", align="left", style="dim")
        else:
            self._console.print(title)

    def _label(self, who: str) -> None:
        styles = {"user": "bold cyan", "model": "bold green"}
        write(self._console, f"{who:{LABEL_WIDTH}}", styles.get(who, "bold magenta"))

    def _say(self, who: str, text: str) -> None:
        self._label(who)
        self._write_indented(text)
        self._console.print()

    def _write_indented(self, text: str) -> None:
        write(self._console, printable(text).replace("\n", "\n" + " " * LABEL_WIDTH))


def _tool_result(call: ToolCall) -> str:
    """Run a tool; what went wrong is a result too, which the model may act on."""
    if call.function.name != "calculator":
        return f"error: there is no tool {call.function.name!r}"
    try:
        return calculate(str(json.loads(call.function.arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def _read_answer(text: str) -> int:
    """Read the number in an answer that follows `ANSWER_FORMAT`."""
    try:
        answer = json.loads(text)["answer"]
    except (ValueError, KeyError, TypeError):
        answer = None
    if type(answer) is not int:
        raise CommandError(f"the answer doesn't follow the JSON schema: {text!r}")
    return answer


def _check_number(text: str, right: int) -> None:
    """Compare the number after #### with the right one."""
    match = re.search(r"#### (-?\d+)", text)
    if match is None:
        raise CommandError(f"the answer has no line '#### NUMBER': {text!r}")
    if int(match[1]) != right:
        raise CommandError(f"the model answered {match[1]}, right is {right}")
