"""`kvweave serve`: an OpenAI-compatible server over one model and its knowledge bases."""

import importlib.util
import ipaddress
import json
import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import click

from kvweave.cli.interrupts import EXIT_CODE
from kvweave.cli.knowledge_bases import open_models
from kvweave.cli.options import config_option, config_options, pass_config, store_options
from kvweave.config import EffectiveConfig, ServerSettings, WeaveConfig, given_values, known_keys
from kvweave.errors import ConfigError
from kvweave.paths import kb_root
from kvweave.serve.keeper import BROKEN_CODE, Keeper, can_keep
from kvweave.serve.kept import KeptStart
from kvweave.serve.starting import StartAnswers

if TYPE_CHECKING:
    from kvweave.app.libraries.libraries import Libraries, LibrariesConfig, LibraryKey
    from kvweave.serve.access.limits import Limits
    from kvweave.serve.access.origins import OriginRules
    from kvweave.serve.routes.model_names import RequestDefaults
    from kvweave.serve.server import Server


EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - addresses that take requests from anywhere
MOST_FILES = 65_536  # that a process is allowed to open, if the system lets it
OTHER_FILES = 512  # of those that are no connections: catalogues, tiers, indexes
END_S = 30.0  # for all of it to end then
KEPT_CLOSE_S = 1.0  # for closing where others wait: what is written is safe from a kill
CLOSE_S = 10.0  # and for closing in order, once nothing is served any more


# keys of a server that a gateway takes as well, in the order of its help
ADDRESS_KEYS = ("server.host", "server.port", "server.kb_root")
ANSWER_KEYS = (
    *("library.retrieval", "library.min_score", "library.reranker", "library.rewrite"),
    *("library.recognise", "library.nothing_found", "model.system"),
    *("quality.reuse", "quality.bound", "quality.order"),
    *("server.api_key_file", "server.aliases", "speculation.mode"),
    *("server.log_format", "server.log_level", "server.running", "server.waiting"),
    *("server.body_bytes", "server.upload_bytes", "server.request_s", "server.open_kbs"),
)
END_KEYS = ("server.grace_s", "server.lame_s")
kb_folders_option = click.option(
    "--kb",
    "folders",
    multiple=True,
    metavar="NAME=DIR",
    help="A knowledge base elsewhere; TENANT/NAME=DIR gives it to a tenant. Repeatable.",
)


@click.command("serve")
@config_option(
    "model.model",
    multiple=True,
    to_key=lambda names: names[0],
    also={"server.models": lambda names: names[1:] or None},
    help=f"{known_keys()['model.model'].help}. Repeatable: the first answers those who name none.",
)
@click.option(
    "--shape",
    metavar="NAME",
    help="For load tests: random weights of a model's shape (llama-3.1-8b, qwen2.5-7b, mistral-7b, "
    "tiny) in place of --model. What it says means nothing.",
)
@config_options("model.device", "model.dtype", "model.quant")
@store_options
@config_options(*ADDRESS_KEYS)
@kb_folders_option
@config_options("library.embedder", "library.encoding", *ANSWER_KEYS, "store.host_bytes", *END_KEYS)
@pass_config
def command(folders: tuple[str, ...], shape: str | None, effective: EffectiveConfig) -> None:
    """Serve an OpenAI-compatible API."""
    need_extra()
    config = effective.config if shape is None else with_shape(effective.config, shape)
    server_config = config.server
    if (kept := KeptStart.find()) is not None:
        with kept:
            run_server(*make_server(folders, config, kept.listener, kept), kept)
        return
    with listen(server_config.host, server_config.port) as listener:
        if server_config.restarts and can_keep():
            keeper = Keeper(listener, server_config.restarts, server_config.request_s)
            raise click.exceptions.Exit(keeper.run())
        with StartAnswers(listener) as start:
            run_server(*make_server(folders, config, listener), start)


def with_shape(config: WeaveConfig, shape: str) -> WeaveConfig:
    """The configuration with random weights of a shape for its model. Raises ConfigError."""
    from kvweave.app.library.runtime import drawn_model

    named = [name for name in (config.model.model, *(config.server.models or ())) if name]
    if named:
        raise ConfigError(f"--shape draws random weights, but {named[0]} was named; drop one")
    if config.model.quant == "int8":
        raise ConfigError("--shape has no weights in 8 bits; drop --quant")
    return replace(config, model=replace(config.model, model=drawn_model(shape)))


