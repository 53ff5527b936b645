"""`bench/product.py --instead`: what people would use instead, over the same questions.

Documents and questions are those of `kvweave demo`: an invented valley, so that no model knows an
answer without its passages. MiniLM finds five chunks for every system. The prompts are the same,
token for token, but for ContextPilot's order of the chunks; answers are drawn greedily. What has to
be searched and laid out before is counted for kvweave alone, which does both itself.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from common.files import REPO
from kvweave.demo import PASSAGES, DemoQuestion, read_questions
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from product_parts.asking import Reply, ask_chat, ask_ids
from product_parts.contextpilot_order import ContextPilotOrder, find_contextpilot
from product_parts.figures import percentile
from product_parts.instead_table import COLUMNS, cells_of
from product_parts.knowledge import Record, copy_of, prepare
from product_parts.llamacpp_server import find_llamacpp, start_llamacpp
from product_parts.servers import RunningServer, own_home, start_kvweave, taking_turns
from product_parts.transformers_server import find_transformers, start_transformers
from product_parts.vllm_server import PromptIds, find_vllm, salted, start_vllm
from product_parts.workloads import WARM_UP, Hits, Step

KB = "valley"
SEED = 19  # the order of the questions: not that of the passages
SETTLE_S = 1.0  # that idle work may take between two requests, before all others are frozen
WATCH_S = 0.5  # between two looks at memory
FROZEN = {"KVWEAVE_SERVER_ENGINE_S": "0"}  # a server that is frozen for minutes does not hang
INSTEAD = ("vllm", "contextpilot", "llamacpp", "transformers")
Prompt = Sequence[int]


class System(NamedTuple):
    """One of those that are compared. vLLM with and without ContextPilot share a server."""

    name: str
    server: RunningServer
    prompt: Callable[[str], Prompt]  # a question's, made before it is timed; () where not needed
    ask: Callable[[str, Prompt], Reply]
    more_mb: Callable[[], float] = lambda: 0.0  # memory besides the server's
    before_ms: Callable[[], float] = lambda: 0.0  # that the last prompt took and that counts


class Watch:
    """The most memory that each system was seen with."""

    def __init__(self, systems: Sequence[System]) -> None:
        self._systems = systems
        self.peak_mb = dict.fromkeys((system.name for system in systems), 0.0)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(WATCH_S):
            for system in self._systems:
                with suppress(psutil.Error):  # a process may end while it is looked at
                    now = system.server.process.rss_mb() + system.more_mb()
                    self.peak_mb[system.name] = max(self.peak_mb[system.name], now)


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the comparison; the fields of its result."""
    began_s = time.monotonic()
    notes: list[str] = []

    def note(words: str) -> None:
        notes.append(words)
        print(f"note: {words}", flush=True)

    questions = read_questions()
    random.Random(SEED).shuffle(questions)
    one_by_one = questions[: args.questions]
    at_once = questions[args.questions :][: args.load_questions]
    with open_systems(args, folder, note) as systems:
        started_s = time.monotonic() - began_s
        for system in systems:
            print(f"warming up {system.name}", flush=True)
            warm_up(system, [each.server for each in systems])
        with Watch(systems) as watch:
            replies = ask_one_by_one(systems, one_by_one)
            per_s: dict[str, float | None] = {}
            prompts = {s.name: [s.prompt(each.question) for each in at_once] for s in systems}
            for system in systems:
                ids = prompts[system.name]
                some, per_s[system.name] = ask_at_once(systems, system, at_once, ids, args.clients)
                replies[system.name] += some
        note_other_prompts(replies, note)
        peak_mb = watch.peak_mb
    asked = [*one_by_one, *at_once]
    rows = [
        row_of(system.name, replies[system.name], asked, len(one_by_one))
        | {"requests_per_s": per_s[system.name], "peak_mb": round(peak_mb[system.name])}
        for system in systems
    ]
    return {
        "instead": rows,
        "started_s": round(started_s),
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "notes": notes,
    }


