"""`kvweave gateway`: the server's API over engines that run elsewhere."""

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvweave.cli import serve
from kvweave.cli.options import REMOTE_KEYS, config_options, pass_config
from kvweave.config import EffectiveConfig
from kvweave.serve.starting import StartAnswers

if TYPE_CHECKING:
    from kvweave.app.libraries.libraries import Libraries
    from kvweave.gateway.gateway import Gateway
    from kvweave.serve.server import Server

RUNNING_PER_UPSTREAM = 64  # answers under way, where nobody says how many
MOST_RUNNING = 512  # each is a thread that waits


@click.command("gateway")
@config_options(
    *("gateway.upstreams", "gateway.tokenizer", "gateway.key_file", "gateway.connector"),
    *("gateway.routing", "gateway.load_factor", "gateway.retries"),
)
@config_options(*REMOTE_KEYS, *serve.ADDRESS_KEYS)
@serve.kb_folders_option
@config_options("library.embedder", *serve.ANSWER_KEYS, *serve.END_KEYS)
@pass_config
def command(folders: tuple[str, ...], effective: EffectiveConfig) -> None:
    """Serve the same API over engines that run elsewhere.

    Knowledge bases, search and prompts are here; tokens come from the upstreams.
    """
    serve.need_extra()
    from kvweave.gateway.replica import read_key, read_upstreams

    at, upstreams = effective.config.server, read_upstreams(effective.config.gateway)
    read_key(effective.config.gateway)  # before anything is listened to
    with serve.listen(at.host, at.port) as listener, StartAnswers(listener) as start:
        serve.run_server(*make_server(folders, effective, len(upstreams), listener), start)


def make_server(
    folders: Sequence[str],
    effective: EffectiveConfig,
    num_upstreams: int,
    listener: socket.socket,
) -> "tuple[Server, Gateway, Libraries]":
    """Wait for an upstream and put the server together; the others are to be closed after it."""
    from kvweave.app.answer.settings import AnswerSettings
    from kvweave.app.libraries.libraries import Libraries
    from kvweave.app.library.library import embedder_opener
    from kvweave.app.library.store_tiers import remote_tiers
    from kvweave.gateway.gateway import Gateway
    from kvweave.serve.access.api_keys import read_keys
    from kvweave.serve.access.origins import AccessRules
    from kvweave.serve.observe.logs import configure_logs
    from kvweave.serve.observe.tracing import configure_tracing
    from kvweave.serve.server import Prepare, Server, ServerLifecycle, settle

    config, server_config = effective.config, effective.config.server
    keys = read_keys(server_config.api_key_file)
    if effective.sources["server.running"] == "default":
        running = min(MOST_RUNNING, RUNNING_PER_UPSTREAM * num_upstreams)
        server_config = replace(server_config, running=running)
    places = serve.make_places(config, folders)
    serve.warn_if_open(server_config.host, has_keys=bool(keys))
    configure_logs(server_config.log_format, server_config.log_level)
    configure_tracing()
    gateway = Gateway(
        config.gateway,
        tokenizer=config.gateway.tokenizer,
        settings=AnswerSettings.from_config(config),
        remotes=remote_tiers(config.store),
    )
    opener = embedder_opener(config.library)
    libraries = Libraries(gateway, places, open_embedder=opener)
    url = serve.url_of(server_config.host, listener.getsockname()[1])
    server = Server(
        gateway,
        limits=serve.make_limits(server_config),
        libraries=libraries,
        access=AccessRules(keys, serve.make_origins(server_config)),
        usual=serve.make_defaults(config),
        lifecycle=ServerLifecycle(
            prepare=[
                Prepare("opening the embedder and knowledge bases", libraries.open_ahead),
                Prepare("settling", settle),
            ],
            on_ready=lambda: serve.greet(
                gateway.model_name, gateway.words, url, places.root, with_key=bool(keys)
            ),
            lame_s=server_config.lame_s,
            patience_s=server_config.grace_s,
        ),
    )
    return server, gateway, libraries
