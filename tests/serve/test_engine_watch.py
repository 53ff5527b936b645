"""A server whose engine is gone says so: to those who wait, on /readyz, and by ending."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import httpx
import pytest
from torch import Tensor

from kvweave.app.weave import Weave
from kvweave.engine.worker import Pulse
from kvweave.errors import RequestError
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from kvweave.serve.access.held import HeldRequest
from kvweave.serve.server import ServerLifecycle
from kvweave.serve.workers.engine_watch import EngineWatch
from worlds.serving import make_weave, serving, user

HELLO = {"messages": user("hello"), "max_tokens": 3, "temperature": 0}


class SickDecoder(Decoder):
    """Does as it is told."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.spec, decoder.weights)
        self.fault: BaseException | None = None
        self.gate = threading.Event()  # steps wait for it
        self.gate.set()
        self.numberless = False

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        assert self.gate.wait(120)
        if self.fault is not None:
            raise self.fault
        logits = super().forward(batch)
        return logits * float("nan") if self.numberless else logits


@pytest.fixture
def sick(chat_model_folder: Path) -> SickDecoder:
    return SickDecoder(make_weave(chat_model_folder).runtime.decoder)


def ask(url: str, **more: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**HELLO, **more}, timeout=60)


def test_a_step_that_hangs_ends_the_server_and_all_who_wait_hear_of_it(
    chat_model_folder: Path, sick: SickDecoder
) -> None:
    weave = make_weave(chat_model_folder, lambda _: sick)
    replies: list[httpx.Response] = []
    with serving(weave, lifecycle=ServerLifecycle(stuck_s=2.0, lame_s=3.0)) as url:
        assert ask(url).status_code == 200
        sick.gate.clear()
        waiting = [
            threading.Thread(target=lambda how=how: replies.append(ask(url, stream=how)))
            for how in (False, True)
        ]
        for each in waiting:
            each.start()
        for each in waiting:
            each.join(timeout=30)
    sick.gate.set()
    assert [reply.status_code for reply in replies if reply.status_code != 200] == [503]
    assert all("the engine hangs: a step has taken more than 2 s" in r.text for r in replies)
    began_s = time.monotonic()
    weave.close()
    assert time.monotonic() - began_s < 10.0


def test_a_busy_server_lets_no_request_go_that_nobody_waits_for(
    chat_model_folder: Path, sick: SickDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.serve.server.PASS_ON_S", 0.3)
    weave = make_weave(chat_model_folder, lambda _: sick)
    loops: list[asyncio.AbstractEventLoop] = []
    given: list[HeldRequest] = []
    lifecycle = ServerLifecycle(
        stuck_s=2.0,
        lame_s=3.0,
        on_ready=lambda: loops.append(asyncio.get_running_loop()),
        on_broken=lambda _: loops[0].call_soon_threadsafe(time.sleep, 1.5) and None,
        pass_on=given.append,
    )
    with serving(weave, lifecycle=lifecycle) as url:
        assert ask(url).status_code == 200
        sick.gate.clear()
        reply = ask(url)
    sick.gate.set()
    weave.close()
    assert reply.status_code == 503
    assert "the engine hangs" in reply.text
    assert not given


def test_a_device_that_fails_for_good_ends_the_server(
    chat_model_folder: Path, sick: SickDecoder
) -> None:
    weave = make_weave(chat_model_folder, lambda _: sick)
    with serving(weave, lifecycle=ServerLifecycle(lame_s=3.0)) as url:
        assert ask(url).status_code == 200
        sick.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        statuses = [ask(url).status_code for _ in range(3)]
        assert statuses == [500] * 3
        deadline_s = time.monotonic() + 20
        last = 0
        while time.monotonic() < deadline_s and last != 503:
            try:
                last = httpx.get(f"{url}/readyz", timeout=10).status_code
            except httpx.TransportError:  # it has ended
                break
    weave.close()


def test_requests_that_fail_by_themselves_do_not_end_it(
    chat_model_folder: Path, sick: SickDecoder
) -> None:
    weave = make_weave(chat_model_folder, lambda _: sick)
    with serving(weave) as url:
        for _ in range(4):
            sick.fault = RuntimeError("this one")
            assert ask(url).status_code == 500
        sick.fault = None
        time.sleep(2.5)  # the watch has looked, and tried
        assert httpx.get(f"{url}/readyz", timeout=10).status_code == 200
        assert ask(url).status_code == 200
        assert weave.engine.pulse().failed_in_row == 0
    weave.close()


def test_an_engine_thread_that_dies_is_replaced(chat_model_folder: Path, sick: SickDecoder) -> None:
    weave = make_weave(chat_model_folder, lambda _: sick)
    with serving(weave) as url:
        sick.fault = SystemExit(3)
        assert ask(url).status_code == 500
        sick.fault = None
        assert ask(url).status_code == 200
    weave.close()


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1}, {"logprobs": True}])
def test_logits_that_are_no_numbers_are_an_error(
    chat_model_folder: Path, sick: SickDecoder, how: dict[str, object]
) -> None:
    weave = make_weave(chat_model_folder, lambda _: sick)
    with serving(weave) as url:
        sick.numberless = True
        reply = ask(url, **how)
        assert reply.status_code == 500
        assert "no numbers" in reply.json()["error"]["message"]
    weave.close()


