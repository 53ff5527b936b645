"""Connections that do nothing keep nobody out."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from kvweave.app.weave import Weave
from kvweave.model.decoder import Decoder
from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.access.connections import guard_connections
from kvweave.serve.access.errors import ApiError
from kvweave.serve.access.held import HeldRequest
from kvweave.serve.access.limits import Limits
from kvweave.serve.uploads.quotas import TenantQuotas
from worlds.serving import (
    GatedDecoder,
    make_libraries,
    make_weave,
    serving,
    user,
    wait_for_health,
)

NOTE = {"title": "x", "text": "A note."}


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def is_closed_within(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.fixture(scope="module")
def small(weave: Weave) -> Iterator[str]:
    with serving(weave, Limits(connections=8, header_s=1.0)) as url:
        yield url


@pytest.mark.parametrize("head", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"])
def test_half_a_head_is_not_waited_for(small: str, head: bytes) -> None:
    with connect(small) as connection:
        connection.sendall(head)
        assert is_closed_within(connection, 10.0)


def test_a_head_that_comes_letter_by_letter_is_not_waited_for(small: str) -> None:
    with connect(small) as connection:
        began_s = time.monotonic()
        try:
            for letter in b"GET /healthz HTTP/1.1\r\nHost: " + b"x" * 1000:
                connection.sendall(bytes([letter]))
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - began_s < 20.0


def test_a_second_head_is_not_waited_for_either(small: str) -> None:
    with connect(small) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = connection.recv(65536)
        while not reply.endswith(b"}"):  # its body may come by itself
            reply += connection.recv(65536)
        assert reply.startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /heal")
        assert is_closed_within(connection, 10.0)


def test_idle_connections_make_way(small: str) -> None:
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(connect(small)).sendall(b"GET / HT")
            reply = httpx.get(f"{small}/healthz", timeout=10)
            assert reply.status_code == 200


CHUNKED = b"POST /v1/kb HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"GET /", b"a" * 1000),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ", b"a" * 1000),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", b"X-Many: " + b"a" * 990 + b"\r\n"),
        (CHUNKED + b"0\r\n", b"X-Trailer: " + b"a" * 990 + b"\r\n"),
        (CHUNKED + b"1;", b"x=" + b"a" * 998),
    ],
    ids=["path", "header", "headers", "trailers", "extension"],
)
def test_a_head_without_end_is_cut_off(url: str, head: bytes, more: bytes) -> None:
    """Held in memory, it would take as much as comes within the time for a head."""
    with connect(url) as connection:
        connection.sendall(head)
        sent = 0
        try:
            while sent < 4 << 20:
                connection.sendall(more)
                sent += len(more)
        except OSError:
            pass
        assert sent < 4 << 20


def test_a_head_that_is_too_large_is_told_so(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (1 << 16))
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


BEGUN = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("before", [b"", BEGUN + b"\r\n"], ids=["first", "second"])
@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz?" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        BEGUN + b"X-Long: " + b"a" * 70_000 + b"\r\n\r\n",
        BEGUN + (b"X-Many: " + b"a" * 990 + b"\r\n") * 70 + b"\r\n",
        CHUNKED + b"0\r\n" + (b"X-Many: " + b"a" * 990 + b"\r\n") * 70 + b"\r\n",
    ],
    ids=["address", "header", "headers", "trailers"],
)
def test_a_head_that_is_too_large_is_refused_when_it_comes_in_one_read_too(
    before: bytes, head: bytes
) -> None:
    """The protocol is fed by hand: how much a socket gives at a time is the system's choice."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Answer nothing."""

    class Wire(asyncio.Transport):
        written, is_over = b"", False

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return default

        def write(self, data: Any) -> None:
            self.written += data

        def is_closing(self) -> bool:
            return self.is_over

        def close(self) -> None:
            self.is_over = True

        abort = close

    async def run() -> Wire:
        config = Config(app, lifespan="off")
        config.load()
        protocol = guard_connections(8, 30.0)(
            config=config, server_state=ServerState(), app_state={}
        )
        wire = Wire()
        protocol.connection_made(wire)
        protocol.data_received(before + head)
        return wire

    wire = asyncio.run(run())
    assert wire.is_over
    if not before and not head.startswith(CHUNKED):
        assert b"too large" in wire.written


