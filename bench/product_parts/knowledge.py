"""The knowledge bases of bench/product.py: which passages, and their folder, made once.

Chunk KV is made by `kvweave ingest --kv` with its defaults, which is what an upload over HTTP does
too. A server makes front copies of what its questions bring, so there is none to begin with. The
folder is kept by the hash of its passages; ingest looks at it again in every run, so that KV which
another version of kvweave made is made anew. Each server gets a copy of its own.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.files import read_jsonl
from product_parts.servers import default_env

Record = dict[str, str]  # id, title, text


class Conversation(NamedTuple):
    """The first turns of an MTRAG conversation."""

    name: str
    domain: str
    turns: tuple[tuple[str, str], ...]  # what the user said, and the answer of the data set
    passages: tuple[str, ...]  # ids of those that these turns were answered from


def squad_passages(data: Path, most_chars: int) -> list[Record]:
    """Whole articles of SQuAD, in the file's order, up to about so many characters."""
    found: list[Record] = []
    chars = 0
    for record in read_jsonl(data / "squad_v1.1_dev" / "paragraphs.jsonl.gz"):
        if chars >= most_chars:
            break
        found.append({"id": record["pid"], "title": record["title"], "text": record["text"]})
        chars += len(record["text"])
    return found


def squad_questions(data: Path, passages: Sequence[Record]) -> dict[str, list[str]]:
    """Questions by the passage that answers them, for passages that have some."""
    found: dict[str, list[str]] = {passage["id"]: [] for passage in passages}
    for record in read_jsonl(data / "squad_v1.1_dev" / "questions.jsonl.gz"):
        if record["pid"] in found:
            found[record["pid"]].append(record["question"])
    return {pid: questions for pid, questions in found.items() if questions}


def mtrag_conversations(data: Path, count: int, turns: int) -> list[Conversation]:
    """One conversation after another in the file's order, of another domain each as long as there
    is one."""
    records = list(read_jsonl(data / "mtrag" / "conversations.jsonl.gz"))
    long_enough = [r for r in records if len(r["turns"]) >= turns]
    taken: list[dict[str, Any]] = []
    while len(taken) < min(count, len(long_enough)):
        domains = [r["domain"] for r in taken]
        fewest = min(domains.count(r["domain"]) for r in long_enough if r not in taken)
        taken.append(
            next(r for r in long_enough if r not in taken and domains.count(r["domain"]) == fewest)
        )
    return [
        Conversation(
            str(record["id"]),
            record["domain"],
            tuple((turn["user"], turn["answer"]) for turn in record["turns"][:turns]),
            tuple(c["doc_id"] for turn in record["turns"][:turns] for c in turn["contexts"]),
        )
        for record in taken
    ]


def mtrag_passages(
    data: Path, conversations: Sequence[Conversation], most_chars: int
) -> list[Record]:
    """What the conversations were answered from, and others of their domains up to about so many
    characters."""
    wanted = {(c.domain, passage) for c in conversations for passage in c.passages}
    domains = {c.domain for c in conversations}
    needed: list[Record] = []
    others: dict[str, list[Record]] = {domain: [] for domain in sorted(domains)}
    for record in read_jsonl(data / "mtrag" / "passages.jsonl.gz"):
        if record["domain"] not in domains:
            continue
        name = f"{record['domain']}/{record['doc_id']}"
        made = {"id": name, "title": record["title"], "text": record["text"]}
        if (record["domain"], record["doc_id"]) in wanted:
            needed.append(made)
        else:
            others[record["domain"]].append(made)
    room = most_chars - sum(len(r["text"]) for r in needed)
    return needed + list(_in_turn(list(others.values()), room))


def _in_turn(lists: Sequence[list[Record]], room_chars: int) -> Iterator[Record]:
    """Records of each list in turn until the room is taken."""
    for row in range(max(map(len, lists))):
        for records in lists:
            if row < len(records):
                if room_chars <= 0:
                    return
                room_chars -= len(records[row]["text"])
                yield records[row]


def prepare(
    name: str, passages: Sequence[Record], model: str, cache: Path, home_folder: Path
) -> Path:
    """The folder of a knowledge base of these passages, with chunk KV; minutes the first time."""
    lines = "".join(json.dumps(passage) + "\n" for passage in passages)
    digest = hashlib.blake2b(f"{model}\n{lines}".encode(), digest_size=8).hexdigest()
    place = cache / f"product-{name}-{digest}"
    folder, source = place / "kb", place / "passages.jsonl"
    place.mkdir(parents=True, exist_ok=True)
    source.write_text(lines)
    tokens = sum(len(passage["text"]) for passage in passages) // 4
    state = "looking at" if folder.is_dir() else "making chunk KV of"
    print(f"{state} {name}: {len(passages)} passages, about {tokens:,} tokens", flush=True)
    command = [sys.executable, "-m", "kvweave", "ingest", str(source), "--kb", str(folder), "--kv"]
    command += ["--model", model]
    done = subprocess.run(command, env=default_env(home_folder), check=False)
    if done.returncode:
        raise SystemExit(f"kvweave ingest of {name} ended with {done.returncode}")
    return folder


def copy_of(folder: Path, root: Path, name: str) -> None:
    """Give a server a copy of its own, which it may write to."""
    shutil.copytree(folder, root / name)