class Patient:
    """An engine whose pulse a test sets, and whose requests it answers."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self.engine = self
        self.failed_in_row = 0
        self.tried = 0
        self._answer = answer

    def pulse(self) -> Pulse:
        return Pulse(0.0, self.failed_in_row)

    def abandon(self, why: str) -> None: ...

    def complete(self, *_: object, **__: object) -> "Patient":
        return self

    def finish(self) -> None:
        self.tried += 1
        self._answer()


def watched(answer: Callable[[], None]) -> tuple[Patient, list[str]]:
    """After four failures in a row, and then a fifth."""
    told: list[str] = []
    patient = Patient(answer)
    watch = EngineWatch(cast(Weave, patient), 0.0, told.append, look_s=0.01)
    watch.start()
    for failures in (4, 5):
        patient.failed_in_row = failures
        time.sleep(0.3)
    watch.close()
    return patient, told


def refuse() -> None:
    raise RequestError("the prompt has 1 token, the context holds 0")


def test_a_refused_trial_says_nothing_of_the_engine_and_is_made_once_for_each_failure() -> None:
    patient, told = watched(refuse)
    assert told == []
    assert patient.tried == 2


def fail() -> None:
    raise RuntimeError("CUDA error")


def test_a_trial_that_fails_ends_it() -> None:
    _, told = watched(fail)
    assert told == ["the engine cannot compute any more (RuntimeError)"]


class SlowDecoder(SickDecoder):
    """Takes its time for every layer."""

    layer_s = 0.0

    def finish(self, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        time.sleep(self.layer_s)
        return super().finish(layer, h, attended)


def test_a_long_step_that_gets_on_is_not_one_that_hangs(chat_model_folder: Path) -> None:
    """Three layers of 0.8 s, and a job in front of them of as long: none takes 1.5 s by itself."""
    slow = SlowDecoder(make_weave(chat_model_folder).runtime.decoder)
    weave = make_weave(chat_model_folder, lambda _: slow)
    with serving(weave, lifecycle=ServerLifecycle(stuck_s=1.5)) as url:
        slow.layer_s = 0.8
        waits = [
            threading.Thread(target=weave.engine.run_alone, args=(lambda: time.sleep(0.8),))
            for _ in range(3)
        ]
        for each in waits:
            each.start()
        reply = ask(url, max_tokens=2)
        for each in waits:
            each.join(timeout=30)
        assert reply.status_code == 200, reply.text
    weave.close()


def test_who_runs_the_server_hears_at_once_that_the_engine_is_lost(
    chat_model_folder: Path, sick: SickDecoder
) -> None:
    """Before `run` returns: connections may keep it from doing so."""
    told: list[str] = []
    weave = make_weave(chat_model_folder, lambda _: sick)
    life = ServerLifecycle(stuck_s=1.0, on_broken=told.append)
    with serving(weave, lifecycle=life) as url:
        sick.gate.clear()
        assert ask(url).status_code == 503
    sick.gate.set()
    assert told == ["the engine hangs: a step has taken more than 1 s"]
    weave.close()