def make_server(
    folders: Sequence[str],
    config: WeaveConfig,
    listener: socket.socket,
    kept: KeptStart | None = None,
) -> "tuple[Server, Closable, Libraries]":
    """Load the models and put the server together; the others are to be closed after it. With
    `kept` another process goes on if this one cannot."""
    from kvweave.app.libraries.libraries import Libraries
    from kvweave.app.library.library import embedder_opener
    from kvweave.app.library.store_tiers import check_store
    from kvweave.serve.access.api_keys import read_keys
    from kvweave.serve.access.origins import AccessRules
    from kvweave.serve.observe.logs import configure_logs
    from kvweave.serve.observe.tracing import configure_tracing
    from kvweave.serve.routes.context import PageConfig
    from kvweave.serve.server import Prepare, Server, ServerLifecycle, settle

    server_config = config.server
    keys, limits = read_keys(server_config.api_key_file), make_limits(server_config)
    origins = make_origins(server_config)
    places = make_places(config, folders)
    check_store(config.store)
    warn_if_open(server_config.host, has_keys=bool(keys))
    weave = open_models(config)
    if kept is not None:
        kept.take(weave.engines)
    weave.check_strategy(places.usual.reuse, places.usual.ratio)
    opener = embedder_opener(config.library)
    libraries = Libraries(weave, places, open_embedder=opener)
    steps = [Prepare("opening the embedder and knowledge bases", libraries.open_ahead)]
    if kept is not None:
        steps.append(Prepare("taking what the process before left", kept.raise_not_taken))
    if server_config.kb_root is not None or libraries.has_some():
        # else nothing is fused at first: idle time measures once something is
        steps.append(Prepare("measuring this machine for reuse 'auto', once", weave.measure))
    steps.append(Prepare("settling", settle))
    url = url_of(server_config.host, listener.getsockname()[1])
    configure_logs(server_config.log_format, server_config.log_level)
    configure_tracing()
    server = Server(
        weave,
        limits=limits,
        libraries=libraries,
        access=AccessRules(keys, origins),
        usual=make_defaults(config),
        page=PageConfig(server_config.kept_answers, conversations_folder(places.root)),
        lifecycle=ServerLifecycle(
            prepare=steps,
            on_ready=lambda: (
                None
                if kept is not None and kept.failures
                else greet(
                    ", ".join(weave.models()),
                    weave.weights_words,
                    url,
                    places.root,
                    with_key=bool(keys),
                )
            ),
            lame_s=server_config.lame_s,
            patience_s=server_config.grace_s,
            stuck_s=server_config.engine_s,
            on_broken=lambda why: _begin_end(why, kept),
            pass_on=None if kept is None else kept.pass_on,
            on_end=None if kept is None else lambda: kept.leave(weave.engines),
        ),
    )
    return server, weave, libraries


def make_limits(server: ServerSettings) -> "Limits":
    from kvweave.serve.access.limits import Limits

    connections = min(server.connections, _room_for_connections())
    return replace(Limits.from_settings(server), connections=connections)


def make_defaults(config: WeaveConfig) -> "RequestDefaults":
    from kvweave.serve.routes.model_names import RequestDefaults

    return RequestDefaults(given_values(config.sampling), config.server.aliases or ())


def _room_for_connections() -> int:
    """Return how many connections this process may have open besides its files.

    The limit is raised as far as it goes without asking: at it, nothing could be opened any more.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(16, most - OTHER_FILES)


def warn_if_open(host: str, *, has_keys: bool) -> None:
    """Say that everybody who reaches this machine may use it, where that is so."""
    if has_keys or is_own_machine(host):
        return
    click.echo(
        f"Warning: {host or 'every address'} lets others in and there are no API keys: whoever "
        "reaches this machine can read, upload and delete. Give it keys (--api-key-file), or "
        "listen on 127.0.0.1",
        err=True,
    )


def is_own_machine(host: str) -> bool:
    """Whether only this machine can reach that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_origins(server: ServerSettings) -> "OriginRules":
    from kvweave.serve.access.origins import OriginRules

    own = () if server.host in EVERYWHERE else (server.host,)
    return OriginRules((*own, *(server.allowed_hosts or ())), server.allowed_origins or ())


def make_places(config: WeaveConfig, folders: Sequence[str]) -> "LibrariesConfig":
    """Where knowledge bases are: under the root, and at `folders` as --kb names them. Where those
    are named and no root is, none but those can be reached or made."""
    from kvweave.app.answer.question import QuestionDefaults
    from kvweave.app.libraries.libraries import LibrariesConfig
    from kvweave.app.library.library_kv import BackgroundKV, KVOptions
    from kvweave.corpus.parsers import ParseLimits

    host: dict[str, Any] = {}
    if config.store.host_bytes is not None:
        host["host_bytes"] = config.store.host_bytes
    root = config.server.kb_root
    if root is None and not folders:
        root = kb_root()
    return LibrariesConfig(
        root=root,
        folders=parse_folders(folders),
        embedder=config.library.embedder,
        kv=replace(KVOptions.from_config(config), background=BackgroundKV.from_config(config)),
        speculation=config.speculation,
        usual=QuestionDefaults.from_config(config),
        planner=config.planner,
        promotion=config.library.promotion,
        parsing=ParseLimits(
            seconds=config.library.parse_s, memory_bytes=config.library.parse_bytes
        ),
        open_most=config.server.open_kbs,
        **host,
    )


