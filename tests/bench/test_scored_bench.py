"""Answers that are scored: the scores themselves, the prompts, and what `auto` serves."""

import gzip
import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from kvweave.calibrate.questions import Passage
from kvweave.text.tokenizer import Tokenizer
from quality import asked, needles, scored
from quality.scored_table import read_values, serve, summarise
from quality.scores import contains, rouge_l, score, share_contained


def test_scores_compare_words_and_take_the_best_known_answer() -> None:
    found = score("The Eiffel Tower.", ["a tower", "eiffel tower"])
    assert found == {"em": 1.0, "f1": 1.0, "rouge_l": pytest.approx(0.8), "contained": 1.0}
    assert score("Paris", ["London"]) == dict.fromkeys(found, 0.0)
    assert score("in Paris, France", ["Paris"]) == {
        "em": 0.0, "f1": 0.5, "rouge_l": 0.5, "contained": 1.0
    }  # fmt: skip


def test_rouge_counts_words_in_order_wherever_they_stand() -> None:
    assert rouge_l("a b c d", "a x c d") == 0.75
    assert rouge_l("d c b a", "a b c d") == 0.25
    assert rouge_l("", "a b") == rouge_l("a b", "") == 0.0


def test_an_answer_is_contained_as_whole_words() -> None:
    assert contains("It was 1942, they say", "1942")
    assert not contains("It was 19423", "1942")
    assert not contains("anything", "the")  # nothing is left of it
    assert share_contained("1234567, 7654321", ["1234567", "7654321", "1", "2"]) == 0.5


def answer(text: str, lead: float = 1.0, work: float = 0.5) -> dict[str, Any]:
    return {"text": text, "lead": lead, "work": work, "kl": 0.1, "flips": False, "nll": 1.0}


def line(name: str, number: int, reused: dict[str, Any], auto: tuple[str, float]) -> dict[str, Any]:
    return {
        "set": name, "number": number, "golds": ["red house"], "needs_all": False,
        "is_line": True, "auto": {"auto": auto},
        "ways": {"full": answer("Red house\nfor sure", work=1.0), "weave:0.15": reused},
    }  # fmt: skip


def test_auto_is_exact_where_the_gate_refuses_and_where_a_call_is_close() -> None:
    wrong = answer("blue", lead=0.1)
    taken = serve(line("a", 0, wrong, ("weave:0.15", 0.05)))["auto"]
    assert (taken["f1"], taken["work"], taken["kl"]) == (0.0, 0.5, 0.1)
    close = serve(line("a", 0, wrong, ("weave:0.15", 0.2)))["auto"]
    assert (close["f1"], close["work"], close["kl"], close["close"]) == (100.0, 1.5, 0.0, True)
    refused = serve(line("a", 0, wrong, ("full", 0.0)))["auto"]
    assert (refused["em"], refused["work"], refused["exact"]) == (100.0, 1.0, True)


def test_the_worst_set_counts_and_differences_are_those_of_the_same_questions() -> None:
    wrong, right = answer("blue"), answer("the red house")
    lines = [line("a", i, right, ("weave:0.15", 0.0)) for i in range(4)]
    lines += [line("b", i, [wrong, right][i % 2], ("weave:0.15", 0.0)) for i in range(4)]
    found = summarise(lines)
    assert found["questions"] == {"a": 4, "b": 4, "all": 8}
    assert found["f1_auto_worst"] == -50.0
    rows = {(row["set"], row["way"]): row for row in found["rows"]}
    assert rows["a", "auto"]["less"]["f1"] == [0.0, 0.0, 0.0]
    mean, low, high = rows["b", "weave:0.15"]["less"]["f1"]
    assert low < mean == -50.0 < high
    assert rows["all", "weave:0.15"]["f1"] == 75.0


