"""`kv_transfer_params`: a gateway names the chunks of a prompt of token ids."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.weave import Weave
from worlds.serving import make_weave, serving, user
from worlds.tiny_corpus import make_text
from worlds.tiny_models import make_chat_model_folder

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


def complete(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**GREEDY, **fields}, timeout=120)


def spanned(weave: Weave, seed: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt over two documents, and where they stand."""
    ids, spans = spans_of(weave, [make_text(20, seed), make_text(20, seed + 1)])
    return ids, {"chunks": spans}


def spans_of(weave: Weave, documents: list[str]) -> tuple[list[int], list[list[int]]]:
    prompt = weave.build_prompt("What is it?", documents)
    at, spans = len(prompt.preamble), []
    for chunk in prompt.chunks:
        spans.append([at, at + len(chunk)])
        at += len(chunk)
    return prompt.token_ids, spans


def test_chunks_of_a_gateway_are_found_again_in_any_order(url: str, weave: Weave) -> None:
    ids, transfer = spanned(weave, 100)
    first = complete(url, prompt=ids, kv_transfer_params={"kvweave": transfer}).json()
    told = first["kv_transfer_params"]["kvweave"]
    assert told["exact"] + told["reused"] + told["recomputed"] + told["computed"] == len(ids)
    again = complete(url, prompt=ids, kv_transfer_params={"kvweave": transfer}).json()
    end = transfer["chunks"][-1][1]
    assert again["kv_transfer_params"]["kvweave"]["exact"] >= end, "up to the question"
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_named_strategy_reuses_chunks_that_came_before(tmp_path: Path) -> None:
    # a context with room for the filler that chunk KV is computed behind
    folder = make_chat_model_folder(tmp_path, max_position_embeddings=4096)
    with make_weave(folder) as weave, serving(weave) as url:
        ids, transfer = spanned(weave, 200)
        for _ in range(3):  # chunks that come back get their KV stored
            complete(url, prompt=ids, kv_transfer_params={"kvweave": transfer})
        give_up_s, number = time.monotonic() + 60, 0
        while True:  # each time behind another document, so that nothing of it is exact
            number += 1
            documents = [make_text(8, 1000 + number), make_text(20, 201), make_text(20, 200)]
            moved, spans = spans_of(weave, documents)
            named = {"chunks": spans, "reuse": "reuse"}
            reply = complete(url, prompt=moved, kv_transfer_params={"kvweave": named}).json()
            told = reply["kv_transfer_params"]["kvweave"]
            if told["reused"]:
                break
            assert time.monotonic() < give_up_s, told
            time.sleep(0.05)  # it is stored in idle time
        assert (told["way"], told["strategy"]) == ("fused", "reuse")
        other = {"kvweave": {**named, "tenant": "another"}}
        reply = complete(url, prompt=moved, kv_transfer_params=other).json()
        told = reply["kv_transfer_params"]["kvweave"]
        assert told["reused"] == 0, "tenants of a gateway share nothing"


def test_a_stream_tells_it_at_its_end(url: str, weave: Weave) -> None:
    ids, transfer = spanned(weave, 300)
    body = {"prompt": ids, "stream": True, "kv_transfer_params": {"kvweave": transfer}, **GREEDY}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"kv_transfer_params":{"kvweave":{"way":"exact"' in lines[-2]


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        ({"chunks": [[5, 3]]}, "half-open"),
        ({"chunks": [[0, 3]]}, "in front of them"),
        ({"chunks": [[1, 2]], "reuse": "magic"}, "unknown"),
        ({"chunks": [[2, 3]], "preamble": 3}, "in front of them"),
        ({"chunks": [[1, 2]], "asked": [1, 3]}, "does not stand behind"),
        ({"chunks": [[1, 2, 3]]}, "chunks.0"),
        ({"colour": "red"}, "not supported"),
    ],
)
def test_what_cannot_be_meant_is_refused(url: str, transfer: dict[str, Any], words: str) -> None:
    reply = complete(url, prompt=[5, 6, 7, 8], kv_transfer_params={"kvweave": transfer})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_spans_need_token_ids_and_no_chat(url: str) -> None:
    transfer = {"kvweave": {"chunks": [[1, 2]]}}
    reply = complete(url, prompt="some text", kv_transfer_params=transfer)
    assert "send the prompt as ids" in reply.json()["error"]["message"]
    body = {"messages": user("Hi"), "kv_transfer_params": transfer}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert "/v1/completions" in reply.json()["error"]["message"]


def test_the_card_of_a_server_says_that_it_takes_them(url: str) -> None:
    card = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]
    assert card["kv_transfer"] is True
