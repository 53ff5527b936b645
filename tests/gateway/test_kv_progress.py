"""What a gateway says of the chunk KV of its knowledge bases."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.library.kv_progress import NEVER, NOT_OPEN
from kvweave.gateway.cards import UpstreamCard
from kvweave.gateway.kv_progress import AS_TEXT, HOW, NONE_FUSES, NONE_KEPT, NOT_SHARED
from worlds.gateways import GatewayWorld, gateway_over
from worlds.serving import KbServer


def progress(world: GatewayWorld | KbServer, name: str) -> tuple[str, str]:
    kv = httpx.get(f"{world.url}/v1/kb/{name}", timeout=60).json()["kv"]
    return kv["state"], kv["why"]


def upload(world: GatewayWorld | KbServer, name: str) -> None:
    note = {"title": "n", "text": "To drain a node, cordon it first."}
    where = f"{world.url}/v1/kb/{name}/documents"
    assert httpx.post(where, json=note, timeout=60).status_code == 200


def test_a_knowledge_base_says_who_makes_its_kv_open_or_not(
    engine: KbServer, front: GatewayWorld, chat_model_folder: Path, tmp_path: Path
) -> None:
    upload(front, "told")
    assert progress(front, "told") == ("on_demand", HOW)
    with gateway_over([engine.url], tmp_path, tokenizer=chat_model_folder) as world:
        upload(world, "told")
    with gateway_over([engine.url], tmp_path, tokenizer=chat_model_folder) as world:
        assert progress(world, "told") == ("on_demand", HOW), "it is not open"


def test_prompts_that_go_as_text_are_the_reason(engine: KbServer, tmp_path: Path) -> None:
    with gateway_over([engine.url], tmp_path, tokenizer=None) as world:
        upload(world, "text")
        assert progress(world, "text") == ("off", AS_TEXT)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_tiers": ("host", "redis")}, ("on_demand", HOW)),
        ({"kv_tiers": ("host",)}, ("on_demand", NOT_SHARED)),
        ({"kv_tiers": ()}, ("off", NONE_KEPT)),
        ({"kv_tiers": None}, ("on_demand", HOW)),
        ({"fuses": False}, ("off", NONE_FUSES)),
    ],
)
def test_what_upstreams_say_of_themselves_is_the_reason(
    engine: KbServer,
    chat_model_folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    said: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards: list[UpstreamCard] = []

    def read_changed(*how: Any) -> UpstreamCard:
        cards.append(replace(read_card(*how), **changes))
        return cards[-1]

    from kvweave.gateway.fleet import read_card

    monkeypatch.setattr("kvweave.gateway.fleet.read_card", read_changed)
    urls = [engine.url, engine.url.replace("127.0.0.1", "localhost")]
    with gateway_over(urls, tmp_path, tokenizer=chat_model_folder) as world:
        upload(world, "said")
        assert progress(world, "said") == said
    assert cards


def test_a_server_that_makes_none_names_the_setting(engine: KbServer) -> None:
    upload(engine, "plain")
    assert progress(engine, "plain") == ("off", NEVER)
    assert "kvweave ingest" in NOT_OPEN
