"""What does a user with default settings get, workload by workload, over full prefill?

    python bench/product.py --data ../shared/data --out bench/results/product-cpu.json
    python bench/product.py --data ../shared/data --quick
    python bench/product.py --instead --out bench/results/product-cpu.json

Starts `kvweave serve` with nothing but a port and a folder of knowledge bases and asks it over HTTP
as clients do, streamed; the time to the first token is the client's. Five workloads: the same
documents twice, a chat of ten turns behind a long system prompt, MTRAG conversations with
retrieval, a skewed stream over one knowledge base, and orders of chunks that never repeat.

Each request goes to several servers of the same build, in turns, each with a copy of the knowledge
base and a tree of its own; while one answers the others are frozen:

    default   the request as it is
    full      with reuse "full": nothing is reused
    prefix    with reuse "prefix", no conversation_id and none recognised (conversations alone):
              exact prefixes, as a prefix cache has them, of the prompt that a client without
              kvweave's help would send
    vllm      vLLM's CPU build with its prefix cache, the same prompt token for token; for
              conversations the one that `prefix` has. `make vllm` builds it
    llamacpp  llama.cpp's server with its prompt cache, the same tokens over the same GGUF file by
              its 4-bit products. `make llamacpp` builds it
    plain     with --plain: default, but tokens are not copied (`engine.copy_tokens = 0`)

A workload begins with new servers, which are warmed up by one chat and one question. The fields
`…_speedup` are p50 of the other arm ÷ p50 of default: over full, for conversations over prefix.
`same_documents_speedup` is of the documents' share alone, which is what is left of the second ask
when the same question without documents is taken off. `worst_over_full` is the largest p50 of
default ÷ p50 of full over all groups of requests. The run's machine profile is its own, measured by
the first server. `answer_speedup` is the median of plain ÷ default of whole answers; give them
`--max-tokens 64`. About 20 minutes on two cores, and a few more the first time, when chunk KV is
made (kept in bench/cache). Time nothing while something else runs.

With --instead it compares what people would use instead, on the documents and questions of
`kvweave demo`, whose answers are known: vLLM's CPU build, ContextPilot in front of it, llama.cpp's
server and plain transformers (`make others` builds them), beside kvweave with and without reuse.
The questions come one by one, then others from --clients clients at a time. One table: time to the
first token, whole answers, requests per second, peak memory, right answers. About 20 minutes on two
cores; product_parts/instead.py has the rules.
"""

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from common.files import CACHE, REPO
from common.results import finish, result_header
from kvweave.model.files.embedded import DEFAULT, FALLBACK
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from product_parts.asking import Event, Refused, Reply, ask_chat, ask_ids
from product_parts.figures import (
    Asked,
    Mechanism,
    Metrics,
    answer_speedups,
    cells,
    documents_speedup,
    judge,
    over_full,
    same_answers,
    speedup,
)
from product_parts.instead import INSTEAD, compare, show_instead
from product_parts.instead_table import newest_instead
from product_parts.knowledge import (
    copy_of,
    mtrag_conversations,
    mtrag_passages,
    prepare,
    squad_passages,
)
from product_parts.llamacpp_server import find_llamacpp, start_llamacpp
from product_parts.servers import RunningServer, own_home, settle, start_kvweave, taking_turns
from product_parts.vllm_server import PromptIds, find_vllm, salted, start_vllm
from product_parts.workloads import (
    FULL,
    MAX_TOKENS,
    QUICK,
    WARM_UP,
    Hits,
    Size,
    Step,
    Workload,
    chat,
    conversations,
    novel_orders,
    same_documents,
    skewed_stream,
)


def _moved(explain: Event) -> float:
    return float((explain.get("decision") or {}).get("ordered_by", "given") != "given")


def _not_guessed(explain: Event) -> str | None:
    """Why nothing was computed beside a search; a server's first answer has no say."""
    why = explain.get("not_guessed")
    return "" if why == "no prompt was timed yet" else why


