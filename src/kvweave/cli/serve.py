"""`kvweave serve`: an OpenAI-compatible server over one model and its knowledge bases."""

import importlib.util
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvweave.cli.greeting import greet, url_of
from kvweave.cli.loading import model_options, open_weave
from kvweave.cli.serve_options import limit_options, make_limits, parse_folders
from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from kvweave.app.libraries.libraries import Libraries
    from kvweave.app.weave import Weave
    from kvweave.serve.server import Server


@click.command("serve")
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),  # the resolver would take 70000 for 4464
    default=8321,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--kb-root",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of knowledge bases, one per subfolder, made on first upload.",
)
@click.option(
    "--kb",
    "folders",
    multiple=True,
    metavar="NAME=DIR",
    help="A knowledge base elsewhere; TENANT/NAME=DIR gives it to a tenant. Repeatable.",
)
@click.option("--embedder", default="minilm", show_default=True, help="Of new knowledge bases.")
@click.option("--encoding", help="Encoding context of chunk KV, such as isolated or filler:4.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Lines of key or key:tenant. KVWEAVE_API_KEYS does the same.",
)
@click.option(
    "--log-format",
    type=click.Choice(["human", "json"]),
    help="Log every request, as text or as JSON lines; warnings alone if left out.",
)
@limit_options
def command(
    model: str,
    device: str,
    dtype: str,
    quant: str,
    host: str,
    port: int,
    kb_root: Path | None,
    folders: tuple[str, ...],
    embedder: str,
    encoding: str | None,
    api_key_file: Path | None,
    log_format: str | None,
    open_kbs: int,
    host_gb: float,
    grace: float,
    lame: float,
    **numbers: float,
) -> None:
    """Serve an OpenAI-compatible API."""
    _need_extra()
    from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
    from kvweave.serve.auth import read_keys
    from kvweave.serve.observe.logs import configure_logs
    from kvweave.serve.server import Prepare, Server, ServerLifecycle

    keys, limits = read_keys(api_key_file), make_limits(numbers)
    named, host_bytes = parse_folders(folders), int(host_gb * (1 << 30))
    config = LibrariesConfig(kb_root, named, embedder, encoding, open_kbs, host_bytes)
    with _listen(host, port) as listener:  # before the model: a taken port should not cost a load
        weave = open_weave(model=model, device=device, dtype=dtype, quant=quant)
        libraries = Libraries(weave, config)
        # without knowledge bases nobody can ask for reuse, and nothing need be measured
        measuring = Prepare("measuring this machine for reuse 'auto', once", weave.measure)
        url = url_of(host, listener.getsockname()[1])
        configure_logs("json" if log_format == "json" else "human" if log_format else None)
        server = Server(
            weave,
            limits=limits,
            libraries=libraries,
            keys=keys,
            lifecycle=ServerLifecycle(
                prepare=measuring if kb_root is not None or named else None,
                on_ready=lambda: greet(weave, url, with_key=bool(keys)),
                lame_s=lame,
                patience_s=grace,
            ),
        )
        _run(server, weave, libraries, listener)


def _need_extra() -> None:
    wanted = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
    missing = [name for name in wanted if not _is_installed(name)]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not found; run: pip install 'kvweave[serve]'")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # blocked by an entry of None in sys.modules
        return False


def _listen(host: str, port: int) -> socket.socket:
    """Take the port now; clients that come while the model loads wait in the backlog."""
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


def _run(server: "Server", weave: "Weave", libraries: "Libraries", listener: socket.socket) -> None:
    # uvicorn stops in order and then passes the signal on, which must not end us before we close
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with closing(weave), closing(libraries):
        try:
            server.run([listener])
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
