"""A fleet on one machine: two real vLLMs with the connector, a Valkey that they share, a gateway.

A test begins with both replicas up and leaves them so.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from kvweave.demo import PASSAGES
from kvweave.gateway.replica import Replica, ReplicaHealth
from worlds.gateways import GatewayWorld, gateway_over
from worlds.servers import running_redis
from worlds.vllm_server import VllmServer, usable_cores

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

FLAGS = ("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16")
WAIT_S = 600.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "explain": True}
TEXTS = [path.read_text(encoding="utf-8").strip() for path in sorted(PASSAGES.glob("*.md"))]
REQUESTS, TOKENS = "vllm:kvweave_requests_total", "vllm:kvweave_tokens_total"
FIRST, SECOND = (0, 1, 2, 3, 4, 5), (3, 5, 0, 2, 4, 1)  # orders of the same passages


class Fleet:
    """Two replicas: the first encodes chunks in idle time, the second never does."""

    def __init__(self, folder: Path, model: Path, redis_port: int) -> None:
        self.redis = redis.Redis(port=redis_port)
        self._folder, self._model = folder, model
        self._url = f"redis://127.0.0.1:{redis_port}/0"
        self.servers: list[VllmServer] = []
        with ThreadPoolExecutor(2) as pool:
            self.servers = list(pool.map(self._start, range(2)))

    def restart(self, place: int) -> None:
        """One that was killed, where it was."""
        self.servers[place].close()
        self.servers[place] = self._start(place, self.servers[place].port)

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.redis.close()

    @property
    def num_chunks(self) -> int:
        """Chunk KV that the replicas share."""
        return int(self.redis.dbsize())

    def _start(self, place: int, port: int | None = None) -> VllmServer:
        name = "ab"[place]
        extra = {
            "redis_url": self._url,
            "disk_folder": str(self._folder / name / "kv"),
            "codec": "raw",
            "reuse": "weave",
            "making": ("idle", "never")[place],
        }
        cores = usable_cores()
        own = [cores[-1 - place % len(cores)]]
        return VllmServer(self._folder / name, self._model, extra, *FLAGS, cores=own, port=port)


@pytest.fixture(scope="module")
def fleet(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with running_redis(tmp_path_factory.mktemp("valkey")) as port:
        made = Fleet(folder, smollm2, port)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def front(fleet: Fleet, smollm2: Path, tmp_path: Path) -> Iterator[GatewayWorld]:
    """Requests take turns, so that a test knows where they go."""
    urls = [server.url for server in fleet.servers]
    how: dict[str, Any] = {"routing": "round_robin", "health_s": 3.0, "silence_s": 300.0}
    with gateway_over(urls, tmp_path, tokenizer=smollm2, **how) as world:
        wait_until(lambda: all(replica.is_open for replica in world.gateway.fleet.replicas))
        assert world.gateway.fleet.can_fuse(), "the connector did not answer the gateway's probe"
        yield world


def wait_until(is_so: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not become so"
        time.sleep(0.1)


def body(question: str, order: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": question}], **GREEDY, **fields}
    return {**asked, "documents": [TEXTS[place] for place in order]} if order else asked


def ask(front: GatewayWorld, question: str, order: tuple[int, ...] = (), **fields: Any) -> Any:
    url = f"{front.url}/v1/chat/completions"
    reply = httpx.post(url, json=body(question, order, **fields), timeout=WAIT_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask_at(front: GatewayWorld, server: VllmServer, question: str, order: tuple[int, ...]) -> str:
    """Asked through the gateway, in its turn, of this replica; what it says."""
    for _ in range(3):  # a short question without chunks takes the other's turn
        reply = ask(front, f"Say {time.monotonic_ns()}.", max_tokens=1)
        if reply["explain"]["upstream"]["upstream"] != server.url:
            break
    reply = ask(front, question, order)
    assert reply["explain"]["upstream"]["upstream"] == server.url
    assert reply["explain"]["upstream"]["attempts"] == 1
    return str(reply["choices"][0]["message"]["content"])


def ask_until_fused(front: GatewayWorld, server: VllmServer) -> tuple[str, str]:
    """A question whose prompt this replica fuses, and what it says to it. On a busy machine a look
    into the shared tier may come too late: then a prompt is computed."""
    until_s = time.monotonic() + WAIT_S
    for number in itertools.count():
        assert time.monotonic() < until_s, "nothing is fused"
        question, before = f"Where does railway {number} end?", server.counted(REQUESTS)
        said = ask_at(front, server, question, SECOND)
        # it is counted a step later
        wait_until(lambda before=before: server.counted(REQUESTS) > before)  # type: ignore[misc]
        if server.counted(REQUESTS, way="fused"):
            return question, said
    raise AssertionError("never reached")


def encode(fleet: Fleet, front: GatewayWorld) -> None:
    """Have the first replica encode the passages for their second order."""
    maker = fleet.servers[0]
    assert fleet.num_chunks == 0
    ask_at(front, maker, "Who keeps the bees?", FIRST)
    wait_until(lambda: fleet.num_chunks == len(FIRST))
    # another order: what stood in front goes behind, and what goes in front is encoded for that
    ask_at(front, maker, "Who built the bridge?", SECOND)
    wait_until(lambda: fleet.num_chunks == len(FIRST) + 2)


def test_a_chunk_encoded_on_one_replica_is_a_hit_on_the_other(
    fleet: Fleet, front: GatewayWorld
) -> None:
    maker, other = fleet.servers
    encode(fleet, front)
    num_chunks = fleet.num_chunks
    assert other.counted(TOKENS, state="reused") == 0
    question, there = ask_until_fused(front, other)
    assert other.counted(TOKENS, state="reused") > 300, "it has encoded nothing itself"
    assert fleet.num_chunks == num_chunks, "and nothing was encoded for it"

    before = maker.counted(REQUESTS, way="fused")
    assert ask_at(front, maker, question, SECOND) == there
    wait_until(lambda: maker.counted(REQUESTS, way="fused") == before + 1)  # and not exact


def test_a_replica_that_is_killed_in_mid_traffic_loses_no_answer_and_comes_back(
    fleet: Fleet, front: GatewayWorld
) -> None:
    """Answers that are not streamed go to the other one, a stream that has begun ends with an
    error, and what was stored is there when the replica is back."""
    if not fleet.num_chunks:  # this test runs alone
        encode(fleet, front)
    replicas = front.gateway.fleet.replicas
    begun = threading.Event()

    def stream() -> list[str]:
        asked = body("Tell a very long story of the valley.", stream=True, max_tokens=1500)
        lines: list[str] = []
        with httpx.stream(
            "POST", f"{front.url}/v1/chat/completions", json=asked, timeout=WAIT_S
        ) as reply:
            for line in reply.iter_lines():
                lines += [line] if line.startswith("data:") else []
                if len(lines) > 3:
                    begun.set()
        return lines

    def plain(number: int) -> str:
        said = ask(front, f"What is near the river, {number}?", (number % 8, 9), max_tokens=24)
        return str(said["explain"]["upstream"]["upstream"])

    with ThreadPoolExecutor(9) as pool:
        streamed = pool.submit(stream)
        assert begun.wait(WAIT_S)
        place = next(i for i, replica in enumerate(replicas) if replica.load)  # it has the stream
        victim, heir = replicas[place], replicas[1 - place]
        asked = [pool.submit(plain, number) for number in range(16)]
        wait_until(lambda: victim.load >= 3)
        fleet.servers[place].kill()
        answered_by = [each.result() for each in asked]  # none is lost: `ask` wants a 200
        lines = streamed.result()
    assert answered_by.count(heir.name) >= 3
    retried = front.gateway.fleet.metrics.value("upstream_retries_total", upstream=victim.name)
    assert retried >= 2

    last = json.loads(lines[-1].removeprefix("data:"))
    assert victim.name in last["error"]["message"]
    assert "ask again" in last["error"]["message"]
    assert "data: [DONE]" not in lines

    wait_until(lambda: victim.health is ReplicaHealth.DOWN)
    assert ask(front, "Who is left?")["explain"]["upstream"]["upstream"] == heir.name

    fleet.restart(place)
    wait_until(lambda: victim.is_open)
    assert is_asked_again(front, victim)
    ask_until_fused(front, fleet.servers[place])  # the chunks are still there


def is_asked_again(front: GatewayWorld, replica: Replica) -> bool:
    """Whether its turn comes."""
    replies = [ask(front, f"Say {number}.", max_tokens=1) for number in range(4)]
    return replica.name in [reply["explain"]["upstream"]["upstream"] for reply in replies]