def test_files_of_one_run_are_joined_and_a_line_that_was_cut_short_is_left_out(
    tmp_path: Path,
) -> None:
    head = {"model": "m", "dtype": "bfloat16", "device": "d", "commit": "c", "asked": 2}
    for name, ways, end in (("one", ["full", "auto"], ""), ("two", ["full"], '{"set": "b", "nu')):
        texts = [json.dumps({**head, "ways": ways}), json.dumps({"set": name}), end]
        (tmp_path / name).write_text("\n".join(texts))
    found, lines = read_values([tmp_path / "one", tmp_path / "two"])
    assert (found["ways"], found["asked"]) == (["full", "auto"], 4)
    assert lines == [{"set": "one"}, {"set": "two"}]
    (tmp_path / "two").write_text(json.dumps({**head, "ways": [], "dtype": "float32"}) + "\n")
    with pytest.raises(SystemExit, match="differ in dtype"):
        read_values([tmp_path / "one", tmp_path / "two"])


def write_squad(data: Path) -> None:
    folder = data / "squad_v1.1_dev"
    folder.mkdir()
    with gzip.open(folder / "questions.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": "used"}) + "\n")
    passages = [
        {"title": f"T{i}", "text": f"Anna {i} lives in house {i}.", "is_supporting": i == 7}
        for i in range(9)
    ]
    with gzip.open(folder / "squad_bm25_10passages.jsonl.gz", "wt") as file:
        for i in range(502):
            raw = {"question": f"Who {i}?", "answers": ["Anna"], "passages": passages}
            file.write(json.dumps({"id": "used" if i == 3 else str(i), **raw}) + "\n")


def test_prompts_have_five_chunks_with_the_gold_one_and_skip_what_was_tuned_on(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    write_squad(tmp_path)
    tokenizer = Tokenizer(chat_model_folder)
    made = asked.make_asked(tmp_path, tokenizer, "squad", 100)
    assert len(made.cases) == 1, "502 records, one of them used, 500 in front"
    case = made.cases[0]
    texts = [tokenizer.decode(list(chunk)) for chunk in case.chunks]
    assert len(texts) == 5
    assert sum("Anna 7" in text for text in texts) == 1
    assert case.answers == ("Anna",)
    tuning = asked.make_asked(tmp_path, tokenizer, "squad", 100, tuning=True)
    assert len(tuning.cases) == 100
    assert "Who 501?" in tokenizer.decode(list(case.question))


@pytest.mark.parametrize("task", ["keys", "values", "queries", "hops"])
def test_needles_lie_in_chunks_of_their_own_behind_the_first(task: str) -> None:
    words = ([f"red{i}" for i in range(9)], [f"fox{i}" for i in range(9)])
    rng = random.Random(0)
    hidden = needles.TASKS[f"{task}-2k"](rng, words)
    hay = [(Passage(f"One thing {i}. Another thing. A third one."), 100) for i in range(40)]
    record = needles._hide(rng, hidden, hay, 2000)
    holds = [sum(s in p.text for s in hidden.sentences) for p in record.passages]
    assert len(holds) == 20
    assert (holds[0], max(holds), sum(holds)) == (0, 1, len(hidden.sentences))
    whole = " ".join(p.text for p in record.passages)
    assert all(value in whole for value in record.answers)
    order = [whole.index(sentence) for sentence in hidden.sentences]
    assert order == sorted(order)


def test_every_way_answers_and_one_that_recomputes_all_answers_as_full_prefill_does(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    write_squad(tmp_path)
    made = asked.make_asked(tmp_path, Tokenizer(chat_model_folder), "squad", 1)
    args = Namespace(
        model=str(chat_model_folder), device="cpu", dtype="float32",
        ways="full,auto,reuse,weave:1,cacheblend:0.15,isolated/epic:0.15",
    )  # fmt: skip
    task = scored.Task("squad", 0, made.style._replace(max_tokens=6), made.cases[0])
    found = scored.Answers(args).ask(task)
    ways = found["ways"]
    assert list(ways) == [
        "full", "reuse", "weave:1", "cacheblend:0.15", "isolated/epic:0.15"
    ]  # fmt: skip
    assert ways["weave:1"]["text"] == ways["full"]["text"]
    assert ways["weave:1"]["kl"] < 1e-5 < ways["reuse"]["kl"]
    assert found["auto"] == {"auto": ("full", 0.0)}, "this model has no tables"
    assert json.loads(json.dumps(found))["golds"] == ["Anna"]
    assert ways["full"]["work"] > ways["cacheblend:0.15"]["work"] > ways["reuse"]["work"]
