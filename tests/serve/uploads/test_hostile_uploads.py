"""Uploads of one tenant that are made to hurt, while others upload."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from kvweave.app.weave import Weave
from kvweave.corpus.parsers import ParseLimits, parser_process
from kvweave.corpus.parsers.base import LONGEST_TITLE
from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.access.limits import Limits
from kvweave.serve.uploads.reader import LONGEST_REST, JsonScan
from worlds.serving import KbServer, make_libraries, serving
from worlds.watching import DEAF_S, listening

NOTE = {"title": "Note", "text": "A quota limits pods."}
JSON = {"Content-Type": "application/json"}
KEYS = ["sk-tenant-1:one", "sk-tenant-2:two"]


def of_tenant(number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-tenant-{number}", **JSON}


@pytest.fixture
def two_tenants(weave: Weave, tmp_path: Path) -> Iterator[str]:
    libraries = make_libraries(weave, tmp_path)
    limits = Limits(tenant_bytes=4 << 20)
    with serving(weave, limits, libraries=libraries, keys=parse_keys(KEYS)) as url:
        yield url
    libraries.close()


def upload(url: str, body: bytes, headers: dict[str, str] = JSON, kb: str = "n") -> httpx.Response:
    return httpx.post(f"{url}/v1/kb/{kb}/documents", content=body, headers=headers, timeout=30)


def error_of(reply: httpx.Response) -> str:
    assert reply.status_code in (400, 403), reply.text
    return str(reply.json()["error"]["message"])


RESTS = {
    "metadata": b'{"text": "x", "metadata": {"a": [' + b"1," * 10_000_000 + b"1]}}",
    "keys": b'{"text": "x"' + b',"a":1' * 4_000_000 + b"}",
    "blanks": b'{"text": "x"' + b" " * 20_000_000 + b"}",
}


@pytest.mark.parametrize("name", list(RESTS))
def test_what_is_not_the_text_has_a_bound_before_it_is_parsed(
    kb_server: KbServer, name: str
) -> None:
    with listening(kb_server.url) as heard:
        reply = upload(kb_server.url, RESTS[name])
    assert f"beside its text the body has more than {LONGEST_REST:,} bytes" in error_of(reply)
    assert heard.longest_s < DEAF_S


def test_the_bytes_beside_the_longest_text_are_counted_however_they_arrive() -> None:
    body = json.dumps({"title": 'a "b" \\', "text": 'x\\"y' * 500 + "\\", "n": [1, 2]}).encode()
    text = json.dumps('x\\"y' * 500 + "\\").encode()
    for seed in range(200):
        scan, random, at = JsonScan(), Random(seed), 0
        while at < len(body):
            size = random.randint(1, 9)
            scan.feed(body[at : at + size])
            at += size
        assert scan.rest_bytes == len(body) - (len(text) - 2), "its quotes are no text"


def test_a_text_of_one_tenant_that_is_slow_to_read_holds_up_no_upload_of_another(
    two_tenants: str,
) -> None:
    blank = b'{"text": "' + b" " * (1 << 20) + b'"}'
    assert "'text' is empty" in error_of(upload(two_tenants, blank, of_tenant(1)))
    readers = [child.pid for child in parser_process._pool().idle]
    assert readers, "a long text is read by a process that waits for the next"
    for pid in readers:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as clients:
        try:
            slow = clients.submit(upload, two_tenants, blank, of_tenant(1))
            time.sleep(1.0)
            reply = upload(two_tenants, json.dumps(NOTE).encode(), of_tenant(2))
            assert not slow.done()
        finally:
            for pid in readers:
                with suppress(ProcessLookupError):  # the pool may have let it go meanwhile
                    os.kill(pid, signal.SIGCONT)
        assert "'text' is empty" in error_of(slow.result())
    assert reply.status_code == 200, reply.text


def test_refused_bytes_count_against_the_quota_of_their_tenant(two_tenants: str) -> None:
    bad = b'{"text": "' + b"x" * (3 << 20)
    for _ in range(2):
        assert "not valid JSON" in error_of(upload(two_tenants, bad, of_tenant(1)))
    refused = upload(two_tenants, json.dumps(NOTE).encode(), of_tenant(1))
    assert refused.json()["error"]["code"] == "quota_exceeded"
    assert "6.0 MiB that were refused" in error_of(refused)
    assert upload(two_tenants, json.dumps(NOTE).encode(), of_tenant(2)).status_code == 200


@pytest.mark.parametrize("field", ["title", "key"])
def test_a_long_title_is_refused_while_others_are_served(kb_server: KbServer, field: str) -> None:
    with listening(kb_server.url) as heard:
        body = json.dumps({"text": "x", field: "word " * 3_000_000}).encode()
        reply = upload(kb_server.url, body)
    assert f"'{field}' must be at most {LONGEST_TITLE} characters" in error_of(reply)
    assert heard.longest_s < DEAF_S


def test_a_name_of_megabytes_is_no_field_and_is_quoted_in_part(kb_server: KbServer) -> None:
    with listening(kb_server.url) as heard:
        reply = upload(kb_server.url, json.dumps({"text": "x", "word " * 6_000_000: 1}).encode())
    assert "is not supported" in error_of(reply)
    assert heard.longest_s < DEAF_S


LONG_TITLES = {
    "heading.md": b"# " + b"word " * 3_200_000 + b"\nSome text.",
    "front.md": b"---\ntitle: " + b"word " * 3_200_000 + b"\n---\nSome text.",
    "page.html": b"<title>" + b"word " * 3_200_000 + b"</title><p>Some text.</p>",
    "lines.jsonl": json.dumps({"title": "word " * 3_200_000, "text": "Some text."}).encode(),
}


@pytest.mark.parametrize("name", list(LONG_TITLES))
def test_a_title_that_a_parser_finds_has_a_bound(kb_server: KbServer, name: str) -> None:
    place = f"{kb_server.url}/v1/kb/titled/documents"
    files = [("file", (name, LONG_TITLES[name])), ("file", ("short.txt", b"A zorb."))]
    with listening(kb_server.url) as heard:
        reply = httpx.post(place, files=files, timeout=120)
    assert reply.status_code == 200, reply.text
    assert all(len(each["title"]) <= LONGEST_TITLE for each in documents(kb_server.url, "titled"))
    assert heard.longest_s < DEAF_S


def documents(url: str, name: str) -> list[dict[str, Any]]:
    return list(httpx.get(f"{url}/v1/kb/{name}/documents", timeout=60).json()["data"])


def test_a_job_takes_what_an_upload_takes(kb_server: KbServer) -> None:
    """It had the bounds of a chat: 8 MiB, and 125,000 commas."""
    url = f"{kb_server.url}/v1/kb/jobs-as-large/jobs"
    large = httpx.post(url, files={"file": ("a.exe", b"x" * (9 << 20))}, timeout=120)
    assert large.status_code == 202, large.text
    commas = httpx.post(url, json={"text": "a, b; " * 130_000}, timeout=120)
    assert commas.status_code == 202, commas.text
    httpx.delete(f"{url}/{commas.json()['id']}", timeout=60)


def test_a_document_has_a_bound_and_says_so(kb_server: KbServer) -> None:
    most = ParseLimits().document_chars
    reply = upload(kb_server.url, json.dumps({"text": "word " * (most // 5 + 1)}).encode())
    message = error_of(reply)
    assert "characters in one document" in message
    assert f"more than {most:,}; split it" in message


def test_cutting_a_long_document_is_told_while_it_lasts(kb_server: KbServer) -> None:
    text = " ".join(f"The node {number} has pods." for number in range(20_000))
    with httpx.stream(
        "POST",
        f"{kb_server.url}/v1/kb/long/documents",
        json={"text": text},
        headers={"Accept": "text/event-stream"},
        timeout=120,
    ) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    reading = [each["chunks"] for each in events if each.get("phase") == "read"]
    assert len(set(reading)) > 1, "chunks are counted as they are cut"
    assert reading == sorted(reading)


def test_long_documents_of_one_tenant_leave_another_a_thread(weave: Weave, tmp_path: Path) -> None:
    libraries = make_libraries(weave, tmp_path)
    limits = Limits(tasks=1)
    text = " ".join(f"The node {number} has pods." for number in range(6_000))
    over: list[int] = []
    with serving(weave, limits, libraries=libraries, keys=parse_keys(KEYS)) as url:

        def send(number: int) -> None:
            upload(url, json.dumps({"text": text}).encode(), of_tenant(1), f"kb{number}")
            over.append(number)

        long = [threading.Thread(target=send, args=(number,)) for number in range(3)]
        for each in long:
            each.start()
        while libraries.folders.names("one") == []:  # the first is taken in
            time.sleep(0.01)
        reply = upload(url, json.dumps(NOTE).encode(), of_tenant(2))
        assert reply.status_code == 200, reply.text
        assert len(over) < 2, "it waited for documents of another tenant"
        for each in long:
            each.join(120)
    libraries.close()
