"""Replicas that die, hang, refuse and come back: real engines, some behind a faulty front."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.answer.notes import AnswerNotes
from kvweave.errors import UpstreamError
from kvweave.gateway.answer import RoutedAnswer
from kvweave.gateway.bodies import UpstreamRequest
from kvweave.gateway.gateway import Gateway
from kvweave.gateway.guesses import PrefillGuess
from kvweave.gateway.prompts import plain_text
from kvweave.gateway.replica import ReplicaHealth
from kvweave.serve.access.api_keys import parse_keys
from worlds.gateways import QUICK, FaultyUpstream, GatewayWorld, engine_process, gateway_over
from worlds.serving import KbServer, serving, user

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def ask(url: str, question: str, **fields: Any) -> httpx.Response:
    body = {"messages": user(question), **GREEDY, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


@contextmanager
def faulty(engine: KbServer) -> Iterator[FaultyUpstream]:
    made = FaultyUpstream(engine.url)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def broken_and_sound(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> Iterator[tuple[FaultyUpstream, GatewayWorld]]:
    """Two replicas, of which the first can be made to fail; requests take turns."""
    with (
        faulty(engine) as broken,
        faulty(engine) as sound,
        gateway_over(
            [broken.url, sound.url],
            tmp_path,
            tokenizer=chat_model_folder,
            routing="round_robin",
            breaker_failures=3,
        ) as world,
    ):
        wait_until(lambda: all(r.health is ReplicaHealth.UP for r in world.gateway.fleet.replicas))
        yield broken, world


def wait_until(is_so: Any, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not become so"
        time.sleep(0.02)


def counted(world: GatewayWorld, name: str, **labels: str) -> float:
    return world.gateway.fleet.metrics.value(name, **labels)


@pytest.mark.parametrize("fault", ["drop", "cut", "status"])
def test_a_replica_that_fails_costs_no_answer(
    broken_and_sound: tuple[FaultyUpstream, GatewayWorld], fault: str
) -> None:
    broken, world = broken_and_sound
    broken.fault, broken.cut_bytes = fault, 400  # "cut": in the middle of the stream
    replies = [ask(world.url, f"Say {number}.") for number in range(8)]
    assert [reply.status_code for reply in replies] == [200] * 8
    assert counted(world, "upstream_retries_total", upstream=broken.url) >= 3


def test_a_replica_that_failed_often_rests(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> None:
    with (
        faulty(engine) as broken,
        faulty(engine) as sound,
        gateway_over(
            [broken.url, sound.url],
            tmp_path,
            tokenizer=chat_model_folder,
            routing="round_robin",
            breaker_failures=3,
            breaker_rest_s=3600.0,
        ) as world,
    ):
        wait_until(lambda: all(r.health is ReplicaHealth.UP for r in world.gateway.fleet.replicas))
        broken.fault = "status"
        while not world.gateway.fleet.replicas[0].breaker.is_open:
            assert ask(world.url, "Say it.").status_code == 200
        broken.fault = None
        for _ in range(4):
            assert ask(world.url, "Say it.").status_code == 200
        assert broken.posts == 3, "although it is well again"
        page = httpx.get(f"{world.url}/metrics", timeout=60).text
        assert f'kvweave_upstream_resting{{upstream="{broken.url}"}} 1.0' in page


def test_a_replica_that_has_rested_and_is_well_gets_requests_again(
    broken_and_sound: tuple[FaultyUpstream, GatewayWorld],
) -> None:
    broken, world = broken_and_sound
    breaker = world.gateway.fleet.replicas[0].breaker
    broken.fault = "status"
    while not breaker.is_open:
        assert ask(world.url, "Say it.").status_code == 200
    broken.fault = None

    def is_back() -> bool:
        ask(world.url, "Say it.")
        done = {"upstream": broken.url, "outcome": "answered"}
        return counted(world, "upstream_requests_total", **done) > 0

    wait_until(is_back, 60)
    assert not breaker.is_open


def test_retries_end_with_their_budget(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> None:
    with (
        faulty(engine) as one,
        faulty(engine) as other,
        gateway_over(
            [one.url, other.url],
            tmp_path,
            tokenizer=chat_model_folder,
            retries=3,
            retry_share=0.0,
            retry_reserve=2,
            breaker_failures=1000,
        ) as world,
    ):
        wait_until(lambda: all(r.health is ReplicaHealth.UP for r in world.gateway.fleet.replicas))
        one.fault = other.fault = "status"
        began_s = time.monotonic()
        replies = [ask(world.url, f"Say {number}.") for number in range(6)]
        taken_s = time.monotonic() - began_s
        assert {reply.status_code for reply in replies} == {503}
        assert "budget of retries" in replies[-1].json()["error"]["message"]
        most = 2 + 2 * taken_s / 10 + 1  # the reserve, and what came back of it meanwhile
        assert one.posts + other.posts <= 6 + most
        one.fault = other.fault = None
        assert ask(world.url, "Say it.").status_code == 200


def test_a_stream_that_was_begun_ends_with_an_error_and_is_not_begun_again(
    broken_and_sound: tuple[FaultyUpstream, GatewayWorld],
) -> None:
    broken, world = broken_and_sound
    broken.fault, broken.cut_bytes = "cut", 700
    ends = []
    for number in range(2):  # one of them goes to the broken one
        body = {"messages": user(f"Say {number}."), "stream": True, **GREEDY, "max_tokens": 64}
        where = f"{world.url}/v1/chat/completions"
        with httpx.stream("POST", where, json=body, timeout=60) as reply:
            lines = [line for line in reply.iter_lines() if line]
        ends.append("error" if '"error"' in lines[-1] else lines[-1])
    assert sorted(ends) == ["data: [DONE]", "error"]


def test_a_replica_that_freezes_is_left_and_its_requests_go_elsewhere(
    broken_and_sound: tuple[FaultyUpstream, GatewayWorld],
) -> None:
    broken, world = broken_and_sound
    broken.fault = "freeze"
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda n: ask(world.url, f"Say {n}."), range(4)))
    assert [reply.status_code for reply in replies] == [200] * 4
    assert world.gateway.fleet.replicas[0].health is ReplicaHealth.DOWN


def test_a_replica_that_refuses_work_is_draining_and_none_is_sent(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> None:
    with (
        faulty(engine) as front,
        gateway_over([front.url], tmp_path, tokenizer=chat_model_folder, wait_s=0.5) as world,
    ):
        replica = world.gateway.fleet.replicas[0]
        wait_until(lambda: replica.health is ReplicaHealth.UP)
        front.fault = "unready"
        wait_until(lambda: replica.health is ReplicaHealth.DRAINING)
        reply = ask(world.url, "Say it.")
        assert reply.status_code == 503
        assert "is draining" in reply.json()["error"]["message"]
        front.fault = None
        wait_until(lambda: replica.health is ReplicaHealth.UP)
        assert ask(world.url, "Say it.").status_code == 200


def test_the_page_starts_where_no_upstream_reuses_chunk_kv(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> None:
    with (
        faulty(engine) as only,
        gateway_over([only.url], tmp_path, tokenizer=chat_model_folder, wait_s=0.2) as world,
    ):
        told = httpx.get(f"{world.url}/v1/info", timeout=60).json()
        assert (told["engine"], told["kept_answers"]) == (False, 0)
        assert [each["name"] for each in told["dial"]] == ["exact", "auto", "fast", "fastest"]
        only.close()
        wait_until(lambda: world.gateway.fleet.replicas[0].health is ReplicaHealth.DOWN)
        reply = httpx.get(f"{world.url}/v1/info", timeout=60)
        assert reply.status_code == 200, reply.text
        assert [each["name"] for each in reply.json()["dial"]] == ["exact", "auto"]
        assert "reuse" not in [each["name"] for each in reply.json()["strategies"]]
        refused = ask(world.url, "Why?", documents=["a text"], reuse="reuse")
        assert refused.status_code == 400
        assert "no upstream reuses it" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_killing_a_replica_in_mid_traffic_loses_no_accepted_request(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        engines = []
        for name in "ab":
            (tmp_path / name).mkdir()
            engines.append(stack.enter_context(engine_process(chat_model_folder, tmp_path / name)))
        world = stack.enter_context(
            gateway_over(
                [url for _, url in engines],
                tmp_path / "kbs",
                tokenizer=chat_model_folder,
                breaker_failures=1000,  # so that what is lost shows
            )
        )
        replicas = world.gateway.fleet.replicas
        wait_until(lambda: all(r.health is ReplicaHealth.UP for r in replicas))
        victim, victims_url = engines[0]
        asked = threading.Semaphore(0)

        def traffic(number: int) -> int:
            asked.release()
            return ask(world.url, f"Tell me of pod {number}.", max_tokens=48).status_code

        with ThreadPoolExecutor(12) as pool:
            futures = [pool.submit(traffic, number) for number in range(40)]
            for _ in range(14):
                asked.acquire()
            wait_until(lambda: replicas[0].load > 0)
            victim.send_signal(signal.SIGKILL)
            statuses = [future.result() for future in futures]
        assert statuses == [200] * 40
        assert counted(world, "upstream_requests_total", upstream=victims_url) > 0
        assert counted(world, "upstream_retries_total", upstream=victims_url) > 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"no json",
        b"[1]",
        b'{"choices": ["text"]}',
        b'{"choices": [{"delta": "text"}]}',
        b'{"choices": [{"text": "a", "logprobs": {"content": [{"logprob": "x"}]}}]}',
        b'{"usage": {"prompt_tokens_details": 3}, "choices": []}',
        b'{"kv_transfer_params": [1], "choices": []}',
    ],
)
def test_events_that_cannot_be_read_are_a_502_that_names_the_upstream(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path, garbage: bytes
) -> None:
    with (
        faulty(engine) as only,
        gateway_over([only.url], tmp_path, tokenizer=chat_model_folder) as world,
    ):
        only.fault, only.garbage = "garble", garbage
        reply = ask(world.url, "Say it.")
        assert reply.status_code == 502, reply.text
        message = reply.json()["error"]["message"]
        assert message.startswith(f"{only.url} sent an event")
        assert "\n" not in message
        only.fault = None
        wait_until(lambda: ask(world.url, "Say it.").status_code == 200)


@pytest.mark.parametrize(
    ("garbage", "silence_s", "said"),
    [
        (b": still here\n\n", 1.0, "says nothing"),
        (b"data: {}\n\n", 1.0, "says nothing"),
        (b"data: " + b"x" * (1 << 20), 300.0, "sent a line of more than"),
        (b'data: {"a": ' + b"[" * 100_000 + b"\n\n", 300.0, "an event that is no JSON object"),
    ],
    ids=["comments", "empty events", "an event without end", "a deep event"],
)
def test_a_replica_that_talks_without_saying_anything_holds_nobody(
    engine: KbServer,
    chat_model_folder: Path,
    tmp_path: Path,
    garbage: bytes,
    silence_s: float,
    said: str,
) -> None:
    with (
        faulty(engine) as only,
        gateway_over(
            [only.url], tmp_path, tokenizer=chat_model_folder, silence_s=silence_s
        ) as world,
    ):
        only.fault, only.garbage = "chatter", garbage
        reply = ask(world.url, "Say it.")
        assert reply.status_code in (502, 503), reply.text
        assert said in reply.json()["error"]["message"]
        only.fault = None
        wait_until(lambda: ask(world.url, "Say it.").status_code == 200)


def test_an_answer_does_not_wait_for_what_a_replica_says_behind_its_end(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> None:
    with (
        faulty(engine) as only,
        gateway_over([only.url], tmp_path, tokenizer=chat_model_folder) as world,
    ):
        event = b'data: {"choices": [{"delta": {"content": "It."}, "finish_reason": "stop"}]}'
        only.fault, only.garbage = "chatter", event + b"\n\ndata: [DONE]\n\n"
        reply = ask(world.url, "Say it.")
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "It."


def test_a_gateway_is_not_ready_while_no_upstream_is(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> None:
    with (
        faulty(engine) as only,
        gateway_over([only.url], tmp_path, tokenizer=chat_model_folder, wait_s=0.2) as world,
    ):

        def status() -> int:
            return httpx.get(f"{world.url}/readyz", timeout=60).status_code

        wait_until(lambda: status() == 200)
        only.fault = "freeze"
        wait_until(lambda: status() == 503)
        told = httpx.get(f"{world.url}/readyz", timeout=60)
        assert "none of 1 upstreams takes requests" in told.json()["error"]["message"]
        assert only.url not in told.text, "it is not told to whoever asks"
        assert httpx.get(f"{world.url}/healthz", timeout=60).status_code == 200
        reply = ask(world.url, "Say it.")
        assert reply.status_code == 503
        assert f"{only.url} is down (says nothing)" in reply.json()["error"]["message"]
        only.fault = None
        wait_until(lambda: status() == 200)


def test_why_an_upstream_is_not_used_is_said(
    engine: KbServer,
    chat_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server without keys goes by no name with a dot; one with keys wants one of them."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda host, *rest, **more: resolve(
            "127.0.0.1" if host == "engine.example.org" else host, *rest, **more
        ),
    )
    port = engine.url.rpartition(":")[2]
    named = replace(QUICK, upstreams=(f"http://engine.example.org:{port}",))
    with pytest.raises(UpstreamError, match=r"does not go by the name.*server\.allowed_hosts"):
        Gateway(named, tokenizer=str(chat_model_folder), first_card_s=0.5)
    keys = parse_keys(["sk-one-long:one"])
    with serving(engine.weave, keys=keys) as url:
        locked = replace(QUICK, upstreams=(url,))
        with pytest.raises(UpstreamError, match=r"refuses the gateway's key; set gateway\.key_fil"):
            Gateway(locked, tokenizer=str(chat_model_folder), first_card_s=0.5)


def test_an_answer_that_waits_for_its_guess_hears_that_nobody_wants_it(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> None:
    with (
        faulty(engine) as only,
        gateway_over([only.url], tmp_path, tokenizer=chat_model_folder) as world,
        ThreadPoolExecutor(2) as pool,
    ):
        only.fault = "stall"
        fleet, replica = world.gateway.fleet, world.gateway.fleet.replicas[0]
        request = UpstreamRequest(plain_text("Say it.", b""), world.gateway.sampling())
        guess = PrefillGuess(fleet, request, pool)
        answer = RoutedAnswer(fleet, request, AnswerNotes(time.perf_counter()), guess=guess)
        pieces = pool.submit(lambda: list(answer))
        wait_until(lambda: only.posts == 1)
        assert not pieces.done()
        answer.abort()
        assert pieces.result(timeout=10) == []
        wait_until(lambda: replica.load == 0, 10)
        assert only.posts == 1, "nothing else was asked for"


def test_an_answer_that_waits_for_a_replica_hears_that_nobody_wants_it(
    engine: KbServer, chat_model_folder: Path, tmp_path: Path
) -> None:
    with (
        faulty(engine) as only,
        gateway_over([only.url], tmp_path, tokenizer=chat_model_folder, wait_s=60) as world,
        ThreadPoolExecutor(1) as pool,
    ):
        only.fault = "unready"
        wait_until(lambda: not world.gateway.fleet.replicas[0].is_open)
        answer = world.gateway.chat(user("Say it."))
        pieces = pool.submit(lambda: list(answer))
        time.sleep(0.3)
        assert not pieces.done()
        answer.abort()
        assert pieces.result(timeout=10) == []