def _order_kept(explain: Event) -> str | None:
    """Why no chunk may move; an answer without a plan has no say."""
    decision = explain.get("decision")
    return decision.get("order_kept") if decision else ""


SOME = 3  # reasons that are shown
# The one place that knows how a mechanism shows. A pattern is of a whole series of /metrics.
MECHANISMS = (
    Mechanism(
        "tree",
        r'kvweave_prompt_tokens_total\{source="exact"\}',
        ("same_documents", "chat", "conversations", "skewed_stream"),
        True,
        lambda explain: explain["tokens"]["exact"],
    ),
    Mechanism(
        "fusion",
        r"kvweave_engine_fused_(joined|streamed|whole)",
        ("skewed_stream", "novel_orders"),
        True,
        lambda explain: float(explain["tokens"]["reused"] > 0),
    ),
    Mechanism(
        "ordering",
        r"kvweave_ordered_total(\{.*\})?",
        ("conversations", "skewed_stream", "novel_orders"),
        False,
        _moved,
        _order_kept,
    ),
    Mechanism(
        "dedup",
        r"kvweave_left_out_chunks_total",
        ("conversations",),
        True,
        lambda explain: explain.get("left_out") or 0,
    ),
    Mechanism(
        "speculation",
        r"kvweave_engine_speculation_(right|wrong)",
        ("conversations", "skewed_stream", "novel_orders"),
        False,
        lambda explain: (explain.get("speculation") or {}).get("guesses", 0),
        _not_guessed,
    ),
    Mechanism(
        "audit",
        r"kvweave_audit_answers_total(\{.*\})?",
        ("conversations", "skewed_stream", "novel_orders"),
        False,
        lambda explain: 0.0,  # it comes after the answer
    ),
)
OTHERS = ("vllm", "llamacpp")
GROUPS = ("first", "second", "chat", "conversation", "skewed", "novel")
TARGETS = {
    "same_documents_speedup": 8.0,
    "skewed_stream_speedup": 3.0,
    "novel_orders_speedup": 3.0,
    "conversation_speedup": 1.001,  # prefix caching is beaten
}
MOST_OVER_FULL = 1.05
SETTLE_S = 12.0  # that idle work may take between two requests: who reads an answer takes longer
REST_S = 5.0  # behind the last one, for what begins only when nothing was asked for a while
LAST_SETTLE_S = 60.0
INSTEAD_TOKENS = 48  # of an answer of --instead: as bench/answers.py has it
NUM_COLD = 2  # prompts of a workload that vLLM computes without its cache


class Cold(NamedTuple):
    """A prompt that vLLM computed without its cache, and with it before."""

    workload: str
    prompt_tokens: int
    cold_ms: float
    cached_ms: float


