"""bench/product.py: what it says of its requests, what it asks, and how its servers take turns."""

import gzip
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from common.files import REPO
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.weave import Weave
from kvweave.demo import DemoQuestion, read_questions, titles_of
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.prompt import SYSTEM
from kvweave.text.tokenizer import Tokenizer
from product import GROUPS, MECHANISMS, Cold, beside, headline, misses, show
from product_parts.asking import Refused, Reply, ask_chat, ask_ids
from product_parts.contextpilot_order import find_contextpilot
from product_parts.figures import (
    LEAST_MS,
    Asked,
    Mechanism,
    answer_speedups,
    cells,
    documents_speedup,
    grown,
    judge,
    over_full,
    percentile,
    same_answers,
)
from product_parts.instead import row_of, valley
from product_parts.instead_table import COLUMNS, WORDS, cells_of, newest_instead
from product_parts.knowledge import Conversation, mtrag_conversations, mtrag_passages
from product_parts.llamacpp_server import find_llamacpp, start_llamacpp
from product_parts.servers import RunningServer, ServerProcess, settle, taking_turns
from product_parts.transformers_server import start_transformers
from product_parts.vllm_server import PromptIds, find_vllm
from product_parts.workloads import MAX_TOKENS, QUICK, Step, conversations, never_repeated
from worlds.serving import serving

SPINNING = "while True: pass"


def make_asked(group: str, arm: str, *ttft_ms: float, text: str = "so", **told: Any) -> list[Asked]:
    """Requests of one group on one arm, each a step."""
    return [
        Asked(told.get("workload", "w"), group, arm, step, Reply(ms, ms, text, 9, told.get("said")))
        for step, ms in enumerate(ttft_ms)
    ]


def make_explain(**tokens: int) -> dict[str, Any]:
    counts = {"exact": 0, "reused": 0, "recomputed": 0, "computed": 0}
    return {"tokens": counts | tokens, "decision": None, "speculation": None}


# ── figures ──────────────────────────────────────────────────────────────────


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([5.0], 95) == 5.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)


def test_the_documents_share_is_what_the_question_alone_does_not_take() -> None:
    asked = [
        *make_asked("alone", "default", 100, 100, 100),
        *make_asked("alone", "full", 120, 120, 120),
        *make_asked("first", "default", 4100),
        *make_asked("second", "default", 300, 350, 9000),
        *make_asked("second", "full", 4120, 5120, 2120),
    ]
    assert documents_speedup(asked, ("second", "full")) == 16.0  # (4120 - 120) / (350 - 100)
    assert documents_speedup(asked, ("first", "default")) == 16.0
    assert documents_speedup(asked[3:], ("second", "full")) is None, "nothing by itself"


def test_a_share_below_the_noise_does_not_make_an_endless_speedup() -> None:
    asked = [
        *make_asked("alone", "default", 100),
        *make_asked("alone", "full", 100),
        *make_asked("second", "default", 99),
        *make_asked("second", "full", 1100),
    ]
    assert documents_speedup(asked, ("second", "full")) == 1000 / LEAST_MS


def test_the_worst_group_decides_and_conversations_are_compared_with_prefixes() -> None:
    asked = [
        *make_asked("skewed", "default", 100, 200, 300),
        *make_asked("skewed", "full", 800, 700, 600),
        *make_asked("conversation", "default", 110),
        *make_asked("conversation", "full", 100),
        *make_asked("conversation", "prefix", 220),
    ]
    assert over_full(asked, GROUPS) == {"skewed": 0.286, "conversation": 1.1}
    fields = headline(asked)
    assert fields["skewed_stream_speedup"] == 3.5
    assert fields["conversation_speedup"] == 2.0
    assert fields["worst_over_full"] == 1.1
    assert fields["novel_orders_speedup"] is None
    assert misses(fields, []) == ["worst_over_full is 1.1, wanted 1.05 at most"]


def test_what_was_said_of_tokens_is_added_up_by_workload_and_arm() -> None:
    said = make_explain(exact=5, reused=2, recomputed=1, computed=1)
    asked = make_asked("chat", "default", 10, 30, said=said) + make_asked("chat", "vllm", 50)
    ours, theirs = cells(asked)
    assert ours["tokens"] == {"exact": 10, "fused": 6, "computed": 2}
    assert (ours["ttft_p50_ms"], ours["requests"]) == (20, 2)
    assert theirs["tokens"] is None


def test_answers_are_compared_step_by_step() -> None:
    asked = make_asked("chat", "default", 1, 1) + make_asked("chat", "full", 1, 1)
    asked[1] = asked[1]._replace(reply=asked[1].reply._replace(text="else"))
    assert same_answers(asked) == {"chat": 0.5}


