"""Bodies that never end, answers that take too long. Steps are counted where they can be."""

import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.engine.config import EngineConfig
from kvweave.model.load import load_decoder
from kvweave.serve.access.limits import Limits
from kvweave.text.tokenizer import Tokenizer
from worlds.serving import (
    GatedDecoder,
    health,
    make_weave,
    raw_request,
    serving,
    user,
    wait_for_health,
)
from worlds.weaves import plain_weave

LONG: dict[str, Any] = {"messages": user("hello"), "max_tokens": 400, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_given_up_with_a_504(
    chat_model_folder: Path, stream: bool
) -> None:
    decoders: list[GatedDecoder] = []

    def gate(decoder: Any) -> GatedDecoder:
        decoders.append(GatedDecoder(decoder))
        return decoders[0]

    with serving(make_weave(chat_model_folder, gate), Limits(request_s=0.3)) as url:
        decoders[0].permits.release(3)
        reply = httpx.post(
            f"{url}/v1/chat/completions", json={**LONG, "stream": stream}, timeout=30
        )
        if stream:
            assert reply.status_code == 200  # some tokens had gone out
            error = json.loads(reply.text.rstrip().split("data: ")[-1])["error"]
        else:
            assert reply.status_code == 504
            error = reply.json()["error"]
        assert "not finished within 0.3 s" in error["message"]
        assert error["code"] == "timeout"
        decoders[0].permits.release()  # the step that it was in
        seen = wait_for_health(url, lambda h: h["abandoned"] == 1)
        assert seen["running"] == 0
        assert decoders[0].steps <= 4
        decoders[0].permits.release(1000)


def test_a_body_that_stops_coming_is_a_408(chat_model_folder: Path) -> None:
    with serving(make_weave(chat_model_folder), Limits(body_s=0.2)) as url:
        host, port = url.removeprefix("http://").split(":")
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head.encode())
            got = connection.recv(65536)
            while b"\r\n\r\n" not in got or not got.rstrip().endswith(b"}"):
                more = connection.recv(65536)
                assert more, got
                got += more
        assert b" 408 " in got.split(b"\r\n")[0]
        assert b"nothing of the body came for 0.2 s" in got
        assert health(url)["running"] == 0


def test_a_body_that_trickles_for_ever_is_a_408(chat_model_folder: Path) -> None:
    """It never stalls for long, and would keep its place for as long as it likes."""
    limits = Limits(body_s=0.3, body_rate=1000)
    with serving(make_weave(chat_model_folder), limits) as url:
        host, port = url.removeprefix("http://").split(":")
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
        with socket.create_connection((host, int(port)), timeout=0.05) as connection:
            connection.sendall(head.encode())
            got, until_s = b"", time.monotonic() + 30
            while b"bytes a second" not in got:
                assert time.monotonic() < until_s, got
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(b" ")
                with suppress(TimeoutError):
                    got += connection.recv(65536)
        assert b" 408 " in got.split(b"\r\n")[0]


def test_a_slow_answer_is_not_mistaken_for_a_slow_body(chat_model_folder: Path) -> None:
    decoders: list[GatedDecoder] = []

    def gate(decoder: Any) -> GatedDecoder:
        decoders.append(GatedDecoder(decoder))
        return decoders[0]

    with (
        serving(make_weave(chat_model_folder, gate), Limits(body_s=0.1)) as url,
        httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**LONG, "stream": True}, timeout=30
        ) as reply,
    ):
        time.sleep(0.3)
        decoders[0].permits.release(1000)
        assert "[DONE]" in reply.read().decode()


@pytest.mark.parametrize("where", ["waiting for its turn", "in the middle of its prompt"])
def test_a_client_that_leaves_before_the_first_token_stops_the_work_at_the_next_step(
    chat_model_folder: Path, where: str
) -> None:
    decoder = GatedDecoder(load_decoder(chat_model_folder, device="cpu"))
    engine = EngineConfig(max_running=1, alone_rows=16, step_rows=16)
    weave = plain_weave(decoder, Tokenizer(chat_model_folder), engine)
    long = {**LONG, "messages": user("a word and another " * 12)}  # a dozen steps
    with serving(weave) as url, raw_request(url, long) as first:
        wait_for_health(url, lambda h: h["running"] == 1)
        decoder.permits.release(1)
        if where == "waiting for its turn":
            with raw_request(url, LONG):
                wait_for_health(url, lambda h: h["running"] == 2)
        else:
            first.close()
        time.sleep(0.3)  # the server hears of it while the engine is in a step
        decoder.permits.release(1)
        seen = wait_for_health(url, lambda h: h["abandoned"] == 1)
        assert decoder.steps <= 3
        assert seen["finished"] == 0
        first.close()
        decoder.permits.release(1000)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_pool_cannot_hold_is_a_400_also_for_a_stream(
    chat_model_folder: Path, stream: bool
) -> None:
    decoder, engine = load_decoder(chat_model_folder, device="cpu"), EngineConfig(pool_tokens=64)
    weave = plain_weave(decoder, Tokenizer(chat_model_folder), engine)
    with serving(weave) as url:
        body = {**LONG, "messages": user("a word " * 30), "stream": stream}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    assert reply.status_code == 400
    assert "the KV pool holds 64" in reply.json()["error"]["message"]
