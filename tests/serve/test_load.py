"""Clients that come in numbers, leave early or meet a failure. Steps are counted, not timed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvweave.errors import ConfigError
from kvweave.serve.access.limits import Limits
from kvweave.serve.server import ServerLifecycle
from worlds.serving import (
    FailingDecoder,
    GatedDecoder,
    health,
    make_weave,
    raw_request,
    serving,
    user,
    wait_for_health,
)

LONG: dict[str, Any] = {"messages": user("hello"), "max_tokens": 400, "temperature": 0}
STREAM = {**LONG, "stream": True}


class Gated:
    """A server of one worker and one place to wait, whose steps the test lets happen."""

    def __init__(self, folder: Path) -> None:
        self.decoders: list[GatedDecoder] = []
        self.weave = make_weave(folder, self._wrap)
        self.url = ""

    def _wrap(self, decoder: Any) -> GatedDecoder:
        self.decoders.append(GatedDecoder(decoder))
        return self.decoders[0]

    @property
    def steps(self) -> int:
        return self.decoders[0].steps

    def step(self, times: int = 1) -> None:
        self.decoders[0].permits.release(times)


@pytest.fixture
def gated(chat_model_folder: Path) -> Iterator[Gated]:
    world = Gated(chat_model_folder)
    with serving(world.weave, Limits(running=1, waiting=1)) as world.url:
        yield world
        world.step(10_000)  # whatever is left may run out


def test_a_client_that_leaves_a_stream_stops_the_work(gated: Gated) -> None:
    with raw_request(gated.url, STREAM) as connection:
        gated.step(3)
        while b'"content":"' not in connection.recv(65536).replace(b'"content":""', b""):
            pass
    wait_for_health(gated.url, lambda h: h["abandoned"] == 1, nudge=gated.step)
    assert gated.steps < 100, "the answer has 400 tokens to go; it should have stopped long before"
    assert health(gated.url)["running"] == 0


def test_a_client_that_leaves_before_its_reply_stops_the_work(gated: Gated) -> None:
    with raw_request(gated.url, LONG):
        gated.step()
        wait_for_health(gated.url, lambda h: h["running"] == 1)
    wait_for_health(gated.url, lambda h: h["abandoned"] == 1, nudge=gated.step)
    assert gated.steps < 100


def test_a_client_that_leaves_with_a_second_request_sent_stops_the_work(gated: Gated) -> None:
    with raw_request(gated.url, STREAM) as connection:
        wait_for_health(gated.url, lambda h: h["running"] == 1)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        health(gated.url)  # time for it to be read
        gated.step()
    wait_for_health(gated.url, lambda h: h["abandoned"] == 1, nudge=gated.step)
    assert gated.steps < 100


def test_a_client_that_leaves_the_queue_never_costs_a_step(gated: Gated) -> None:
    with raw_request(gated.url, LONG):
        wait_for_health(gated.url, lambda h: h["running"] == 1)
        with raw_request(gated.url, STREAM):
            wait_for_health(gated.url, lambda h: h["waiting"] == 1)
        seen = wait_for_health(gated.url, lambda h: h["waiting"] == 0)
        assert (seen["abandoned"], gated.steps) == (1, 0)


def test_a_full_house_is_a_429_that_says_when_to_come_back(gated: Gated) -> None:
    with raw_request(gated.url, LONG), raw_request(gated.url, LONG):
        wait_for_health(gated.url, lambda h: h["waiting"] == 1)
        with (
            OpenAI(base_url=f"{gated.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.RateLimitError, match="2 answers of at most 2 are run") as seen,
        ):
            client.chat.completions.create(model="tiny", messages=user("hi"))
        assert seen.value.response.headers["Retry-After"] == "1"
        # what can be refused without computing is refused, not queued
        bad = httpx.post(f"{gated.url}/v1/chat/completions", json={**LONG, "top_p": 2})
        assert bad.status_code == 400


def test_places_come_free_again(chat_model_folder: Path) -> None:
    with serving(make_weave(chat_model_folder), Limits(running=2, waiting=10)) as url:

        def ask(i: int) -> int:
            body = {**LONG, "max_tokens": 3, "stream": i % 2 == 0}
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code

        for _ in range(3):
            with ThreadPoolExecutor(12) as pool:
                assert set(pool.map(ask, range(12))) == {200}
        seen = wait_for_health(url, lambda h: h["running"] + h["waiting"] == 0)
        assert (seen["finished"], seen["failed"], seen["abandoned"]) == (36, 0, 0)


def test_a_server_that_stops_tells_the_clients_of_what_it_gives_up(
    chat_model_folder: Path,
) -> None:
    world = Gated(chat_model_folder)

    def step_once_the_door_is_closed(url: str) -> None:
        with suppress(httpx.HTTPError):
            while True:
                health(url)
        world.step(50)  # of the 800 that the answers would like

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        with serving(world.weave, lifecycle=ServerLifecycle(patience_s=0.0)) as url:
            stream = stack.enter_context(raw_request(url, STREAM))
            assert b"200 OK" in stream.recv(65536)
            post = f"{url}/v1/chat/completions"
            plain = pool.submit(httpx.post, post, json=LONG, timeout=60)
            wait_for_health(url, lambda h: h["running"] == 2)
            pool.submit(step_once_the_door_is_closed, url)
        rest = b"".join(iter(lambda: stream.recv(65536), b""))
        assert b'{"error":{"message":"the server stopped' in rest
        assert plain.result().status_code == 503
        assert plain.result().json()["error"]["type"] == "server_error"
    assert world.steps <= 50


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_reaches_the_client_without_its_details(
    chat_model_folder: Path, stream: bool
) -> None:
    with serving(make_weave(chat_model_folder, FailingDecoder)) as url:
        reply = httpx.post(
            f"{url}/v1/chat/completions", json={**LONG, "stream": stream}, timeout=60
        )
        assert "internal error" in reply.text
        assert "secret" not in reply.text
        if stream:
            assert reply.status_code == 200  # two tokens had gone out
            assert reply.text.rstrip().split("data: ")[-1].startswith('{"error":')
        else:
            assert reply.status_code == 500
            assert reply.json()["error"]["type"] == "server_error"
        assert health(url)["failed"] == 1
        again = httpx.post(f"{url}/v1/chat/completions", json={**LONG, "max_tokens": 2})
        assert again.status_code == 200


def test_the_client_library_raises_what_fails_in_a_stream(chat_model_folder: Path) -> None:
    with (
        serving(make_weave(chat_model_folder, FailingDecoder)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.create(
            model="tiny", messages=user("hi"), stream=True, temperature=0
        ) as stream,  # drawn answers may end before the third step
        pytest.raises(openai.APIError, match="internal error"),
    ):
        list(stream)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"Limits\.running must be at least 1"):
        Limits(running=0)