def test_whole_answers_are_compared_request_by_request() -> None:
    asked = make_asked("chat", "default", 100.0, 10.0, 50.0)
    asked += make_asked("chat", "plain", 200.0, 15.0, 50.0) + make_asked("skewed", "default", 9.0)
    assert answer_speedups(asked, ("chat", "skewed")) == {"chat": 1.5}


# ── what fired ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("after", "everywhere", "fired"),
    [
        ({"a": 2.0, "b": 1.0}, True, True),
        ({"a": 2.0, "b": 0.0}, True, False),
        ({"a": 2.0, "b": 0.0}, False, True),
        ({"a": 0.0, "b": 0.0}, False, False),
        ({"a": 2.0, "b": None}, False, None),
    ],
)
def test_a_mechanism_fired_if_its_counter_grew_where_it_should(
    after: dict[str, float | None], everywhere: bool, fired: bool | None
) -> None:
    series = 'kvweave_x_total{kind="y"}'
    counted = {
        name: ({series: 5.0}, {"other": 9.0} if grew is None else {series: 5.0 + grew})
        for name, grew in after.items()
    }
    mechanism = Mechanism("x", r"kvweave_x_total\{.*\}", ("a", "b", "z"), everywhere, lambda e: 1)
    judged = judge(mechanism, counted, make_asked("g", "default", 1, 2, said={}, workload="a"))
    assert judged["fired"] is fired
    assert judged["by_counter"] == after
    assert bool(misses(headline([]), [judged])) is (fired is not True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["too short: 1 ms", ""], "x did not fire in a, z: too short: 1 ms"),
        (["b", "a", "b"], "x did not fire in a, z: a; b"),
        (["too short: 1 ms", None], "x did not fire in a, z: not every answer says why"),
        ([""], "x did not fire in a, z: not every answer says why"),
    ],
)
def test_a_mechanism_that_never_fired_is_missed_with_its_reason(
    given: list[str | None], said: str
) -> None:
    mechanism = Mechanism("x", "x", ("a", "z"), False, lambda e: 0, lambda e: e["why"])
    asked = [
        one
        for why in given
        for one in make_asked("g", "default", 1, said={"why": why}, workload="a")
    ]
    judged = judge(mechanism, {"a": ({"x": 5.0}, {"x": 5.0})}, asked)
    assert misses(headline([]), [judged]) == [said]
    judged = judge(mechanism, {"a": ({"x": 5.0}, {"x": 6.0})}, asked)
    assert misses(headline([]), [judged]) == []


def test_a_counter_that_begins_later_counts_from_nothing() -> None:
    assert grown("x(_y)?", {"x": 1.0}, {"x": 2.0, "x_y": 3.0, "xz": 9.0}) == 4.0
    assert grown("q", {}, {"x": 2.0}) is None


def test_every_mechanism_reads_an_explain_block() -> None:
    said = make_explain(exact=3, reused=2)
    seen = {one.name: one.seen(said) for one in MECHANISMS}
    assert seen["tree"] == 3
    assert seen["fusion"] == 1
    assert set(seen.values()) == {0, 1, 3}
    assert [one.seen(said | {"decision": {"ordered_by": "tree"}}) for one in MECHANISMS][2] == 1


def test_a_report_shows_every_arm_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        *make_asked("skewed", "default", 100, said=make_explain(exact=9), workload="skewed_stream"),
        *make_asked("skewed", "full", 250, workload="skewed_stream"),
        *make_asked("skewed", "vllm", 200, workload="skewed_stream"),
    ]
    found = beside(asked, [Cold("skewed_stream", 900, 500.0, 250.0)])
    assert found["vllm"]["speedup_over_vllm"]["skewed"] == 2.0
    assert found["vllm"]["speedup_over_own_cold"] == {"skewed_stream": 2.0}
    assert found["vllm"]["cold_tokens_per_s"] == 1800
    assert json.loads(json.dumps(found)) == found
    exact = 'kvweave_prompt_tokens_total{source="exact"}'
    fired = [judge(one, {"skewed_stream": ({exact: 1}, {exact: 9})}, asked) for one in MECHANISMS]
    wrong = misses(headline(asked), fired)
    show(cells(asked), fired, wrong)
    said = capsys.readouterr().out
    assert "missed skewed_stream_speedup is 2.5, wanted 3 at least" in said
    assert "missed audit: NOT THERE YET" in said
    assert not any(line.startswith("tree") for line in wrong), "it grew"
    assert all(arm in said for arm in ("default", "full", "vllm"))


# ── what is asked ────────────────────────────────────────────────────────────


def test_no_list_begins_as_an_earlier_one_and_chunks_come_back() -> None:
    found = {
        "one": ["a", "b", "c"],
        "same first": ["a", "c", "b"],
        "far": ["x", "y", "z"],
        "near": ["b", "c", "a"],
        "none": [],
    }
    assert never_repeated(found, 9) == ["one", "near", "far"]
    assert never_repeated(found, 2) == ["one", "near"]
    assert never_repeated(found, 9, begun=["a"]) == ["far", "near"]