@contextmanager
def open_systems(
    args: argparse.Namespace, folder: Path, note: Callable[[str], None]
) -> Iterator[list[System]]:
    """All systems that are here, ready; a line says why one is left out."""
    home = own_home(folder)
    made = prepare(KB, valley(), args.model, args.cache, home)
    tokenizer = Tokenizer(locate(args.model))
    more = {"max_tokens": args.max_tokens, "temperature": 0, "repetition_penalty": 1.0}
    with ExitStack() as stack:

        def kept(server: RunningServer) -> RunningServer:
            stack.callback(server.close)
            return server

        def kvweave(name: str, fields: Mapping[str, Any]) -> System:
            root = folder / f"instead-{name}"
            root.mkdir()
            copy_of(made, root, KB)
            server = kept(start_kvweave(name, args.model, root, home, more=FROZEN))

            def ask(question: str, _: Prompt) -> Reply:
                body = Step(KB, [{"role": "user", "content": question}], kb=KB).body()
                return ask_chat(server.http, {**body, **more, **fields})

            return System(name, server, lambda question: (), ask)

        def search(kb: str, question: str) -> Hits:
            reply = kvweaves[-1].server.http.post(f"/v1/kb/{kb}/search", json={"query": question})
            reply.raise_for_status()
            hits: Hits = reply.json()["data"]
            return hits

        prompts = PromptIds(tokenizer, search)

        def prompt(question: str, prompts: PromptIds = prompts) -> Prompt:
            return prompts.of(Step(KB, [{"role": "user", "content": question}], kb=KB))

        def stranger(name: str, server: RunningServer, fields: Mapping[str, Any]) -> System:
            def ask(_: str, ids: Prompt) -> Reply:
                given = {**more, **fields}
                return ask_ids(server.http, ids, args.max_tokens, given)

            return System(name, server, prompt, ask)

        systems: list[System] = []
        finders = {
            "vllm": lambda: find_vllm(REPO / ".venv-vllm"),
            "contextpilot": lambda: find_contextpilot(REPO / ".venv-contextpilot"),
            "llamacpp": lambda: find_llamacpp(REPO / ".venv-llamacpp", args.model),
            "transformers": find_transformers,
        }
        found = {}
        for name in args.others:
            python, why = finders[name]()
            if python is None:
                note(why)
            else:
                found[name] = python
        if {"vllm", "contextpilot"} & found.keys() and (python := found.get("vllm")):
            print("starting vllm, which compiles for minutes", flush=True)
            vllm = kept(start_vllm(python, args.model, folder))
            systems.append(stranger("vllm", vllm, salted("alone")))
            if pilot_python := found.get("contextpilot"):
                pilot = ContextPilotOrder(pilot_python, folder / "contextpilot.log")
                stack.callback(pilot.close)
                ordered = PromptIds(tokenizer, pilot.reordered(search))
                systems.append(
                    stranger("contextpilot", vllm, salted("behind ContextPilot"))._replace(
                        prompt=lambda question: prompt(question, ordered),
                        more_mb=pilot.rss_mb,
                        before_ms=lambda: pilot.last_ms,
                    )
                )
        elif "contextpilot" in found:
            note("ContextPilot is left out: it stands in front of vLLM, which is not here")
        if python := found.get("llamacpp"):
            print("starting llamacpp", flush=True)
            server = kept(start_llamacpp(python, args.model, folder, slots=args.clients))
            systems.append(stranger("llamacpp", server, {"cache_prompt": True}))
        if python := found.get("transformers"):
            print("starting transformers", flush=True)
            server = kept(start_transformers(python, args.model, folder))
            systems.append(stranger("transformers", server, {}))
        print("starting kvweave, twice", flush=True)  # last: in idle time it would slow the others
        kvweaves = [kvweave("kvweave", {}), kvweave("full", {"reuse": "full"})]
        yield [*kvweaves, *systems]


