"""`kvweave bench`: what the benches of a clone ask, and how to run one and report on all."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from kvweave.cli.options import json_option
from kvweave.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "bench"
PASSED_ON = {"allow_interspersed_args": False, "ignore_unknown_options": True}


class Bench(NamedTuple):
    """A line of the table in bench/README.md."""

    name: str  # of its result file, without .json
    group: str
    question: str
    commands: tuple[str, ...]  # bench/FILE.py with its arguments
    device: str
    last_run: str  # the day
    pictures: tuple[str, ...]  # of its result

    @property
    def needs(self) -> dict[str, str]:
        """Options whose value stands in capitals, which only the person who runs it has."""
        return dict(re.findall(r"(--[a-z-]+) ([A-Z]+)\b", self.commands[0]))


def read_table() -> dict[str, Bench]:
    """Every bench by name, in the order of the table."""
    table = FOLDER / "README.md"
    if not table.is_file():
        raise ConfigError("benches are in the repository, not in the package: run it from a clone")
    found, group = {}, ""
    for line in table.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 5:
            continue
        if heading := re.fullmatch(r"\*\*(.+)\*\*", cells[0]):
            group = heading[1]
        commands = tuple(re.findall(r"`(bench/[^`]+)`", cells[1]))
        pictures = tuple(re.findall(r"`([\w-]+\.svg)`", cells[2]))
        for name in re.findall(r"`([\w-]+)\.json`", cells[2]):
            found[name] = Bench(name, group, cells[0], commands, cells[3], cells[4], pictures)
    return found


@click.group()
def command() -> None:
    """List benches, run one, or write the pages of their results."""


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """Show every bench: its question, command, data, device and newest result."""
    benches = read_table().values()
    if as_json:
        click.echo(json.dumps([{**each._asdict(), "needs": each.needs} for each in benches]))
        return
    from kvweave.cli.tables import make_table, table_console

    console, headings = table_console(), ("name", "question", "command", "device", "last run")
    for group in dict.fromkeys(each.group for each in benches):
        rows = [
            (each.name, each.question, ", ".join(each.commands), each.device, each.last_run)
            for each in benches
            if each.group == group
        ]
        console.print(f"\n{group}", style="bold")
        prose = ("question", "command", "device")
        console.print(make_table(headings, rows, prose=prose))
    console.print("\nWords in capitals are yours to give: kvweave bench run NAME --data FOLDER")


@command.command("run", context_settings=PASSED_ON)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run_command(ctx: click.Context, name: str, arguments: tuple[str, ...]) -> None:
    """Run the bench NAME, with ARGUMENTS of its own: NAME --help lists them."""
    benches = read_table()
    if name not in benches:
        raise ConfigError(f"there is no bench {name!r}; kvweave bench list names all")
    bench = benches[name]
    given = {each.partition("=")[0] for each in arguments}
    typed = bench.commands[0]
    for option, value in bench.needs.items():
        if option not in given and "--help" not in given:
            raise ConfigError(f"{name} needs {option} {value}: {typed}")
        typed = typed.replace(f" {option} {value}", "")
    ctx.exit(_run_script([*typed.split(), *arguments]))


@command.command("report", context_settings=PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def report_command(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Write docs/results.md and docs/coverage.md; with --check or --ages, say how they stand."""
    read_table()  # says where benches are if they are not here
    ctx.exit(_run_script(["bench/report.py", *arguments]))


def _run_script(words: Sequence[str]) -> int:
    script, *arguments = words
    command = [sys.executable, str(FOLDER.parent / script), *arguments]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - our own files, no shell