def conversations_folder(root: Path | None) -> Path:
    """Where conversations of the web page are kept: beside the knowledge bases."""
    return (root or kb_root()) / ".conversations"  # no knowledge base can have that name


def parse_folders(typed: Sequence[str]) -> "dict[LibraryKey, Path]":
    """NAME=DIR or TENANT/NAME=DIR. Raises ConfigError."""
    from kvweave.app.libraries.libraries import LibraryKey, check_name, check_tenant
    from kvweave.errors import RequestError

    folders: dict[LibraryKey, Path] = {}
    for text in typed:
        name, equals, folder = text.partition("=")
        tenant, slash, rest = name.partition("/")
        place = LibraryKey(tenant, rest) if slash else LibraryKey("", name)
        if not equals or not folder or (slash and not tenant):
            raise ConfigError(f"--kb {text!r} names no folder; write NAME=DIR or TENANT/NAME=DIR")
        try:
            check_name(place.name)
        except RequestError as error:
            raise ConfigError(f"--kb {text!r}: {error}") from error
        check_tenant(place.tenant)
        if place in folders:
            raise ConfigError(f"--kb {name} is there twice; leave one out")
        folders[place] = Path(folder)
    return folders


def url_of(host: str, port: int) -> str:
    if host in EVERYWHERE:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greet(model: str, words: str, url: str, root: Path | None, *, with_key: bool) -> None:
    """Lines that can be copied and run."""
    from rich.console import Console

    hello = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    key = "YOUR-KEY" if with_key else "none"
    header = " -H 'Authorization: Bearer YOUR-KEY'" if with_key else ""
    console = Console(highlight=False)

    def say(text: str = "", style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    say(f"kvweave serves {model} at {url}/v1", "bold green")
    if root is None:
        say("knowledge bases: those of --kb; --kb-root DIR lets uploads make others", "dim")
    else:
        say(f"knowledge bases: {root} (an upload makes one)", "dim")
    say(f"web page: {url}/", "dim")
    say(words, "dim")
    say("Ctrl-C stops it. Try it from another terminal:", "dim")
    say()
    if root is not None:
        say(f"  curl {url}/v1/kb/notes/documents{header} -F file=@README.md")
    say(f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\")
    say(f"    -d '{json.dumps(hello)}'")
    say()
    say("or from Python (pip install openai):", "dim")
    say()
    say("  from openai import OpenAI")
    say(f'  chat = OpenAI(base_url="{url}/v1", api_key="{key}").chat.completions')
    say('  hello = [{"role": "user", "content": "Say hello."}]')
    say(
        f"  print(chat.create(model={model!r}, messages=hello, max_tokens=32)"
        ".choices[0].message.content)"
    )
    console.file.flush()


def need_extra() -> None:
    wanted = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
    missing = [name for name in wanted if not _is_installed(name)]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not found; run: pip install 'kvweave[serve]'")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # blocked by an entry of None in sys.modules
        return False


def listen(host: str, port: int) -> socket.socket:
    """Take the port: before the model, since a taken one should not cost a load."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a name no resolver can hold
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; pass another --host or --port"
        ) from error
    return listener


def run_server(
    server: "Server", host: "Closable", libraries: "Libraries", start: StartAnswers | KeptStart
) -> None:
    """Serve until a signal, then close in order: `host` is a Weave or a Gateway."""
    # uvicorn stops in order and then passes the signal on, which must not end us before we close
    signal.signal(signal.SIGTERM, _end)
    with closing(host), closing(libraries):
        try:
            listener = start.hand_over()
            if isinstance(start, KeptStart):
                server.resume(start.held)
            server.run([listener])
            if server.broken is not None:
                _leave_broken(server.broken, is_kept=isinstance(start, KeptStart))
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            raise click.exceptions.Exit(EXIT_CODE) from None
        except _Terminated:
            click.echo("stopped", err=True)


def _begin_end(why: str, kept: KeptStart | None) -> None:
    """The engine is lost: whatever holds this process up, it ends."""
    end_by_force(END_S)
    if kept is not None:
        kept.tell_broken(why)


def _leave_broken(why: str, *, is_kept: bool) -> None:
    """End with a code of its own, for whoever watches to start another. In order if that can be
    done: what the engine held up may never end. A keeper says it, and waits with requests."""
    if not is_kept:
        click.echo(f"Error: {why}; start it again", err=True)
    end_by_force(KEPT_CLOSE_S if is_kept else CLOSE_S)
    raise click.exceptions.Exit(BROKEN_CODE)


def end_by_force(seconds: float) -> None:
    """End the process so many seconds from now, if it has not ended by then: connections and what
    the engine holds up may keep it for ever."""
    late = threading.Timer(seconds, os._exit, (BROKEN_CODE,))
    late.daemon = True
    late.start()


class Closable(Protocol):
    def close(self) -> None: ...


class _Terminated(BaseException):
    """SIGTERM came: who stops servers in order wants an exit code of 0."""


def _end(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: it is being closed
    raise _Terminated