def note_other_prompts(replies: Mapping[str, Sequence[Reply]], note: Callable[[str], None]) -> None:
    """Say where systems were not asked the same: a prompt of another length is another prompt."""
    for number, same in enumerate(zip(*replies.values(), strict=True)):
        lengths = dict(zip(replies, (reply.prompt_tokens for reply in same), strict=True))
        if len(set(lengths.values())) > 1:
            note(f"question {number} was not the same prompt everywhere: {lengths} tokens")


def valley() -> list[Record]:
    """The passages of `kvweave demo`: their title is their first line."""
    found = []
    for path in sorted(PASSAGES.glob("*.md")):
        title, _, text = path.read_text(encoding="utf-8").partition("\n")
        found.append({"id": path.stem, "title": title.removeprefix("# "), "text": text.strip()})
    return found


def warm_up(system: System, servers: Sequence[RunningServer]) -> None:
    """One question that is not measured."""
    ids = system.prompt(WARM_UP)
    unique = list(dict.fromkeys(servers))
    with taking_turns(unique, unique.index(system.server), SETTLE_S):
        system.ask(WARM_UP, ids)


def ask_one_by_one(
    systems: Sequence[System], questions: Sequence[DemoQuestion]
) -> dict[str, list[Reply]]:
    """Each question on every system, another one first each time, all others frozen."""
    replies: dict[str, list[Reply]] = {system.name: [] for system in systems}
    servers = list(dict.fromkeys(system.server for system in systems))
    for number, each in enumerate(questions):
        first = number % len(systems)
        for system in (*systems[first:], *systems[:first]):
            ids = system.prompt(each.question)
            before_ms = system.before_ms()
            with taking_turns(servers, servers.index(system.server), SETTLE_S):
                reply = system.ask(each.question, ids)
            waited = reply._replace(
                ttft_ms=reply.ttft_ms + before_ms, total_ms=reply.total_ms + before_ms
            )
            replies[system.name].append(waited)
        shown = " · ".join(f"{s.name} {replies[s.name][-1].ttft_ms:,.0f} ms" for s in systems)
        print(f"[{number + 1}/{len(questions)}] {shown}", flush=True)
    return replies


def ask_at_once(
    systems: Sequence[System],
    system: System,
    questions: Sequence[DemoQuestion],
    prompts: Sequence[Prompt],
    clients: int,
) -> tuple[list[Reply], float | None]:
    """Questions not asked before, by so many clients at a time; also requests a second."""
    if not questions:
        return [], None
    servers = list(dict.fromkeys(each.server for each in systems))
    with (
        taking_turns(servers, servers.index(system.server), SETTLE_S),
        ThreadPoolExecutor(clients) as pool,
    ):
        system.server.reconnect()
        began_s = time.perf_counter()
        replies = list(pool.map(system.ask, [each.question for each in questions], prompts))
        took_s = time.perf_counter() - began_s
    per_s = len(replies) / took_s
    print(f"[{clients} clients] {system.name}: {per_s:.3f} requests a second", flush=True)
    return replies, round(per_s, 4)


def row_of(
    name: str, replies: Sequence[Reply], questions: Sequence[DemoQuestion], num_alone: int
) -> dict[str, Any]:
    """Times are of the first `num_alone` replies, which had the machine to themselves."""
    alone = replies[:num_alone]
    pairs = list(zip(questions, replies, strict=True))
    return {
        "system": name,
        "ttft_p50_ms": round(percentile([reply.ttft_ms for reply in alone], 50), 1),
        "ttft_p95_ms": round(percentile([reply.ttft_ms for reply in alone], 95), 1),
        "total_p50_ms": round(percentile([reply.total_ms for reply in alone], 50), 1),
        "prompt_tokens": round(statistics.median(reply.prompt_tokens for reply in replies)),
        "answer_tokens": round(statistics.median(reply.answer_tokens for reply in replies), 1),
        "right": sum(question.is_answered_by(reply.text) for question, reply in pairs),
        "asked": len(pairs),
        "answers": [" ".join(reply.text.split()) for reply in replies],
    }


def show_instead(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="the same documents, questions and prompts")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in rows:
        table.add_row(*cells_of(row))
    Console(width=150).print(table)
