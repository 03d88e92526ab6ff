"""The commands of `agoge-async`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from agoge_async.cli import chat as chats
from agoge_async.cli.demo import run_demo
from agoge_async.cli.doctor import run_doctor
from agoge_async.cli.output import make_console, reported_errors
from agoge_async.config import RouterConfig, load_config
from agoge_async.launch import make_pools, plan_gpus
from agoge_async.router import Router

app = typer.Typer(
    name="agoge-async",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the engines' log, and tracebacks of errors."),
]


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = importlib.metadata.version("agoge_async")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    typer.echo(f"agoge-async {version}")
    raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """One async call for every model request of a program, over local vLLM engines."""
    del version  # its callback has seen it
    context.obj = verbose
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(context: typer.Context, verbose: Verbose = False) -> None:
    """Start the embedded model and show streaming, a tool call and structured output."""
    with reported_errors(verbose=verbose or context.obj):
        asyncio.run(run_demo(Router.from_config("tiny"), make_console()))


@app.command()
def chat(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL_OR_CONFIG]",
            help="A preset, a YAML file, a model's folder, or a hub id; the embedded model if "
            "left out.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 is greedy; left out: the model's own.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens.", show_default=False)
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Talk with a model; /help lists what else can be said. In a pipe: one turn a line."""
    with reported_errors(verbose=verbose or context.obj):
        interactive = sys.stdin.isatty()
        all_answered = chats.run_chat(
            Router.from_config(chats.chat_source(model)),
            make_console(),
            chats.terminal_line if interactive else chats.piped_line,
            interactive=interactive,
            temperature=temperature,
            max_tokens=max_tokens,
        )
    if not all_answered and not interactive:
        raise typer.Exit(1)


@app.command()
def check(
    context: typer.Context,
    config: Annotated[
        list[str], typer.Argument(help="YAML files or presets: merged, in this order.")
    ],
    verbose: Verbose = False,
) -> None:
    """Check a configuration without starting anything."""
    with reported_errors(verbose=verbose or context.obj):
        parsed = load_config(config)
        make_pools(parsed, lambda _replica, _stage: None)
        for line in describe_config(parsed):
            typer.echo(line)


@app.command()
def doctor() -> None:
    """Say what local engines need on this machine, what is missing, and what to do."""
    with reported_errors(verbose=False):
        is_well = run_doctor(make_console())
    if not is_well:
        raise typer.Exit(1)


def describe_config(config: RouterConfig) -> Iterator[str]:
    """Say what a valid configuration would start, and where."""
    models = config.models
    gpus = plan_gpus(config)
    for name, model in models.items():
        yield f"{name}: {model.backend}, {model.engine_args.get('model', name)}"
        for index, devices in enumerate(gpus[name]):
            where = f"GPU {', '.join(map(str, devices))}" if devices else "CPU"
            yield f"  {name}/{index}: {where}"
    replicas = sum(model.num_workers for model in models.values())
    yield f"OK: {_count(len(models), 'model')}, {_count(replicas, 'replica')}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
