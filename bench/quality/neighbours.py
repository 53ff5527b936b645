"""Which passages are nearest to each passage of the quality benches?

A GPU box with bare PyTorch has no embedder, so the lists are made here and carried there:

    python bench/quality/neighbours.py --data ../shared/data --out carry/data/neighbours.json.gz
    python bench/quality/run.py --data carry/data --neighbours carry/data/neighbours.json.gz …

Neighbours come from the whole knowledge base (wiki_kb, 35,745 passages), never the passage itself.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import numpy as np

from common.files import read_jsonl
from common.vector_cache import cached_vectors
from kvweave.cli.knowledge_bases import find_embedder
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from quality.data import read_questions

COUNT = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=300, help="per set")
    args = parser.parse_args()
    embedder, tokenizer = find_embedder("minilm"), Tokenizer(locate(args.model))
    corpus = [(p["title"], p["text"]) for p in read_jsonl(args.data / "wiki_kb/passages.jsonl.gz")]
    texts = [_text(p) for p in corpus]
    vectors = cached_vectors("wiki_kb", embedder, texts, embedder.embed_passages)
    place = {text: i for i, text in enumerate(texts)}
    questions = [
        question
        for name in ("2wiki", "hotpot", "musique")
        for question in read_questions(args.data, tokenizer, name, args.questions)
    ]
    absent = sorted({_text(p) for q in questions for p in q.passages} - place.keys())
    print(f"{len(absent)} passages are not in the knowledge base and are embedded now")
    more = cached_vectors("quality", embedder, absent, embedder.embed_passages) if absent else None
    found: dict[str, list[list[int]]] = {}
    for question in questions:
        rows = []
        for passage in question.passages:
            text = _text(passage)
            if text in place:
                vector = vectors[place[text]]
            else:
                assert more is not None
                vector = more[absent.index(text)]
            order = np.argsort(-(vectors @ vector))[: COUNT + 8]
            near = [int(i) for i in order if texts[i] != text and corpus[i][1] != passage[1]]
            rows.append(near[:COUNT])
        found[f"{question.set_name}/{question.number}"] = rows
    used = {i: corpus[i] for rows in found.values() for row in rows for i in row}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(args.out, "wt", encoding="utf-8") as file:
        json.dump({"passages": used, "nearest": found}, file)
    print(f"{len(found)} questions, {args.out.stat().st_size / 1e6:.1f} MB")


def _text(passage: tuple[str, str]) -> str:
    title, text = passage
    return f"{title}\n{text.strip()}"


if __name__ == "__main__":
    main()