def test_conversations_talk_side_by_side_and_repeat_what_the_data_set_answered() -> None:
    talks = [
        Conversation(name, "d", ((f"{name} 1", "answer 1"), (f"{name} 2", "answer 2")), ())
        for name in "xy"
    ]
    workload = conversations(talks, "kb")
    steps = list(workload.steps(lambda kb, question: []))
    asked = [step.messages[-1]["content"] for step in steps]
    assert asked == ["x 1", "y 1", "x 2", "y 2", "x 1", "x 2"]
    assert [m["content"] for m in steps[3].messages] == ["y 1", "answer 1", "y 2"]
    assert workload.num_steps == len(steps)
    assert "conversation_id" not in steps[3].body()
    assert steps[5].body()["conversation_id"] == "x"
    assert "reuse" not in steps[3].body(), "defaults alone"


def test_conversations_come_from_all_domains_with_their_passages(tmp_path: Path) -> None:
    def turns(passage: str) -> list[dict[str, Any]]:
        contexts = [{"doc_id": passage}]
        return [{"user": f"{n}?", "answer": "so", "contexts": contexts} for n in range(2)]

    talks = [("1", "a", 2), ("2", "a", 2), ("3", "b", 1), ("4", "b", 2), ("5", "a", 2)]
    write_jsonl(
        tmp_path / "mtrag" / "conversations.jsonl.gz",
        [{"id": i, "domain": d, "turns": turns(f"p{i}")[:n]} for i, d, n in talks],
    )
    passages = [("a", "p1"), ("b", "far"), ("a", "far"), ("b", "p4"), ("c", "p1")]
    write_jsonl(
        tmp_path / "mtrag" / "passages.jsonl.gz",
        [{"domain": d, "doc_id": p, "title": "t", "text": "text" * 10} for d, p in passages],
    )
    chosen = mtrag_conversations(tmp_path, 3, 2)
    assert [talk.name for talk in chosen] == ["1", "4", "2"], "no short one, domains in turn"
    named = [p["id"] for p in mtrag_passages(tmp_path, chosen[:2], 100)]
    assert named == ["a/p1", "b/p4", "a/far"], "those needed, then others while there is room"


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(lines.encode()))


# ── over HTTP ────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def http(
    chat_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(tmp_path_factory.mktemp("home")))
        decoder, tokenizer = (
            load_decoder(chat_model_folder, device="cpu"),
            Tokenizer(chat_model_folder),
        )
        weave = Weave(ModelRuntime(decoder, tokenizer, "tiny"))  # with kvweave's own system prompt
        with serving(weave) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client


def test_a_client_sees_the_first_text_and_what_was_done(http: httpx.Client) -> None:
    documents = [{"title": "Zorbs", "text": "A zorb is 14 cm wide."}]
    step = Step("x", [{"role": "user", "content": "How wide?"}], documents=documents)
    reply = ask_chat(http, step.body())
    assert 0 < reply.ttft_ms <= reply.total_ms
    assert reply.text
    assert sum(reply.tokens.values()) == reply.prompt_tokens > 0
    with pytest.raises(Refused, match="400"):
        ask_chat(http, {**step.body(), "reuse": "no such way"})


def test_vllm_gets_the_tokens_that_kvweave_computes(
    http: httpx.Client, chat_model_folder: Path
) -> None:
    prompts = PromptIds(Tokenizer(chat_model_folder), lambda kb, question: [])
    documents = [{"title": "Zorbs", "text": "A zorb is 14 cm wide."}]
    user = {"role": "user", "content": "How wide?"}
    for step in (
        Step("x", [user], documents=documents),
        Step("x", [{"role": "system", "content": SYSTEM}, user]),
        Step("x", [user, {"role": "assistant", "content": "14 cm"}, user]),
    ):
        assert ask_chat(http, step.body()).prompt_tokens == len(prompts.of(step))


# ── servers ──────────────────────────────────────────────────────────────────


@pytest.fixture
def spinning(tmp_path: Path) -> Iterator[ServerProcess]:
    """A process whose child never rests."""
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINNING!r}])"
    command = [sys.executable, "-c", child]
    process = ServerProcess("spinning", command, {}, tmp_path / "log", tmp_path)
    yield process
    process.stop()


def test_a_server_is_frozen_with_its_children_while_another_has_its_turn(
    spinning: ServerProcess,
) -> None:
    until_it_spins(spinning)
    server = RunningServer(spinning, "http://127.0.0.1:1")  # nobody asks it
    with server.http, taking_turns([server, server], 1, 0.0):
        assert settle([spinning], 0.0)
    until_it_spins(spinning)  # it went on


