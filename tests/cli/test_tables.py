"""Tables as a terminal of some width and as a pipe show them."""

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from kvweave.cli.plan_view import declined_lines, options_table, plan_line, spans_table
from kvweave.cli.tables import cut_middle
from kvweave.plan.plan import Option, Plan, Span, SpanKind
from kvweave.reasons import Reason
from kvweave.types import ChunkId
from worlds.tiny_corpus import WordEmbedder, make_folder, make_tokenizer

COMMANDS = {
    "docs ls": ("--kb", "{kb}"),
    "models ls": (),
    "kb ls": ("--config", "{settings}"),
}


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A knowledge base of documents with long paths and a long title with brackets."""
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.ingest.pipeline import ingest

    folder = tmp_path_factory.mktemp("a-folder-with-a-name-that-fills-half-of-a-line")
    make_folder(folder / "documents" / "of-the-second-quarter", 3)
    title = "A title that says [bold]all that its document says, and then says it once more"
    (folder / "documents" / "long.md").write_text(f"# {title}\n\nA sentence.\n")
    parts = {"tokenizer": make_tokenizer(folder / "model"), "embedder": WordEmbedder()}
    with KnowledgeBase.open(folder / "kbs" / "notes", create=True, **parts) as made:
        ingest(made, [folder / "documents"])
    (folder / "kvweave.toml").write_text(f'[server]\nkb_root = "{folder / "kbs"}"\n')
    return folder / "kbs" / "notes"


def lines_on_terminal(columns: int, command: list[str]) -> list[str]:
    """What a command writes to a terminal that is so wide, without colours."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(command, stdout=theirs, stdin=theirs, env={**env, "TERM": "xterm"}):
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            written += piece
            if not piece:
                break
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode()).splitlines()


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_row_is_one_line_of_the_terminal(kb: Path, name: str, columns: int) -> None:
    lines = lines_on_terminal(columns, _command(kb, name))
    assert all(len(line) <= columns for line in lines), lines
    rows = {"docs ls": 4, "models ls": 4, "kb ls": 1}[name]
    assert len(lines) == 1 + rows + 1, "headings, rows, one line below"


def test_paths_keep_their_end_on_a_terminal_and_all_of_them_in_a_pipe(kb: Path) -> None:
    shown = lines_on_terminal(80, _command(kb, "docs ls"))
    assert any(re.search(r"/\S*…\S*doc001\.md$", line.rstrip()) for line in shown), shown
    piped = subprocess.run(_command(kb, "docs ls"), capture_output=True, text=True, check=True)
    rows = piped.stdout.splitlines()
    assert len(rows) == 1 + 4 + 1
    folder = kb.parents[1] / "documents" / "of-the-second-quarter"
    assert any(row.rstrip().endswith(str(folder / "doc001.md")) for row in rows)
    assert "says [bold]all that its document says, and then says it once more" in piped.stdout


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [
        ("/a/b.md", 10, "/a/b.md"),
        ("/home/me/notes/today.md", 13, "/hom…today.md"),
        ("/日本語の文書/今日の記録.md", 13, "/日 … 記録.md"),
        ("abc", 1, "…"),
    ],
)
def test_what_is_too_long_loses_its_middle(text: str, width: int, cut: str) -> None:
    assert cut_middle(text, width) == cut


def _command(kb: Path, name: str) -> list[str]:
    settings = kb.parents[1] / "kvweave.toml"
    options = [option.format(kb=kb, settings=settings) for option in COMMANDS[name]]
    return [sys.executable, "-m", "kvweave", *name.split(), *options]


def test_a_plan_says_in_one_line_what_it_does_and_shows_no_empty_column() -> None:
    plan = make_plan()
    assert plan_line(plan) == (
        "fused weave at 0.25: 152 of 706 tokens computed, about 0.49 s (all of them: 1.27 s)"
    )
    assert declined_lines(plan) == ["not calibrated for this model: epic, qcfuse"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(spans_table(plan))
    console.print(options_table(plan))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == [
        "part      tokens  fate      from    load  why",
        "preamble      23  exact                   exact path in the knowledge tree",
        "chunk 1      664  fused     disk  8.8 MB  stored",
        "question      19  computed                always computed",
        "way                    seconds  rows    load",
        "→ fused weave at 0.25    0.490   152  8.8 MB",
        "  full                   1.270   706",
    ]


def make_plan() -> Plan:
    """A plan that fuses one chunk, beside full prefill and two strategies without a price."""
    declined = [
        Option(name, None, 0, 0, Reason.NOT_CALIBRATED) for name in ("fused epic", "fused qcfuse")
    ]
    chosen = Option("fused weave", 0.49, 152, 8_800_000, Reason.CHEAPEST, ratio=0.25)
    full = Option("full", 1.27, 706, 0, Reason.DEARER)
    spans = (
        Span(SpanKind.EXACT, 0, 23, None, Reason.IN_TREE),
        Span(SpanKind.FUSED, 23, 664, ChunkId("c"), Reason.STORED, "disk", 8_800_000),
        Span(SpanKind.COMPUTED, 687, 19, None, Reason.ALWAYS),
    )
    return Plan(spans, chosen, (full, chosen, *declined), "weave", (), "given", (), 23)
