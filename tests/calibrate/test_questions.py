"""Questions from files: spans land on the right tokens, and bad lines are named."""

import gzip
import json
from pathlib import Path

import pytest

from kvweave.calibrate.questions import (
    Passage,
    QuestionRecord,
    add_distractors,
    encode_passage,
    make_case,
    read_questions,
    read_records,
)
from kvweave.errors import CorpusError
from kvweave.text.tokenizer import Tokenizer

TEXT = "  Die Größe von 東京 ist 😀 naïve. Drain the 👩‍🚀 node.\n"


@pytest.fixture(scope="module")
def tokenizer(chat_model_folder: Path) -> Tokenizer:
    return Tokenizer(chat_model_folder)


def span_of(words: str, text: str = TEXT) -> tuple[int, int]:
    return text.index(words), text.index(words) + len(words)


@pytest.mark.parametrize("words", ["Größe", "東京", "😀", "naïve", "👩‍🚀", "node", "Die"])
@pytest.mark.parametrize("title", ["", "Über 東京"])
def test_a_span_of_any_bytes_is_mapped_to_the_tokens_that_spell_it(
    tokenizer: Tokenizer, words: str, title: str
) -> None:
    ids, marked = encode_passage(tokenizer, Passage(TEXT, title, (span_of(words),)))
    spelled = tokenizer.decode([ids[i] for i in marked])
    assert words in spelled
    assert len(spelled.strip()) <= len(words) + 3  # a token may reach over the edge, not far
    assert marked == list(range(marked[0], marked[-1] + 1))


def test_gold_positions_count_from_the_start_of_the_prompt(tokenizer: Tokenizer) -> None:
    passages = (Passage("The quick fox."), Passage(TEXT, "note", (span_of("node"),)))
    case = make_case(tokenizer, QuestionRecord("how?", ("node",), passages))
    prompt = [*case.preamble, *(i for chunk in case.chunks for i in chunk), *case.question]
    assert "node" in tokenizer.decode([prompt[i] for i in case.gold])
    assert len(prompt) == case.num_tokens


def test_control_tokens_in_a_passage_are_characters(tokenizer: Tokenizer) -> None:
    passage = Passage("a <|im_end|> b", "", ((2, 12),))
    ids, marked = encode_passage(tokenizer, passage)
    assert not set(ids) & tokenizer.special_ids
    assert "<|im_end|>" in tokenizer.decode([ids[i] for i in marked])


def test_distractors_fill_up_and_never_spell_an_answer(tokenizer: Tokenizer) -> None:
    texts = [f"passage number {i} of the lazy dog" for i in range(12)]
    texts[5] += " with the answer Node!"
    records = [QuestionRecord("q?", ("node",), (Passage(text),)) for text in texts]
    first, *_ = made = add_distractors(records, tokenizer, 100)
    lengths = [sum(len(encode_passage(tokenizer, p)[0]) for p in r.passages) for r in made]
    assert min(lengths) >= 100
    others = [p.text for r in made[:5] for p in r.passages]
    assert texts[5] not in others
    assert made == add_distractors(records, tokenizer, 100)
    assert len({p.text for p in first.passages}) == len(first.passages)


def test_records_come_from_plain_and_packed_files(tmp_path: Path) -> None:
    record = {
        "question": "who?",
        "answers": ["she", " "],
        "passages": [
            {"title": "a", "text": "she", "answer_spans": [[0, 3]]},
            {"text": "he", "answer_spans": [[0, 2]], "unambiguous": False},
        ],
    }
    line = json.dumps(record) + "\n\n"
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    wanted = QuestionRecord("who?", ("she",), (Passage("she", "a", ((0, 3),)), Passage("he")))
    assert list(read_records(tmp_path / "a.jsonl")) == [wanted]
    assert list(read_records(tmp_path / "a.jsonl.gz")) == [wanted]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "a.jsonl line 1 is no JSON"),
        ("[]", "a.jsonl line 1 is no JSON object"),
        ('{"question": "q"}', "no 'passages'"),
        ('{"question": "q", "passages": [{"text": " "}]}', "a passage is empty"),
        (
            '{"question": "q", "passages": [{"text": "ab", "answer_spans": [[1, 3]]}]}',
            "an answer span lies outside its passage",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(CorpusError) as refused:
        list(read_records(tmp_path / "a.jsonl"))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_questions_are_lines_or_objects(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("why?\n\n  how? \n")
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "answers": ["she"]}\n')
    (tmp_path / "bad.jsonl").write_text('{"query": "who?"}\n')
    assert list(read_questions(tmp_path / "q.txt")) == [
        QuestionRecord("why?"),
        QuestionRecord("how?"),
    ]
    assert list(read_questions(tmp_path / "q.jsonl")) == [QuestionRecord("who?", ("she",))]
    with pytest.raises(CorpusError, match="line 1 has no 'question'"):
        list(read_questions(tmp_path / "bad.jsonl"))
    (tmp_path / "broken.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(CorpusError, match="cannot read"):
        list(read_questions(tmp_path / "broken.txt.gz"))
