"""`python -m agoge_async.cli`."""

from agoge_async.cli.commands import app

if __name__ == "__main__":
    app(prog_name="agoge-async")
