"""How often chunks were in prompts: counted, ranked, bounded."""

from kvweave.app.answer.settings import ChunkUses
from kvweave.types import ChunkId


def ids(*names: str) -> list[ChunkId]:
    return [ChunkId(name) for name in names]


def test_the_most_used_come_first() -> None:
    uses = ChunkUses()
    uses.saw(ids("a", "b"))
    uses.saw(ids("b"))
    assert uses.most(5) == [("b", 2), ("a", 1)]
    assert uses.most(1) == [("b", 2)]
    assert (uses.count(ChunkId("b")), uses.count(ChunkId("c"))) == (2, 0)
    assert len(uses.most(5)) == 2, "asking counts nothing"


def test_beyond_its_bound_the_rarest_start_anew() -> None:
    uses = ChunkUses(most=4)
    uses.saw(ids("a", "b", "a", "b"))
    uses.saw(ids("c", "d", "e"))
    assert dict(uses.most(9)) == {"a": 2, "b": 2}
