"""Questions of several kinds, from the data sets, as records that calibration measures on.

    kind            calibrated on                        held out
    single-hop      NQ, with passages of others          ClapNQ, with passages of others:
                    SQuAD: 10 and 20 chunks              6, 11 and 22 chunks
    multi-hop       HotpotQA: 3, 5 and 10 passages,      2Wiki, MuSiQue: 5 passages each
                    and with those of others 20          2Wiki, MuSiQue, CacheBlend's MuSiQue
    document        SQuAD's articles: 3, 6, 12 and 24    (CacheBlend's MuSiQue is cut, too)
                    pieces, and 24 long ones
    conversation    MTRAG, from the second turn on       MTRAG-UN

A kind is measured at several numbers of chunks: what a prompt has decides which of them speaks.

What is held out is never looked at when a packaged table is made. Passages longer than a chunk of a
knowledge base are cut as ingest cuts them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common.files import read_jsonl
from kvweave.calibrate.questions import (
    Passage,
    PastTurn,
    QuestionRecord,
    add_distractors,
    read_records,
)
from kvweave.corpus.chunker import Chunker
from kvweave.text.tokenizer import Tokenizer

NUM_CHUNKS = 5  # that a question finds in a knowledge base, by default
Reader = Callable[[Path, Tokenizer], list[QuestionRecord]]


class QuestionSet(NamedTuple):
    """A set of questions of one kind."""

    kind: str
    held_out: bool
    read: Reader
    first: int = 0
    count: int = 250


def _plain(name: str, context_tokens: int = 0) -> Reader:
    """A file of multi-passage records, filled up with passages of others."""

    def read(data: Path, tokenizer: Tokenizer) -> list[QuestionRecord]:
        records = [_cut(tokenizer, record) for record in read_records(data / name)]
        if context_tokens:
            records = add_distractors(records, tokenizer, context_tokens)
        return records

    return read


def _few(name: str, num_chunks: int = NUM_CHUNKS) -> Reader:
    """A file of multi-hop records with `num_chunks` passages of each: those that answer the
    question, and the first of the others, as they stand in the file."""

    def read(data: Path, tokenizer: Tokenizer) -> list[QuestionRecord]:
        made = []
        for raw in read_jsonl(data / name):
            every = raw["passages"]
            needed = [i for i, p in enumerate(every) if p["is_supporting"]]
            others = [i for i, p in enumerate(every) if not p["is_supporting"]]
            taken = sorted(needed + others[: max(0, num_chunks - len(needed))])
            named = [(every[i]["title"], every[i]["text"]) for i in taken]
            made.append(QuestionRecord(raw["question"], (), pieces_of(tokenizer, named)))
        return made

    return read


def _conversations(data: Path, tokenizer: Tokenizer) -> list[QuestionRecord]:
    """Turns behind what was said before, with the chunks of the turn right before it."""
    found: dict[tuple[str, int], QuestionRecord] = {}
    made = []
    for raw in read_jsonl(data / "mtrag/mtrag_qa_elser_top5.jsonl.gz"):
        passages = pieces_of(tokenizer, [(p["title"], p["text"]) for p in raw["passages"]])
        turn, talk = int(raw["turn"]), str(raw["conversation"])
        found[talk, turn] = QuestionRecord(raw["question"], (), passages[:NUM_CHUNKS])
        said = [PastTurn(asked, answer) for asked, answer in raw["history"]]
        if not said:
            continue
        before = found.get((talk, turn - 1))
        if before is not None:
            said[-1] = replace(said[-1], passages=before.passages[:3])
        made.append(QuestionRecord(raw["question"], (), _fresh(passages, said), tuple(said)))
    return made


def _unanswerable(data: Path, tokenizer: Tokenizer) -> list[QuestionRecord]:
    """MTRAG-UN: text alone in the history; too few passages are filled up with other ones."""
    texts = {
        (p["domain"], p["doc_id"]): (p["title"], p["text"])
        for p in read_jsonl(data / "mtrag/passages.jsonl.gz")
    }
    raws = list(read_jsonl(data / "mtrag/mtrag_un_reference_tasks.jsonl.gz"))
    spare: dict[str, list[Passage]] = {}
    own: list[tuple[Passage, ...]] = []
    for raw in raws:
        named = [texts[raw["domain"], doc] for doc in raw["contexts"]]
        own.append(pieces_of(tokenizer, named))
        spare.setdefault(raw["domain"], []).extend(own[-1][:2])
    made = []
    for number, (raw, pieces) in enumerate(zip(raws, own, strict=True)):
        pool = spare[raw["domain"]]
        more = [pool[(7 * number + i) % len(pool)] for i in range(NUM_CHUNKS)]
        passages = tuple(dict.fromkeys([*pieces, *more]))
        *before, last = raw["history"]
        said = [
            PastTurn(asked["text"], answer["text"])
            for asked, answer in zip(before[::2], before[1::2], strict=False)
        ]
        made.append(QuestionRecord(last["text"], (), _fresh(passages, said), tuple(said)))
    return made


def _document(num_chunks: int, chunk_tokens: int = 256) -> Reader:
    """SQuAD's articles, whole, cut as ingest cuts documents: the piece that has the answer, and the
    pieces around it. What a question finds in long documents are often neighbours in them."""

    def read(data: Path, tokenizer: Tokenizer) -> list[QuestionRecord]:
        texts: dict[str, list[tuple[str, str]]] = {}
        for p in read_jsonl(data / "squad_v1.1_dev/paragraphs.jsonl.gz"):
            texts.setdefault(p["title"], []).append((p["pid"], p["text"].strip()))
        pieces: dict[str, tuple[Passage, ...]] = {}
        starts: dict[str, int] = {}  # which piece a paragraph begins in
        for title, paragraphs in texts.items():
            whole = "\n\n".join(text for _, text in paragraphs)
            cut = list(Chunker(tokenizer, chunk_tokens).cut(title, whole))
            pieces[title] = tuple(Passage(whole[c.start : c.end], title) for c in cut)
            at = 0
            for pid, text in paragraphs:
                starts[pid] = next(i for i, c in enumerate(cut) if c.end > at)
                at += len(text) + 2
        made = []
        for raw in read_jsonl(data / "squad_v1.1_dev/questions.jsonl.gz"):
            title = raw["pid"].rpartition("#")[0]
            every = pieces[title]
            first = max(0, min(starts[raw["pid"]] - num_chunks // 2, len(every) - num_chunks))
            made.append(QuestionRecord(raw["question"], (), every[first : first + num_chunks]))
        return made

    return read


def _fresh(passages: Sequence[Passage], said: Sequence[PastTurn]) -> tuple[Passage, ...]:
    """What a turn brings: what the history holds is not brought again."""
    held = {passage.text for turn in said for passage in turn.passages}
    return tuple(p for p in passages[:NUM_CHUNKS] if p.text not in held)


def _cut(tokenizer: Tokenizer, record: QuestionRecord) -> QuestionRecord:
    """The same with chunks as ingest would make them. Answers are not looked for."""
    named = [(p.title, p.text) for p in record.passages]
    return QuestionRecord(record.question, (), pieces_of(tokenizer, named))


def pieces_of(tokenizer: Tokenizer, named: Sequence[tuple[str, str]]) -> tuple[Passage, ...]:
    chunker = Chunker(tokenizer)
    return tuple(
        Passage(text[chunk.start : chunk.end], title)
        for title, text in named
        for chunk in chunker.cut(title, text)
        if text[chunk.start : chunk.end].strip()
    )


SETS = {
    "nq": QuestionSet("single-hop", False, _plain("nq_oracle/nq_open_oracle.jsonl.gz", 700)),
    # 0-79 of the multi-hop sets were used to tune `weave`
    "hotpot": QuestionSet(
        "multi-hop", False, _plain("hotpotqa/hotpotqa_distractor.jsonl.gz"), first=80, count=600
    ),
    "hotpot-5": QuestionSet(
        "multi-hop", False, _few("hotpotqa/hotpotqa_distractor.jsonl.gz"), first=80, count=600
    ),
    "squad-long": QuestionSet(
        "single-hop",
        False,
        _plain("squad_v1.1_dev/squad_bm25_10passages.jsonl.gz", 3000),
        count=400,
    ),
    "hotpot-3": QuestionSet(
        "multi-hop", False, _few("hotpotqa/hotpotqa_distractor.jsonl.gz", 3), first=80, count=600
    ),
    "hotpot-20": QuestionSet(
        "multi-hop",
        False,
        _plain("hotpotqa/hotpotqa_distractor.jsonl.gz", 2900),
        first=80,
        count=400,
    ),
    "squad-10": QuestionSet(
        "single-hop", False, _plain("squad_v1.1_dev/squad_bm25_10passages.jsonl.gz"), count=400
    ),
    "squad-doc": QuestionSet("document", False, _document(6), count=800),
    "squad-doc-long": QuestionSet("document", False, _document(24), count=400),
    "squad-doc-3": QuestionSet("document", False, _document(3), count=800),
    "squad-doc-12": QuestionSet("document", False, _document(12), count=400),
    # pieces as long as a user may cut them: prompts of 8,000 tokens
    "squad-doc-8k": QuestionSet("document", False, _document(24, 700), count=200),
    "mtrag": QuestionSet("conversation", False, _conversations),
    "clapnq": QuestionSet("single-hop", True, _plain("clapnq_dev/clapnq_dev.jsonl.gz", 900)),
    "clapnq-10": QuestionSet("single-hop", True, _plain("clapnq_dev/clapnq_dev.jsonl.gz", 1700)),
    "clapnq-20": QuestionSet("single-hop", True, _plain("clapnq_dev/clapnq_dev.jsonl.gz", 3400)),
    "2wiki": QuestionSet("multi-hop", True, _plain("2wikimultihopqa/2wiki.jsonl.gz"), first=80),
    "musique": QuestionSet("multi-hop", True, _plain("musique/musique_ans.jsonl.gz"), first=80),
    "2wiki-5": QuestionSet("multi-hop", True, _few("2wikimultihopqa/2wiki.jsonl.gz"), first=80),
    "musique-5": QuestionSet("multi-hop", True, _few("musique/musique_ans.jsonl.gz"), first=80),
    "musique-s": QuestionSet("multi-hop", True, _plain("cacheblend_musique_s/musique_s.jsonl.gz")),
    "mtrag-un": QuestionSet("conversation", True, _unanswerable),
}


def read_set(data: Path, tokenizer: Tokenizer, name: str) -> Iterator[QuestionRecord]:
    """The questions of a set that have something to reuse."""
    chosen = SETS[name]
    every: list[QuestionRecord] = chosen.read(data, tokenizer)
    # something in the prompt can be reused that is not exact: the first chunk is, without a history
    records = [r for r in every if len(r.passages) > (0 if r.history else 1)]
    yield from records[chosen.first : chosen.first + chosen.count]


def used_passages(data: Path) -> list[dict[str, Any]]:
    """Those of MTRAG's passages that these sets name: what a small machine must carry."""
    raws = read_jsonl(data / "mtrag/mtrag_un_reference_tasks.jsonl.gz")
    used = {(raw["domain"], doc) for raw in raws for doc in raw["contexts"]}
    return [
        p
        for p in read_jsonl(data / "mtrag/passages.jsonl.gz")
        if (p["domain"], p["doc_id"]) in used
    ]
