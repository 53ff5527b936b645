"""What those who look after the server see: metrics, health, logs, spans."""

import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvweave.app.weave import Weave
from kvweave.metrics import Sample
from kvweave.serve.access.limits import Limits
from kvweave.serve.http import build_http
from kvweave.serve.observe.logs import HumanLines, JsonLines
from kvweave.serve.observe.prometheus import families_of
from kvweave.serve.routes.context import make_context
from kvweave.serve.server import Server, ServerLifecycle
from worlds.serving import (
    GatedDecoder,
    KbServer,
    make_weave,
    raw_request,
    serving,
    user,
    wait_for_health,
)

NOTE = {"title": "Drain", "text": "To drain a node, cordon it first, then evict its pods."}


def scrape(url: str) -> dict[str, float]:
    """Samples as name{label=value,…} → number."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_an_answer_shows_in_the_metrics(kb_server: KbServer) -> None:
    httpx.post(f"{kb_server.url}/v1/kb/watched/documents?wait_for_kv=true", json=NOTE, timeout=60)
    before = scrape(kb_server.url)
    body = {"messages": user("drain?"), "max_tokens": 5, "temperature": 0}
    fused = {**body, "kb": "watched", "reuse": "reuse", "explain": True}
    told = httpx.post(f"{kb_server.url}/v1/chat/completions", json=fused, timeout=60).json()
    bad = httpx.post(f"{kb_server.url}/v1/chat/completions", json={**body, "top_p": 2})
    assert bad.status_code == 400
    after = scrape(kb_server.url)

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    for source, count in told["explain"]["tokens"].items():
        assert grew(f"kvweave_prompt_tokens_total{{source={source}}}") == count
    made = told["usage"]["completion_tokens"]
    assert grew("kvweave_completion_tokens_total") == made
    assert grew("kvweave_time_to_first_token_seconds_count") == 1
    assert grew("kvweave_queue_seconds_count") == 1
    assert 0 < grew("kvweave_time_between_tokens_seconds_count") <= made
    assert grew("kvweave_answers_total{outcome=finished}") == 1
    assert grew("kvweave_strategies_total{strategy=reuse}") == 1
    route = "route=/v1/chat/completions"
    assert grew(f"kvweave_http_requests_total{{{route},status=200}}") == 1
    assert grew(f"kvweave_http_requests_total{{{route},status=400}}") == 1
    assert after["kvweave_kv_tier_bytes{kb=watched,tenant=,tier=disk}"] > 0
    # from the tree where an exact request was there before: the server is shared
    places = [f"kvweave_chunks_total{{tier={tier}}}" for tier in ("host", "tree")]
    assert sum(grew(place) for place in places if place in after) == 1
    assert after["kvweave_kv_saves_total{kb=watched,tenant=,tier=disk}"] == 1
    assert after["kvweave_running"] == after["kvweave_waiting"] == 0
    assert after["kvweave_kv_pinned"] == 0


def test_the_engine_shows_in_the_metrics_what_it_did_for_every_knowledge_base(
    kb_server: KbServer,
) -> None:
    httpx.post(f"{kb_server.url}/v1/kb/engined/documents?wait_for_kv=true", json=NOTE, timeout=60)
    with kb_server.libraries.use("", "engined") as over:
        assert over.engine is kb_server.weave.engine
    before = scrape(kb_server.url)
    told: Counter[str] = Counter()
    made = 0
    for reuse in ("reuse", "prefix", "prefix"):
        body = {"messages": user("drain?"), "max_tokens": 3, "kb": "engined", "explain": True}
        body["reuse"] = reuse
        reply = httpx.post(f"{kb_server.url}/v1/chat/completions", json=body, timeout=60).json()
        told.update(reply["explain"]["tokens"])
        made += reply["usage"]["completion_tokens"]
    after = scrape(kb_server.url)

    def grew(name: str) -> float:
        return after[f"kvweave_engine_{name}"] - before[f"kvweave_engine_{name}"]

    assert {source: grew(f"tokens_{source}") for source in told} == told
    assert told["exact"] > 0
    assert grew("tokens_answered") == made
    assert grew("requests_finished") == 3
    assert after["kvweave_engine_pages_used"] > 0, "the knowledge tree keeps what was exact"
    assert after["kvweave_engine_pages_free"] > 0
    for name in ("waiting", "running", "parked"):
        assert after[f"kvweave_engine_{name}"] == 0
    for name in ("preemptions", "speculation_saved_tokens", "speculation_wasted_tokens"):
        assert f"kvweave_engine_{name}" in after, "there before it happens"


def test_a_closed_engine_is_a_503_and_no_fault_of_the_request(chat_model_folder: Path) -> None:
    weave = make_weave(chat_model_folder)
    with serving(weave) as url:
        weave.close()
        body = {"messages": user("hello"), "max_tokens": 3}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert reply.status_code == 503
        assert reply.headers["Retry-After"]
        assert "was closed" in reply.json()["error"]["message"]
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_a_chunk_without_stored_kv_is_a_degradation_with_its_reason(kb_server: KbServer) -> None:
    httpx.post(f"{kb_server.url}/v1/kb/watched/documents?wait_for_kv=true", json=NOTE, timeout=60)
    body = {"messages": user("drain?"), "max_tokens": 2, "kb": "watched", "reuse": "reuse"}
    body["documents"] = ["A text that was never stored."]
    assert httpx.post(f"{kb_server.url}/v1/chat/completions", json=body).status_code == 200
    assert scrape(kb_server.url)["kvweave_degradations_total{reason=absent}"] >= 1
    assert scrape(kb_server.url)["kvweave_kv_misses_total{kb=watched,reason=absent,tenant=}"] >= 1


def test_the_numbers_of_an_engine_are_passed_on() -> None:
    found = {
        sample.name: sample.value
        for family in families_of(
            Sample(f"engine_{name}", (), value, False)
            for name, value in (("pages_used", 3), ("tokens_exact", 5))
        )
        for sample in family.samples
    }
    assert found == {"kvweave_engine_pages_used": 3, "kvweave_engine_tokens_exact": 5}


def test_unknown_paths_share_one_name_in_the_metrics(kb_server: KbServer) -> None:
    for path in ("a", "b", "c"):
        httpx.get(f"{kb_server.url}/no/such/{path}")
    found = scrape(kb_server.url)
    names = [name for name in found if "status=404" in name and "requests_total{route=u" in name]
    assert names == ["kvweave_http_requests_total{route=unknown,status=404}"]


def test_a_stopping_server_is_alive_but_not_ready(chat_model_folder: Path) -> None:
    decoders: list[GatedDecoder] = []

    def gate(decoder: Any) -> GatedDecoder:
        decoders.append(GatedDecoder(decoder))
        return decoders[0]

    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(
        make_weave(chat_model_folder, gate), lifecycle=ServerLifecycle(lame_s=60, patience_s=30)
    )
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert httpx.get(f"{url}/readyz").json() == {"status": "ready", "model": "tiny"}
    body = {"messages": user("hello"), "max_tokens": 3, "stream": True}
    with raw_request(url, body) as stream:
        wait_for_health(url, lambda h: h["running"] == 1)
        server.stop()
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/readyz").status_code == 503
        refused = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        server.should_exit = True  # as it does itself when the time is up
        decoders[0].permits.release(100)
        rest = b"".join(iter(lambda: stream.recv(65536), b""))
    assert b"[DONE]" in rest, "what runs may finish"
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.parametrize("given", ["my-id-1", None, "bad id", "x" * 200])
def test_every_reply_has_a_request_id(url: str, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    for path in ("healthz", "v1/models", "nowhere"):
        got = httpx.get(f"{url}/{path}", headers=headers).headers["x-request-id"]
        assert (got == given) == (given == "my-id-1")


@contextmanager
def logged(formatter: logging.Formatter) -> Iterator[list[str]]:
    """Lines of kvweave's log, as `serve --log-format` would write them."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler, logger = Keep(), logging.getLogger("kvweave")
    handler.setFormatter(formatter)
    old = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(old)