class World:
    """What lasts for the whole run: folders, vLLM's server, and what was heard."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.size: Size = QUICK if args.quick else FULL
        self.folder = folder
        self.home = own_home(folder)
        self.tokenizer = Tokenizer(locate(args.model))
        self.asked: list[Asked] = []
        self.counted: dict[str, tuple[Metrics, Metrics]] = {}
        self.cold: list[Cold] = []
        self.notes: list[str] = []
        self.kbs: dict[str, Path] = {}
        self.rss_mb: dict[str, float] = {}

    def note(self, words: str) -> None:
        """Say it now, and keep it in the result."""
        if words not in self.notes:
            self.notes.append(words)
            print(f"note: {words}", flush=True)

    def workloads(self) -> list[Workload]:
        """Those that were asked for, with their knowledge bases made."""
        data, size, wanted = self.args.data, self.size, self.args.workloads
        made: list[Workload] = []
        if "same_documents" in wanted:
            made.append(same_documents(data, size))
        if "chat" in wanted:
            made.append(chat(data, size))
        if "conversations" in wanted:
            talks = mtrag_conversations(data, size.conversations, size.conversation_turns)
            self._prepare("mtrag", mtrag_passages(data, talks, size.kb_chars))
            made.append(conversations(talks, "mtrag"))
        if {"skewed_stream", "novel_orders"} & set(wanted):
            passages = squad_passages(data, size.kb_chars)
            self._prepare("squad", passages)
            if "skewed_stream" in wanted:
                made.append(skewed_stream(data, passages, "squad", size.skewed))
            if "novel_orders" in wanted:
                made.append(novel_orders(data, passages, "squad", size.novel))
        return made

    def _prepare(self, name: str, passages: Sequence[dict[str, str]]) -> None:
        args = self.args
        self.kbs[name] = prepare(name, passages, args.model, args.cache, self.home)

    @contextmanager
    def servers(self, workload: Workload) -> Iterator[dict[str, RunningServer]]:
        """New kvweave servers for a workload, one per arm, each over copies of its own."""
        running: dict[str, RunningServer] = {}
        try:
            for arm in (*workload.arms, *["plain"] * self.args.plain):
                root = self.folder / f"{workload.name}-{arm}"
                root.mkdir()
                if workload.kb is not None:
                    copy_of(self.kbs[workload.kb], root, workload.kb)
                more = {"KVWEAVE_ENGINE_COPY_TOKENS": "0"} if arm == "plain" else {}
                running[arm] = start_kvweave(arm, self.args.model, root, self.home, more=more)
            yield running
        finally:
            for server in running.values():
                server.close()
            for arm in running:
                shutil.rmtree(self.folder / f"{workload.name}-{arm}", ignore_errors=True)


class WorkloadRun:
    """One workload over its servers."""

    def __init__(
        self,
        world: World,
        workload: Workload,
        kvweave: dict[str, RunningServer],
        others: dict[str, RunningServer],
    ) -> None:
        self._world = world
        self._workload = workload
        self._servers = {**kvweave, **others}
        self._arms = list(self._servers)
        self._prompts = PromptIds(world.tokenizer, self._search)
        self._prompt_ids: list[list[int]] = []

    def run(self) -> None:
        world, workload = self._world, self._workload
        self._warm_up()
        default = self._servers["default"]
        before = default.metrics()
        steps = workload.steps(self._search)
        step, number = next(steps), 0
        while True:
            replies = self._ask_all(step, number)
            self._show(number, step, replies)
            try:
                step, number = steps.send(replies["default"].text), number + 1
            except StopIteration:
                break
        if number + 1 < workload.num_steps:
            world.note(f"{workload.name}: {number + 1} requests of {workload.num_steps} found")
        time.sleep(REST_S)
        if not settle([default.process], LAST_SETTLE_S):
            world.note(
                f"{workload.name}: the default server was still busy {LAST_SETTLE_S:.0f} s later"
            )
        world.counted[workload.name] = before, default.metrics()
        for arm, server in self._servers.items():
            most = max(world.rss_mb.get(arm, 0.0), round(server.process.rss_mb()))
            world.rss_mb[arm] = most
        if "vllm" in self._servers:
            self._ask_cold()

    def _search(self, kb: str, question: str) -> Hits:
        """By the server of the full arm: it learns nothing that the one under test would know."""
        reply = self._servers["full"].http.post(f"/v1/kb/{kb}/search", json={"query": question})
        reply.raise_for_status()
        hits: Hits = reply.json()["data"]
        return hits

    def _warm_up(self) -> None:
        steps = [Step("warm", [{"role": "user", "content": "Say hello."}])]
        if self._workload.kb is not None:
            asked = [{"role": "user", "content": WARM_UP}]
            steps.append(Step("warm", asked, kb=self._workload.kb))
        for step in steps:
            self._ask_all(step, None)

    def _ask_all(self, step: Step, number: int | None) -> dict[str, Reply]:
        """The step on every server, another one first each time."""
        ids = self._prompts.of(step) if any(arm in OTHERS for arm in self._arms) else []
        first = (number or 0) % len(self._arms)
        replies: dict[str, Reply] = {}
        servers = list(self._servers.values())
        for arm in (*self._arms[first:], *self._arms[:first]):
            with taking_turns(servers, self._arms.index(arm), SETTLE_S):
                replies[arm] = self._ask(arm, step, ids)
        if number is not None:
            self._prompt_ids.append(ids)
            self._world.asked += [
                Asked(self._workload.name, step.group, arm, number, replies[arm])
                for arm in self._arms
            ]
        return replies

    def _ask(self, arm: str, step: Step, ids: Sequence[int]) -> Reply:
        max_tokens = self._world.args.max_tokens
        http, body = self._servers[arm].http, step.body() | {"max_tokens": max_tokens}
        if arm in ("default", "plain"):
            return ask_chat(http, body)
        if arm == "llamacpp":
            return ask_ids(http, ids, max_tokens, {"cache_prompt": True})
        if arm == "vllm":
            # its server lasts for the whole run: a workload finds nothing of the one before
            return ask_ids(http, ids, max_tokens, salted(self._workload.name))
        if arm == "prefix":
            body.pop("conversation_id", None)
            plain = step.kb is None
            alone = {"reuse": "prefix", "recognise": False}
            return ask_chat(http, body if plain else {**body, **alone})
        try:
            return ask_chat(http, {**body, "reuse": "full"})
        except Refused as error:
            if error.status != 400 or step.kb is not None or step.documents is not None:
                raise
            self._world.note("a plain chat refuses reuse 'full': its full arm is a default chat")
            return ask_chat(http, body)

    def _show(self, number: int, step: Step, replies: dict[str, Reply]) -> None:
        """A line of progress."""
        times = " · ".join(f"{arm} {replies[arm].ttft_ms:,.0f} ms" for arm in self._arms)
        ours = replies["default"]
        tokens = ", ".join(f"{count} {name}" for name, count in ours.tokens.items())
        place = f"{self._workload.name} {number + 1}/{self._workload.num_steps}"
        print(f"[{place}] {step.group}: {times} ({tokens})", flush=True)

    def _ask_cold(self) -> None:
        """Some of the prompts on vLLM once more, without its cache."""
        server, world, name = self._servers["vllm"], self._world, self._workload.name
        last = len(self._prompt_ids) - 1
        cached = {a.step: a.reply for a in world.asked if (a.workload, a.arm) == (name, "vllm")}
        servers = list(self._servers.values())
        for number in sorted({round(last * part / NUM_COLD) for part in range(1, NUM_COLD + 1)}):
            ids = self._prompt_ids[number]
            with taking_turns(servers, self._arms.index("vllm"), SETTLE_S):
                salt = salted(f"cold-{len(world.cold)}")
                cold = ask_ids(server.http, ids, world.args.max_tokens, salt)
            taken = Cold(name, len(ids), round(cold.ttft_ms, 1), round(cached[number].ttft_ms, 1))
            world.cold.append(taken)


def headline(asked: Sequence[Asked]) -> dict[str, Any]:
    """The fields that the bench is judged by. None: that workload did not run."""
    ratios = over_full(asked, GROUPS)
    return {
        "same_documents_speedup": documents_speedup(asked, ("second", "full")),
        "skewed_stream_speedup": speedup(asked, "skewed"),
        "novel_orders_speedup": speedup(asked, "novel"),
        "conversation_speedup": speedup(asked, "conversation", over="prefix"),
        "worst_over_full": max(ratios.values(), default=None),
    }


def beside(asked: Sequence[Asked], cold: Sequence[Cold]) -> dict[str, Any]:
    """Figures that explain the others, and vLLM's."""
    full = [a.reply for a in asked if a.arm == "full" and a.reply.prompt_tokens > 256]
    rates = [reply.prompt_tokens / reply.ttft_ms * 1e3 for reply in full]
    found: dict[str, Any] = {
        "over_full": over_full(asked, GROUPS),
        "same_documents_over_first_ask": documents_speedup(asked, ("first", "default")),
        "chat_speedup": speedup(asked, "chat"),
        "conversation_over_full_speedup": speedup(asked, "conversation"),
        "full_tokens_per_s": round(statistics.median(rates), 1) if rates else None,
        "same_answers": same_answers(asked),
        "answer_speedup": answer_speedups(asked, GROUPS),
    }
    if any(a.arm == "llamacpp" for a in asked):
        over = {group: speedup(asked, group, over="llamacpp") for group in GROUPS}
        found["llamacpp"] = {"speedup_over_llamacpp": over}
    if cold:
        found["vllm"] = {
            "speedup_over_vllm": {group: speedup(asked, group, over="vllm") for group in GROUPS},
            "cold_tokens_per_s": round(
                statistics.median(c.prompt_tokens / c.cold_ms * 1e3 for c in cold), 1
            ),
            # each engine against its own prefill without any cache, on the same prompts
            "speedup_over_own_cold": {
                name: round(
                    statistics.median(c.cold_ms / c.cached_ms for c in cold if c.workload == name),
                    3,
                )
                for name in dict.fromkeys(c.workload for c in cold)
            },
            "cold": [c._asdict() for c in cold],
        }
    return found


