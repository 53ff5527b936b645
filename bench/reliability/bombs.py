"""Requests and files made to freeze a server: is it still heard, and does it still stop?

Each bomb is sent to a server of its own process while another process asks /healthz without a
pause, and in turn with it a bare HTTP server that has nothing else to do: how long that one takes
is the machine's doing. Then once more, and in the middle of it the server gets a SIGTERM.
"""

import json
import multiprocessing as mp
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from common.files import REPO
from reliability.fault_server import FaultServer
from reliability.fault_world import WORLD, make_world

WANTED_S = 0.1  # for /healthz
STOP_S = 30.0  # for the end of the process
SEND_S = 600.0


def bombs() -> dict[str, Callable[[str], httpx.Response]]:
    """What to send, by name."""
    sys.path.insert(0, str(REPO / "tests"))
    from worlds.bombs import many_paragraphs, shared_pages, wide_cell

    hi = [{"role": "user", "content": "hi"}]
    chats: dict[str, Any] = {
        "chat of 20,000 messages": {"messages": hi * 20_000},
        "chat of one 7 MB message": {
            "messages": [{"role": "user", "content": "word " * 1_400_000}]
        },
        "chat of 40,000 parts": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 40_000}]
        },
        "chat of 180,000 messages": {"messages": hi * 180_000},
        "chat with 900 long documents": {"messages": hi, "documents": ["word " * 1000] * 900},
    }
    files = {
        "title.md: # x, 60,000 spaces, y": ("title.md", b"# x" + b" " * 60_000 + b"y"),
        "columns.csv: 4,000 of a,": (
            "columns.csv",
            b"a," * 4_000 + b"a\n" + b"1," * 4_000 + b"1\n",
        ),
        'lines.jsonl: 10,000 of "a"': ("lines.jsonl", b'"a"\n' * 10_000),
        "cell.docx: gridSpan of 400 million": ("cell.docx", wide_cell(400_000_000)),
        "paragraphs.docx: 4 million": ("paragraphs.docx", many_paragraphs(4_000_000)),
        "pages.pdf: 3,000 that share a stream": ("pages.pdf", shared_pages(3_000)),
        "nested.html: 200,000 deep": ("nested.html", b"<b><p>" * 200_000),
        "large.txt: 8 MB of words": ("large.txt", b"word salad of many nodes. " * 320_000),
    }

    def chat(body: Any) -> Callable[[str], httpx.Response]:
        data = json.dumps(body).encode()  # before anything is timed
        headers = {"Content-Type": "application/json"}
        return lambda url: httpx.post(
            f"{url}/v1/chat/completions", content=data, headers=headers, timeout=SEND_S
        )

    def upload(name: str, data: bytes) -> Callable[[str], httpx.Response]:
        parts = [("file", (name, data))]
        return lambda url: httpx.post(f"{url}/v1/kb/b/documents", files=parts, timeout=SEND_S)

    return {
        **{name: chat(body) for name, body in chats.items()},
        **{name: upload(*file) for name, file in files.items()},
    }


class Heard(NamedTuple):
    """Seconds that each question took."""

    healthz: list[float]
    control: list[float]  # by a server that does nothing else


class PlainHandler(BaseHTTPRequestHandler):
    """Says yes to everything."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def answer_plainly(port: Any) -> None:
    """In a process of its own: the control."""
    server = HTTPServer(("127.0.0.1", 0), PlainHandler)
    port.put(server.server_address[1])
    server.serve_forever()


def listen(url: str, control: str, began: Any, over: Any, taken: Any) -> None:
    """In a process of its own: ask both until it is over, then hand over the times."""
    found = Heard([], [])
    places = (f"{url}/healthz", found.healthz), (f"{control}/healthz", found.control)
    with httpx.Client(timeout=SEND_S) as client:
        for place, _ in places:
            client.get(place)
        began.set()
        while not over.is_set():
            for place, seconds in places:
                began_s = time.perf_counter()
                client.get(place)
                seconds.append(time.perf_counter() - began_s)
            time.sleep(0.005)
    taken.put(found)


def heard(url: str, act: Callable[[], Any]) -> Heard:
    """How long /healthz and the control took while `act` ran."""
    context = mp.get_context("spawn")
    port = context.Queue()
    control = context.Process(target=answer_plainly, args=(port,), daemon=True)
    control.start()
    began, over, taken = context.Event(), context.Event(), context.Queue()
    beside = f"http://127.0.0.1:{port.get(timeout=SEND_S)}"
    process = context.Process(target=listen, args=(url, beside, began, over, taken), daemon=True)
    process.start()
    began.wait(SEND_S)
    try:
        act()
    finally:
        over.set()
        found: Heard = taken.get(timeout=SEND_S)
        process.join(30)
        control.kill()
        control.join()
    return found


def run_bombs(folder: Path, names: list[str] | None = None) -> dict[str, Any]:
    """/healthz under each bomb, and how long SIGTERM takes in the middle of it."""
    world = make_world(WORLD)
    server = FaultServer(
        folder / "server",
        world.model,
        world.embedder,
        {"KVWEAVE_LIBRARY_PARSE_S": "10", "KVWEAVE_SERVER_GRACE_S": "10"},
        hooked=False,
    )
    rows: list[dict[str, Any]] = []
    server.start()
    quiet = heard(server.url, lambda: time.sleep(5))
    try:
        for name, send in bombs().items():
            if names is not None and name not in names:
                continue
            if not server.is_alive:
                server.start()
            rows.append(_row(server, name, send))
            print(rows[-1], flush=True)
    finally:
        server.stop()
    return {
        "rows": rows,
        "healthz_quiet_ms": _ms(max(quiet.healthz)),
        "healthz_worst_ms": max(row["healthz_max_ms"] for row in rows),
        "control_worst_ms": max(row["control_max_ms"] for row in rows),
        "sigterm_worst_s": max(row["sigterm_s"] for row in rows),
    }


def _row(server: FaultServer, name: str, send: Callable[[str], httpx.Response]) -> dict[str, Any]:
    replies: list[httpx.Response] = []
    began_s = time.monotonic()
    taken = heard(server.url, lambda: replies.append(send(server.url)))
    took_s = time.monotonic() - began_s

    def again() -> None:
        with suppress(httpx.TransportError):  # the server ends
            send(server.url)

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    time.sleep(1.0)
    stopped_s = server.stop(wait_s=120)
    thread.join(30)
    ordered = sorted(taken.healthz)
    return {
        "bomb": name,
        "status": replies[0].status_code,
        "took_s": round(took_s, 2),
        "asked": len(ordered),
        "healthz_p50_ms": _ms(statistics.median(ordered)),
        "healthz_p99_ms": _ms(ordered[int(0.99 * (len(ordered) - 1))]),
        "healthz_max_ms": _ms(ordered[-1]),
        "control_max_ms": _ms(max(taken.control)),
        "sigterm_s": round(stopped_s, 2),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
