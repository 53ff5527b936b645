"""Answers that wait for others: where their time went, and what they are at meanwhile."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from worlds.serving import GatedDecoder, make_weave, serving, user

PARTS = ("waiting", "searching", "loading", "computing", "answering")
HELD_S = 0.6


class Queued:
    """A server whose steps the test lets happen."""

    def __init__(self, folder: Path) -> None:
        self.gates: list[GatedDecoder] = []
        self.weave = make_weave(folder, self._wrap)
        self.url = ""

    def _wrap(self, decoder: Any) -> GatedDecoder:
        self.gates.append(GatedDecoder(decoder))
        return self.gates[0]

    def let(self, num_steps: int) -> None:
        self.gates[0].permits.release(num_steps)

    def lines(self, question: str) -> Iterator[str]:
        """Lines of a streamed answer."""
        body = {"messages": user(question), "explain": True, "stream": True, "max_tokens": 3}
        with httpx.stream(
            "POST", f"{self.url}/v1/chat/completions", json=body, timeout=60
        ) as reply:
            assert reply.status_code == 200
            yield from filter(None, reply.iter_lines())

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline_s, "it did not come to that"
            time.sleep(0.01)

    def wait_for_prompts(self, count: int) -> None:
        self.wait_for(lambda: self.weave.engine.pending_prefills() == count)


@pytest.fixture
def queued(chat_model_folder: Path) -> Iterator[Queued]:
    world = Queued(chat_model_folder)
    with serving(world.weave) as world.url:
        yield world
        world.let(10_000)
    world.weave.close()


def explained(lines: list[str]) -> dict[str, Any]:
    events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    (explain,) = [event["explain"] for event in events if event.get("explain")]
    return dict(explain)


def test_time_in_a_queue_is_waiting_and_no_computing(queued: Queued) -> None:
    """One prompt is held in its step, then two that came meanwhile are held in a common one."""
    with ThreadPoolExecutor(3) as clients:
        begun_s = time.perf_counter()
        asked: list[Future[list[str]]] = []
        for number in range(3):
            asked.append(clients.submit(lambda n=number: list(queued.lines(f"number {n}?"))))
            queued.wait_for_prompts(number + 1)
        time.sleep(HELD_S)
        queued.let(1)
        queued.wait_for(lambda: queued.gates[0].steps == 1)
        time.sleep(HELD_S)
        queued.let(10_000)
        times = [explained(each.result())["timeline_ms"] for each in asked]
        took_ms = (time.perf_counter() - begun_s) * 1e3
    for each in times:
        whole_ms = each["queue"] + each["total"]
        assert sum(each[part] for part in PARTS) == pytest.approx(whole_ms, abs=0.01)
        first_ms = each["queue"] + each["first_token"]
        assert first_ms - 0.01 <= whole_ms - each["answering"] <= first_ms + 0.01
    first, *others = times
    assert first["waiting"] < first["computing"]
    for each in others:
        assert each["waiting"] >= HELD_S * 1e3 * 0.9, "it stood in the queue so long"
    # what others' rows took in a common step is theirs: nothing is counted twice
    computed_ms = sum(each["computing"] + each["loading"] for each in times)
    assert 2 * HELD_S * 1e3 * 0.9 <= computed_ms <= took_ms


def test_a_silent_stream_says_what_it_waits_for(queued: Queued) -> None:
    heard: dict[str, list[str]] = {"first": [], "second": []}

    def listen(name: str) -> None:
        for line in queued.lines(f"the {name} one?"):
            heard[name].append(line)

    threads = [threading.Thread(target=listen, args=(name,)) for name in heard]
    for number, thread in enumerate(threads, 1):
        thread.start()
        queued.wait_for_prompts(number)
    reading = ': {"name":"reading","others":0}'
    queued.wait_for(lambda: ': {"name":"waiting","others":1}' in heard["second"])
    queued.wait_for(lambda: reading in heard["first"])
    queued.let(1)
    queued.wait_for(lambda: reading in heard["second"])
    queued.let(10_000)
    for thread in threads:
        thread.join(60)
    for lines in heard.values():
        assert lines[-1] == "data: [DONE]"
        said = [line for line in lines if line.startswith(":")]
        assert said == list(dict.fromkeys(said)), "only what is new"


def test_clients_pass_over_what_a_silent_stream_says(queued: Queued) -> None:
    with OpenAI(base_url=f"{queued.url}/v1", api_key="none") as client:
        timer = threading.Timer(2 * HELD_S, queued.let, (10_000,))
        timer.start()
        greedy: dict[str, Any] = {"messages": user("hello"), "max_tokens": 4, "temperature": 0}
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(model="tiny", stream=True, **greedy)
        ]
        whole = client.chat.completions.create(model="tiny", **greedy)
        assert "".join(pieces) == whole.choices[0].message.content