def test_a_request_is_one_line_of_json_with_its_id(url: str) -> None:
    with logged(JsonLines()) as lines:
        httpx.get(f"{url}/v1/models", headers={"x-request-id": "abc"})
        deadline = time.monotonic() + 10
        found: list[dict[str, Any]] = []  # written when the reply is out: others' may come late too
        while not found and time.monotonic() < deadline:
            time.sleep(0.01)
            found = [e for e in map(json.loads, list(lines)) if e.get("request_id") == "abc"]
    (line,) = found
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/models", 200)
    assert line["ms"] >= 0


def test_a_failure_on_a_worker_is_logged_with_the_request_it_belongs_to(
    chat_model_folder: Path,
) -> None:
    from worlds.serving import FailingDecoder, serving

    with (
        serving(make_weave(chat_model_folder, FailingDecoder)) as address,
        logged(JsonLines()) as lines,
    ):
        reply = httpx.post(
            f"{address}/v1/chat/completions",
            json={"messages": user("hi")},
            headers={"x-request-id": "doomed"},
        )
    assert (reply.status_code, reply.headers["x-request-id"]) == (500, "doomed")
    failed = [line for line in map(json.loads, lines) if "error" in line]
    assert failed
    assert {line["request_id"] for line in failed} == {"doomed"}
    assert "secret detail" in failed[0]["error"]


def test_people_get_one_line_whatever_the_path_holds(url: str) -> None:
    with logged(HumanLines()) as lines:
        httpx.get(f"{url}/v1/a%0Ab%1B[31m", headers={"x-request-id": "abc"})
        give_up_s = time.monotonic() + 10
        while not lines and time.monotonic() < give_up_s:  # written once the reply is out
            time.sleep(0.01)
    (line,) = lines
    assert "\n" not in line
    assert "\x1b" not in line
    assert " 404 " in line
    assert line.endswith("[abc]")


def test_spans_tell_where_the_time_went(kb_server: KbServer) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    http = build_http(make_context(kb_server.weave, libraries=kb_server.libraries, tracer=tracer))
    trace = "0af7651916cd43dd8448eb211c80319c"
    from starlette.testclient import TestClient

    with TestClient(http) as client:
        reply = client.post(
            "/v1/chat/completions",
            json={"messages": user("hello"), "max_tokens": 3, "temperature": 0},
            headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
        )
        assert reply.status_code == 200
    provider.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/chat/completions", "answer", "prefill", "decode"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {trace}
    assert spans["answer"].parent.span_id == spans["POST /v1/chat/completions"].context.span_id
    assert spans["prefill"].parent.span_id == spans["answer"].context.span_id
    assert spans["prefill"].end_time <= spans["decode"].start_time
    assert spans["answer"].attributes["gen_ai.usage.output_tokens"] == 3


def test_without_a_configured_provider_there_is_no_tracer() -> None:
    from kvweave.serve.observe.tracing import find_tracer

    assert find_tracer() is None


def test_a_slow_request_is_told_of(weave: Weave, caplog: pytest.LogCaptureFixture) -> None:
    for slow_s, told in ((0.0, True), (600.0, False), (None, False)):
        caplog.clear()
        with serving(weave, Limits(slow_s=slow_s)) as url:
            assert httpx.get(f"{url}/v1/models", timeout=30).status_code == 200
        slow = [r for r in caplog.records if r.getMessage() == "slow: GET /v1/models"]
        assert [r.levelname for r in slow] == ["WARNING"] * told
