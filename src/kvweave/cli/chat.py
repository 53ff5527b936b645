"""`kvweave chat`: a conversation, with documents or without, here or on a running server."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import click

from kvweave.cli.chat_partner import ChatPartner, LocalPartner, RemotePartner
from kvweave.cli.options import (
    config_options,
    model_options,
    pass_config,
    question_options,
    store_options,
    url_option,
)
from kvweave.config import EffectiveConfig
from kvweave.errors import ConfigError, KVWeaveError
from kvweave.paths import chat_history_file

MOST_LINES = 1000  # of the history file
PROMPT = "> "
HELP = """\
/kb NAME     answer from this knowledge base; /kb alone: from none
/reuse WAY   auto, full, prefix or a strategy such as weave:0.15; /reuse alone: as is usual
/sources     what the last answer was made from
/explain     what was done for the last answer
/clear       begin another conversation
/quit        leave (Ctrl-D too)"""


@click.command("chat")
@click.option("--kb", help="Answer from this knowledge base: a folder, or a name with --url.")
@url_option
@question_options("k", "retrieval", "min_score", "reranker", "reuse", "bound", "order")
@model_options
@store_options
@config_options("model.system", "sampling.max_tokens", "sampling.temperature")
@click.option("--history/--no-history", default=True, help="Keep what is typed for the next time.")
@pass_config
def command(kb: str | None, url: str | None, history: bool, effective: EffectiveConfig) -> None:
    """Talk with a model, over a knowledge base if there is one. /help lists what can be typed."""
    config = effective.config
    reuse = config.quality.reuse
    partner: ChatPartner
    if url is not None:
        from kvweave.clients.server import ServerClient

        partner = RemotePartner(ServerClient(url), config, kb, reuse)
    else:
        partner = LocalPartner(config, kb, reuse)
    is_person = sys.stdin.isatty()
    with closing(partner), _typed_before(chat_history_file() if history and is_person else None):
        if is_person:
            click.secho("/help lists what can be typed; Ctrl-D leaves", dim=True, err=True)
        Conversation(partner, is_person).run()


class Conversation:
    """Reads what is typed and answers it, line by line."""

    def __init__(self, partner: ChatPartner, is_person: bool) -> None:
        self._partner = partner
        self._is_person = is_person
        self._messages: list[dict[str, str]] = []
        self._is_over = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "kb": self._use_kb,
            "reuse": self._set_reuse,
            "sources": self._show_sources,
            "explain": self._show_explain,
            "clear": self._clear,
            "quit": self._quit,
        }

    def run(self) -> None:
        """Until the end of what is typed, or /quit. What fails is told, and the talk goes on."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        for line in self._lines():
            try:
                if line.startswith("/"):
                    self._obey(line)
                elif line:
                    self._ask(line)
            except KVWeaveError as error:
                click.secho(f"kvweave: {error}", fg="red" if self._is_person else None, err=True)
            if self._is_over:
                return

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = input(PROMPT) if self._is_person else sys.stdin.readline()
            except EOFError:
                click.echo(err=True)
                return
            if not self._is_person and not line:
                return
            yield line.strip()

    def _ask(self, question: str) -> None:
        asked = [*self._messages, {"role": "user", "content": question}]
        text = ""
        for piece in self._partner.answer(asked):
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if text.strip():  # else there is nothing to go on from
            self._messages = [*asked, {"role": "assistant", "content": text}]

    def _obey(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        if name not in self._commands:
            known = " ".join(f"/{each}" for each in self._commands)
            raise ConfigError(f"/{name} is unknown; known: {known}")
        self._commands[name](rest.strip())

    def _help(self, _: str) -> None:
        click.echo(HELP, err=True)

    def _use_kb(self, name: str) -> None:
        self._partner.use_kb(name or None)
        self._clear("")
        click.secho(f"answers are from {name or 'the model alone'}", dim=True, err=True)

    def _set_reuse(self, way: str) -> None:
        from kvweave.app.answer.question import parse_reuse

        parse_reuse(way or None)
        self._partner.reuse = way or None

    def _show_sources(self, _: str) -> None:
        sources = self._partner.told.sources
        for source in sources:
            score = "" if source["score"] is None else f"  {source['score']:.3f}"
            where = source["fate"] or "elsewhere"
            where += f" from {source['tier']}" if source["tier"] else ""
            title = source["title"] or source["chunk"][:8]
            click.echo(f"[{source['cited_as']}] {title}{score}  ({where})", err=True)
        if not sources:
            click.echo("no sources: the last answer was made from no documents", err=True)

    def _show_explain(self, _: str) -> None:
        told = self._partner.told
        if not told.strategy:
            click.echo("nothing was answered yet", err=True)
            return
        counts = ", ".join(f"{count:,} {state}" for state, count in told.tokens.items() if count)
        first = "" if told.ttft_ms is None else f"; first token after {told.ttft_ms / 1e3:.2f} s"
        click.echo(f"{told.strategy}: {counts or 'all computed'}{first}", err=True)
        if told.why is not None:
            click.echo(f"no more is reused: {told.why}", err=True)

    def _clear(self, _: str) -> None:
        self._messages = []
        self._partner.begin_again()

    def _quit(self, _: str) -> None:
        self._is_over = True


@contextmanager
def _typed_before(file: Path | None) -> Iterator[None]:
    """What was typed in earlier conversations can be had again with the arrow keys; None: not."""
    if file is None:
        yield
        return
    try:
        import readline
    except ImportError:  # an interpreter built without it
        yield
        return
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(MOST_LINES)
        with suppress(OSError):  # nowhere to keep it: no reason to fail
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600, exist_ok=True)
            readline.write_history_file(file)