def misses(fields: dict[str, Any], fired: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it should be, in words."""
    wrong = [
        f"{name} is {fields[name]}, wanted {least:g} at least"
        for name, least in TARGETS.items()
        if fields[name] is not None and fields[name] < least
    ]
    worst = fields["worst_over_full"]
    if worst is not None and worst > MOST_OVER_FULL:
        wrong.append(f"worst_over_full is {worst}, wanted {MOST_OVER_FULL} at most")
    for one in fired:
        where = ", ".join(one["expected"])
        if one["fired"] is None and any(name in one["by_counter"] for name in one["expected"]):
            wrong.append(f"{one['mechanism']}: NOT THERE YET, no counter like {one['counter']}")
        elif one["fired"] is False:
            why = "; ".join(one["refused"][:SOME]) or "not every answer says why"
            wrong.append(f"{one['mechanism']} did not fire in {where}: {why}")
    return wrong


def show(
    rows: Sequence[dict[str, Any]], fired: Sequence[dict[str, Any]], wrong: Sequence[str]
) -> None:
    console = Console(width=150)
    times = Table("workload", "group", "arm", "n", "TTFT p50", "p95", "prompt", title="First token")
    times.add_column("exact / fused / computed")
    for row in rows:
        tokens = row["tokens"]
        told = " / ".join(f"{count:,}" for count in tokens.values()) if tokens else "–"
        times.add_row(
            row["workload"], row["group"], row["arm"], str(row["requests"]),
            f"{row['ttft_p50_ms']:,.0f} ms", f"{row['ttft_p95_ms']:,.0f} ms",
            f"{row['prompt_tokens']:,}", told,
        )  # fmt: skip
    console.print(times)
    names = list(fired[0]["by_counter"]) if fired else []
    table = Table("mechanism", "fired", *names, title="Counters (in explain blocks)")
    words = {None: "[red]NOT THERE YET[/]", True: "yes", False: "[red]NO[/]"}
    for one in fired:
        counts = []
        for name in names:
            grew, seen = one["by_counter"][name], one["by_explain"][name]
            star = "*" if name in one["expected"] else ""
            counts.append(f"{'none' if grew is None else f'{grew:,.0f}'} ({seen:,.0f}){star}")
        said = "refused" if one["refused"] else words[one["fired"]]
        table.add_row(one["mechanism"], said, *counts)
    console.print(table)
    console.print("* expected there")
    for line in wrong:
        console.print(f"[red]missed[/] {line}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["same_documents", "chat", "conversations", "skewed_stream", "novel_orders"]
    parser.add_argument(
        "--data", type=Path, help="folder with squad_v1.1_dev, mtrag, kb_kubernetes_docs"
    )
    parser.add_argument("--model", help=f"{FALLBACK}; {DEFAULT} with --instead")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--quick", action="store_true", help="a few requests of each: 3 minutes")
    parser.add_argument("--others", nargs="*", choices=INSTEAD, help="beside it; all if not given")
    parser.add_argument("--max-tokens", type=int, help="of an answer")
    parser.add_argument("--plain", action="store_true", help="an arm that copies no tokens, too")
    parser.add_argument("--cache", type=Path, default=CACHE, help="keeps chunk KV between runs")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--instead", action="store_true", help="compare what people would use")
    parser.add_argument("--questions", type=int, default=20, help="--instead: one by one")
    parser.add_argument("--load-questions", type=int, default=12, help="--instead: at a time")
    parser.add_argument("--clients", type=int, default=4, help="--instead: that ask at a time")
    args = parser.parse_args()
    if args.data is None and not args.instead:
        parser.error("--data is needed without --instead")
    known = INSTEAD if args.instead else OTHERS
    args.others = list(known) if args.others is None else args.others
    if unknown := set(args.others) - set(known):
        parser.error(f"--others {' '.join(sorted(unknown))} needs --instead")
    args.model = args.model or (DEFAULT if args.instead else FALLBACK)
    args.max_tokens = args.max_tokens or (INSTEAD_TOKENS if args.instead else MAX_TOKENS)
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or frozen servers would stay behind
    if args.instead:
        run_instead(args)
        return
    with tempfile.TemporaryDirectory(prefix="kvweave-product-") as temporary:
        world = World(args, Path(temporary))
        workloads = world.workloads()
        with open_others(world) as others:
            for workload in workloads:
                print(f"starting servers for {workload.name}", flush=True)
                with world.servers(workload) as servers:
                    WorkloadRun(world, workload, servers, others).run()
    fields, rows = headline(world.asked), cells(world.asked)
    fired = [judge(one, world.counted, world.asked) for one in MECHANISMS]
    wrong = misses(fields, fired)
    show(rows, fired, wrong)
    config = {
        "model": args.model,
        "quick": args.quick,
        "workloads": [workload.name for workload in workloads],
        "size": world.size._asdict(),
        "max_tokens": args.max_tokens,
        "vllm": "vllm" in others,
        "llamacpp": "llamacpp" in others,
    }
    finish(
        __doc__,
        {
            **result_header("product", "cpu"),
            "config": config,
            **beside(world.asked, world.cold),
            "mechanisms": fired,
            "cells": rows,
            "rss_mb": world.rss_mb,
            "minutes": round((time.monotonic() - began_s) / 60, 1),
            "notes": world.notes,
            "missed": wrong,
            **fields,
        },
        args.out,
        newest_instead,
    )


def run_instead(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="kvweave-product-") as temporary:
        found = compare(args, Path(temporary))
    show_instead(found["instead"])
    config = {name: getattr(args, name) for name in ("model", "questions", "load_questions")}
    config |= {"clients": args.clients, "max_tokens": args.max_tokens}
    result = {**result_header("product", "cpu"), "config": config, **found}
    finish(__doc__, result, args.out, newest_instead)


@contextmanager
def open_others(world: World) -> Iterator[dict[str, RunningServer]]:
    """The servers of others, for the whole run; a line says why one is left out."""
    args, running = world.args, dict[str, RunningServer]()
    hello = world.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    try:
        for arm in args.others:
            if arm == "vllm":
                python, why = find_vllm(REPO / ".venv-vllm")
            else:
                python, why = find_llamacpp(REPO / ".venv-llamacpp", args.model)
            if python is None:
                world.note(why)
                continue
            print(f"starting {arm}; vLLM compiles for minutes", flush=True)
            start = start_vllm if arm == "vllm" else start_llamacpp
            running[arm] = start(python, args.model, world.folder)
            ask_ids(running[arm].http, hello, 4, {})
        yield running
    finally:
        for server in running.values():
            server.close()


if __name__ == "__main__":
    main()
