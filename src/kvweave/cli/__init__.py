"""The command line: one short file per command, loaded only when that command runs."""

import importlib
import time
from typing import Any, NamedTuple, NoReturn

import click

from kvweave import __version__
from kvweave.cli.interrupts import EXIT_CODE, Interrupts
from kvweave.errors import ConfigError, KVWeaveError

# command → module that holds a click command named `command`
COMMANDS: dict[str, str] = {
    "ask": "kvweave.cli.ask",
    "audit": "kvweave.cli.audit",
    "bench": "kvweave.cli.bench",
    "cache": "kvweave.cli.cache",
    "calibrate": "kvweave.cli.calibrate",
    "chat": "kvweave.cli.chat",
    "completion": "kvweave.cli.completion",
    "config": "kvweave.cli.config",
    "demo": "kvweave.cli.demo",
    "docs": "kvweave.cli.docs",
    "doctor": "kvweave.cli.doctor",
    "gateway": "kvweave.cli.gateway",
    "ingest": "kvweave.cli.ingest",
    "kb": "kvweave.cli.kb",
    "measure": "kvweave.cli.measure",
    "models": "kvweave.cli.models",
    "plan": "kvweave.cli.plan",
    "serve": "kvweave.cli.serve",
    "why": "kvweave.cli.why",
}


# a package that some commands need → the extra that brings it
EXTRAS: dict[str, str] = {
    **dict.fromkeys(("faiss", "pypdf", "docx", "selectolax"), "rag"),
    **dict.fromkeys(("fastapi", "prometheus_client", "python_multipart", "uvicorn"), "serve"),
}


class LazyCommands(click.Group):
    """Looks a command up in COMMANDS and imports it then: `kvweave models ls` never loads torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command), f"{cmd_name} has no click command"
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """A command that lacks an extra says which, in one line."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            way_out = f"pip install 'kvweave[{EXTRAS[package]}]'"
            raise ConfigError(f"{package} not found; run: {way_out}") from error


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvweave")
def cli() -> None:
    """RAG serving that never prefills the same passage twice."""


class CommandStart(NamedTuple):
    """When a command was started, by time.perf_counter: `ctx.find_object` has it."""

    seconds: float


def main() -> NoReturn:
    """Entry point. Our own errors become one line on stderr and exit code 2, never a traceback."""
    started = CommandStart(time.perf_counter())
    with Interrupts() as interrupts:
        try:
            code = _run(started)
        except Exception:
            if not interrupts.is_interrupted:
                raise
            code = _tell_interrupt()  # whatever became of the interrupt on its way up
        interrupts.leave(code)


def _run(started: CommandStart) -> int:
    try:
        return cli.main(prog_name="kvweave", standalone_mode=False, obj=started) or 0
    except KVWeaveError as error:
        click.echo(f"kvweave: {error}", err=True)
        return 2
    except click.ClickException as error:
        _show(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _tell_interrupt()
    except BrokenPipeError:
        return 141


def _tell_interrupt() -> int:
    click.echo("kvweave: interrupted", err=True)
    return EXIT_CODE


def _show(error: click.ClickException) -> None:
    """One line as well; what click says in many is the help of a group called without a command."""
    message = error.format_message()
    if "\n" in message:
        error.show()
        return
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    way_out = f" Try: {ctx.command_path} --help" if ctx is not None else ""
    click.echo(f"kvweave: {message}{way_out}", err=True)