def test_a_stopped_server_leaves_no_child(spinning: ServerProcess) -> None:
    until_it_spins(spinning)
    server, child = spinning.processes()
    spinning.freeze()
    spinning.stop()
    spinning.stop()
    assert not server.is_running()
    for _ in range(100):  # the kernel takes a moment
        if is_gone(child):
            return
        time.sleep(0.1)
    raise AssertionError("its child is still there")


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # nobody may have waited for it yet
    except psutil.NoSuchProcess:
        return True


def until_it_spins(process: ServerProcess) -> None:
    for _ in range(100):
        if not settle([process], 0.0) and len(process.processes()) == 2:
            return
    raise AssertionError("it rests")


def test_a_missing_vllm_is_said_in_a_line(tmp_path: Path) -> None:
    python, why = find_vllm(tmp_path / ".venv-vllm")
    assert python is None
    assert "make vllm" in why
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    python, why = find_vllm(tmp_path)
    assert python is None
    assert "not installed" in why


def test_a_missing_llama_cpp_is_said_in_a_line(tmp_path: Path) -> None:
    python, why = find_llamacpp(tmp_path / ".venv-llamacpp", "smollm2")
    assert python is None
    assert "make llamacpp" in why


@pytest.mark.skipif(
    find_llamacpp(REPO / ".venv-llamacpp", "smollm2")[0] is None, reason="make llamacpp was not run"
)
def test_llama_cpp_answers_the_same_tokens(tmp_path: Path) -> None:
    python, _ = find_llamacpp(REPO / ".venv-llamacpp", "smollm2")
    assert python is not None
    ids = Tokenizer(locate("smollm2")).encode_chat([{"role": "user", "content": "Say hello."}])
    server = start_llamacpp(python, "smollm2", tmp_path)
    try:
        reply = ask_ids(server.http, ids, 2, {"cache_prompt": True})
    finally:
        server.close()
    assert reply.prompt_tokens == len(ids)
    assert reply.text


def test_a_missing_contextpilot_is_said_in_a_line(tmp_path: Path) -> None:
    python, why = find_contextpilot(tmp_path / ".venv-contextpilot")
    assert python is None
    assert "make contextpilot" in why


def test_plain_transformers_answers_token_ids_greedily(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    ids = Tokenizer(chat_model_folder).encode_chat([{"role": "user", "content": "Say hello."}])
    server = start_transformers(Path(sys.executable), str(chat_model_folder), tmp_path)
    try:
        replies = [ask_ids(server.http, ids, 3, {}) for _ in range(2)]
    finally:
        server.close()
    assert [reply.prompt_tokens for reply in replies] == [len(ids)] * 2
    assert 1 <= replies[0].answer_tokens <= 3
    assert replies[0].text == replies[1].text, "greedy"


# ── what people would use instead ────────────────────────────────────────────


def test_times_are_of_questions_asked_alone_and_right_answers_of_all() -> None:
    questions = [DemoQuestion("?", (answer,), ()) for answer in ("24", "Patience", "73")]
    replies = [
        Reply(ms, 2 * ms, text, 600, None, 4)
        for ms, text in ((100, "It is 24."), (300, "Prudence"), (9000, "73 people"))
    ]
    row = row_of("vllm", replies, questions, 2)
    assert (row["ttft_p50_ms"], row["total_p50_ms"]) == (200, 400)
    assert (row["right"], row["asked"]) == (2, 3)
    cells = cells_of(row | {"requests_per_s": 0.5, "peak_mb": 4200})
    assert cells == [*WORDS["vllm"], "0.20 s", "0.29 s", "0.40 s", "0.50", "4.2 GB", "2 of 3"]
    assert len(cells) == len(COLUMNS)
    assert "–" in cells_of(row | {"requests_per_s": None, "peak_mb": 4200})


def test_a_result_file_begins_with_the_newest_comparison() -> None:
    named = {"date": "then", "commit": "c", "device": "d", "config": {}}
    rows = [{"system": "vllm", "right": 1, "answers": ["24"]}]
    found = newest_instead([{"date": "before"}, {**named, "instead": rows}, {"date": "now"}])
    assert found == {"instead": {**named, "rows": [{"system": "vllm", "right": 1}]}}
    assert newest_instead([{"date": "now"}]) == {}


def test_the_passages_of_the_comparison_have_the_titles_that_questions_name() -> None:
    titles = {passage["title"] for passage in valley()}
    for question in read_questions():
        assert titles_of(question) <= titles


def test_a_quick_run_asks_of_everything() -> None:
    assert min(QUICK) > 0
    assert QUICK.conversation_turns > 1, "or there is no history"
    assert MAX_TOKENS <= 16
