"""An explain record for people: every token in its state, every figure in its place."""

from dataclasses import replace

from kvweave.cli.explain_view import as_document, show
from kvweave.fuse.record import ChunkRecord, FuseRecord, Stages
from kvweave.fuse.request import State

RECORD = FuseRecord(
    strategy="weave",
    ratio=0.5,
    encoding="filler:4",
    token_ids=(1, 2, 3, 4, 5),
    states=(State.EXACT, State.REUSED, State.RECOMPUTED, State.COMPUTED, State.COMPUTED),
    chunks=(
        ChunkRecord(1, 2, State.REUSED, 1, "disk", None),
        ChunkRecord(3, 1, State.COMPUTED, 0, None, "absent"),
    ),
    work=0.6,
    loaded_bytes={"disk": 2_500_000},
    stages=Stages(retrieve=1.0, load=2.0, select=3.0, compute=4.0),
)
TEXTS = ["System ", "drain ", "the ", "node", "?"]


def test_without_colour_marks_say_what_each_token_is() -> None:
    told = show(RECORD, TEXTS, colour=False)
    assert "[=System =][.drain .][#the #][+node?+]" in told
    assert "weave at 0.5, filler:4 chunk KV" in told
    assert "= exact 1 (20%) · . reused 1 (20%) · # recomputed 1 (20%) · + computed 2 (40%)" in told
    assert "chunk 1: 2 tokens reused, 1 recomputed, from disk" in told
    assert "chunk 2: 1 tokens computed (absent)" in told
    assert "load 2 ms · select 3 ms · compute 4 ms · 60% of the rows" in told
    assert "2.5 MB from disk" in told


def test_with_colour_the_text_is_the_prompt_and_the_states_differ() -> None:
    told = show(RECORD, TEXTS, colour=True)
    colours = {part[:4] for part in told.split("\x1b[")[1:] if not part.startswith("0m")}
    assert len(colours) >= 4
    assert "drain " in told
    assert "[.drain" not in told


def test_the_document_holds_every_token_in_runs() -> None:
    document = as_document(RECORD)
    assert document["states"] == [
        ["exact", 0, 1],
        ["reused", 1, 2],
        ["recomputed", 2, 3],
        ["computed", 3, 5],
    ]
    assert document["tokens"] == {"exact": 1, "reused": 1, "recomputed": 1, "computed": 2}
    assert document["chunks"][1]["why"] == "absent"
    assert document["way"] is None


def test_the_way_through_the_engine_is_told() -> None:
    joined = replace(RECORD, way="joined")
    assert show(joined, TEXTS, colour=False).endswith("2.5 MB from disk · joined")
    assert as_document(joined)["way"] == "joined"
