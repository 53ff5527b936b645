"""`kvweave serve`: an OpenAI-compatible server over one model."""

import importlib.util
import json
import socket
from typing import TYPE_CHECKING

import click

from kvweave.cli.loading import model_options, open_weave
from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from kvweave.app import Weave


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
def command(model: str, device: str, dtype: str, quant: str, host: str, port: int) -> None:
    """Serve an OpenAI-compatible API."""
    _need_extra()
    with _listen(host, port) as listener:  # before the model: a taken port should not cost a load
        weave = open_weave(model=model, device=device, dtype=dtype, quant=quant)
        _run(weave, listener, host)


def _need_extra() -> None:
    missing = [name for name in ("fastapi", "uvicorn") if not _is_installed(name)]
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


def _run(weave: "Weave", listener: socket.socket, host: str) -> None:
    from kvweave.serve.server import Server

    url = _url(host, listener.getsockname()[1])
    server = Server(weave, on_ready=lambda: _greet(weave, url))
    try:
        server.run([listener])
    except KeyboardInterrupt:  # the server has shut down in order and now passes the signal on
        click.echo("stopped", err=True)


def _url(host: str, port: int) -> str:
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - everywhere, so also here
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _greet(weave: "Weave", url: str) -> None:
    """Say where the server is and what to type next."""
    from rich.console import Console

    hello = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    console = Console(highlight=False)

    def say(text: str = "", style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    say(f"kvweave serves {weave.model_name} at {url}/v1", "bold green")
    say("Ctrl-C stops it. Try it from another terminal:", "dim")
    say()
    say(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    say(f"    -d '{json.dumps(hello)}'")
    say()
    say("or from Python (pip install openai):", "dim")
    say()
    say("  from openai import OpenAI")
    say(f'  chat = OpenAI(base_url="{url}/v1", api_key="none").chat.completions')
    say('  hello = [{"role": "user", "content": "Say hello."}]')
    say(
        f"  print(chat.create(model={weave.model_name!r}, messages=hello, max_tokens=32)"
        ".choices[0].message.content)"
    )
    console.file.flush()