def test_a_long_head_that_comes_in_one_read_is_refused_by_a_server(url: str) -> None:
    with connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        connection.sendall(BEGUN + (b"X-Many: " + b"a" * 990 + b"\r\n") * 70 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_two_requests_in_one_packet_get_two_replies(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        replies = b""
        while replies.count(b"HTTP/1.1 200") < 2 or not replies.endswith(b"}"):
            replies += connection.recv(65536)


@contextmanager
def half_an_upload(url: str, key: str) -> Iterator[None]:
    with connect(url) as connection:
        connection.sendall(
            b"POST /v1/kb/notes/documents HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
            b"\r\nContent-Length: 1000\r\nAuthorization: Bearer " + key.encode() + b"\r\n\r\n{"
        )
        yield


def test_uploads_that_stall_leave_room_for_other_tenants(weave: Weave, tmp_path: Path) -> None:
    libraries = make_libraries(weave, tmp_path)
    keys = parse_keys(["sk-stalling:slow", "sk-working:quick"])
    limits = Limits(tasks=2, waiting_tasks=10)
    with serving(weave, limits, libraries=libraries, keys=keys) as url, ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(half_an_upload(url, "sk-stalling"))
        place = f"{url}/v1/kb/notes/documents"
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:  # until all of them have their places
            own = {"Authorization": "Bearer sk-stalling"}
            if httpx.post(place, json=NOTE, headers=own, timeout=30).status_code == 429:
                break
        else:
            raise AssertionError("one tenant had all the places")
        others = {"Authorization": "Bearer sk-working"}
        reply = httpx.post(place, json=NOTE, headers=others, timeout=60)
        assert reply.status_code == 200, reply.text
    libraries.close()


def test_a_tenant_has_no_more_than_its_quota(weave: Weave, tmp_path: Path) -> None:
    libraries = make_libraries(weave, tmp_path)
    keys = parse_keys(["sk-tenant-1:one", "sk-tenant-2:two"])
    limits = Limits(tenant_kbs=1, tenant_bytes=1, tenant_answers=2)
    with serving(weave, limits, libraries=libraries, keys=keys) as url:
        one, two = ({"Authorization": f"Bearer sk-tenant-{i}"} for i in (1, 2))

        def upload(name: str, headers: dict[str, str]) -> httpx.Response:
            place = f"{url}/v1/kb/{name}/documents"
            return httpx.post(place, json=NOTE, headers=headers, timeout=60)

        assert upload("a", one).status_code == 200
        for name, words in (("b", "you may have 1 knowledge bases"), ("a", "your documents take")):
            refused = upload(name, one)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "quota_exceeded"
            assert words in refused.json()["error"]["message"]
        sample = httpx.post(f"{url}/v1/demo", headers=one, timeout=60)
        assert sample.status_code == 403, "the sample is an upload too"
        assert upload("a", two).status_code == 200, "a quota is each tenant's own"
        body = {"messages": user("hi"), "max_tokens": 1, "n": 3}
        many = httpx.post(f"{url}/v1/chat/completions", json=body, headers=one, timeout=60)
        assert many.status_code == 429
        assert "of at most 2" in many.json()["error"]["message"]
    libraries.close()


def test_uploads_at_once_do_not_pass_a_quota_together(weave: Weave, tmp_path: Path) -> None:
    """Each looked before any of them had made its knowledge base."""
    libraries = make_libraries(weave, tmp_path)
    keys = parse_keys(["sk-tenant-1:one"])
    with (
        serving(weave, Limits(tenant_kbs=2), libraries=libraries, keys=keys) as url,
        ThreadPoolExecutor(8) as pool,
    ):

        def upload(number: int) -> int:
            place = f"{url}/v1/kb/kb{number}/documents"
            own = {"Authorization": "Bearer sk-tenant-1"}
            return httpx.post(place, json=NOTE, headers=own, timeout=60).status_code

        assert sorted(pool.map(upload, range(8))) == [200] * 2 + [403] * 6
        assert len(libraries.folders.names("one")) == 2
        assert upload(9) == 403, "what is under way counts once"
    libraries.close()


def test_bytes_under_way_count_until_they_are_through(weave: Weave, tmp_path: Path) -> None:
    libraries = make_libraries(weave, tmp_path)
    quotas = TenantQuotas(Limits(tenant_bytes=1000), libraries)
    let_go = quotas.hold("one", "a", 1000)
    with pytest.raises(ApiError, match="uploads under way"):
        quotas.hold("one", "a", 10)
    quotas.hold("two", "a", 10)
    let_go()
    let_go()
    quotas.hold("one", "a", 10)()
    libraries.close()


def test_twelve_long_answers_of_one_tenant_leave_another_its_first_token(
    chat_model_folder: Path,
) -> None:
    """It waited until they had finished: 30 s."""
    gated: list[GatedDecoder] = []

    def wrap(decoder: Decoder) -> Decoder:
        gated.append(GatedDecoder(decoder))
        return gated[0]

    weave = make_weave(chat_model_folder, wrap)
    keys = parse_keys(["sk-tenant-1:one", "sk-tenant-2:two"])
    long = {"messages": user("hello"), "max_tokens": 100, "temperature": 0, "stop_loops": False}
    short = {"messages": user("hi"), "max_tokens": 1}
    with serving(weave, Limits(running=4, waiting=20), keys=keys) as url:
        place = f"{url}/v1/chat/completions"
        one, two = ({"Authorization": f"Bearer sk-tenant-{i}"} for i in (1, 2))
        with ThreadPoolExecutor(13) as clients:
            greedy = [
                clients.submit(httpx.post, place, json=long, headers=one, timeout=120)
                for _ in range(12)
            ]
            wait_for_health(url, lambda seen: seen["running"] + seen["waiting"] == 12)
            other = clients.submit(httpx.post, place, json=short, headers=two, timeout=120)
            wait_for_health(url, lambda seen: seen["running"] + seen["waiting"] == 13)
            while not other.done() and gated[0].steps < 500:
                gated[0].permits.release()
                time.sleep(0.02)
            steps = gated[0].steps
            gated[0].permits.release(100_000)
            assert other.result().status_code == 200
            assert {reply.result().status_code for reply in greedy} == {200}
    weave.close()
    assert steps < 40, "not after the first four, which take more than a hundred"


async def answer_or_wait(scope: Any, receive: Any, send: Any) -> None:
    """Refuse who has no key before a body is read; all others wait."""
    if (b"x-key", b"1") in scope["headers"]:
        await asyncio.sleep(60)
    head = {"status": 401, "headers": [(b"content-length", b"0")]}
    await send({"type": "http.response.start", **head})
    await send({"type": "http.response.body", "body": b""})


CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
WAITING = CHAT + b"X-Key: 1\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("is_together", [False, True], ids=["apart", "together"])
def test_a_request_is_given_away_without_bytes_of_the_one_before(is_together: bool) -> None:
    """What another process reads first would be a request there, whoever wrote it."""
    within = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    refused = CHAT + b"Content-Length: %d\r\n\r\n" % len(within)
    packets = [within + WAITING] if is_together else [within, WAITING]

    async def run() -> HeldRequest | None:
        loop = asyncio.get_running_loop()
        config = Config(answer_or_wait, lifespan="off")
        config.load()
        make = guard_connections(8, 30.0)
        protocol = make(config=config, server_state=ServerState(), app_state={})
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(lambda: protocol, theirs)
        with ours:
            ours.setblocking(False)
            await loop.sock_sendall(ours, refused)
            assert (await loop.sock_recv(ours, 4096)).startswith(b"HTTP/1.1 401")
            for packet in packets:
                protocol.data_received(packet)
                await asyncio.sleep(0.05)
            held: HeldRequest | None = protocol.let_go()
            return held

    held = asyncio.run(run())
    if is_together:
        assert held is None, "its bytes are not known apart"
    else:
        assert held is not None
        assert held.received == WAITING
        held.connection.close()
