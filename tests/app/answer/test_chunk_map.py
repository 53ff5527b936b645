"""A chunk is sent once per conversation, and again when its copy was cut."""

from hypothesis import given
from hypothesis import strategies as st

from kvweave.app.answer.conversations import ChunkMap
from worlds.tree import refs


def test_a_chunk_of_an_earlier_turn_is_not_sent_again() -> None:
    chunks = ChunkMap()
    chunks.sent("talk", "m1", [c.id for c in refs("ab")])
    parted = chunks.part("talk", ["m1"], refs("bcb"))
    assert parted.new == tuple(refs("c"))
    assert parted.in_history == tuple(refs("b"))


def test_a_chunk_whose_message_was_cut_is_sent_again() -> None:
    chunks = ChunkMap()
    chunks.sent("talk", "m1", [c.id for c in refs("a")])
    chunks.sent("talk", "m2", [c.id for c in refs("b")])
    assert chunks.part("talk", ["m2"], refs("ab")).new == tuple(refs("a"))
    chunks.sent("talk", "m3", [c.id for c in refs("a")])
    assert chunks.part("talk", ["m2", "m3"], refs("ab")).new == ()


def test_conversations_do_not_share() -> None:
    chunks = ChunkMap()
    chunks.sent("one", "m1", [c.id for c in refs("a")])
    assert chunks.part("two", ["m1"], refs("a")).new == tuple(refs("a"))
    chunks.sent("", "m1", [c.id for c in refs("a")])
    assert chunks.part("", ["m1"], refs("a")).new == tuple(refs("a"))


def test_old_conversations_are_forgotten_first() -> None:
    chunks = ChunkMap(max_conversations=2)
    for name in ("one", "two", "one", "three"):
        chunks.sent(name, "m", [c.id for c in refs("a")])
    assert chunks.part("one", ["m"], refs("a")).new == ()
    assert chunks.part("two", ["m"], refs("a")).new == tuple(refs("a"))
    chunks.forget("one")
    assert len(chunks) == 1


TURN = st.tuples(st.lists(st.sampled_from("abcdef"), max_size=5), st.integers(0, 4))


@given(st.lists(TURN, max_size=12))
def test_every_retrieved_chunk_is_somewhere_in_the_prompt(
    turns: list[tuple[list[str], int]],
) -> None:
    """However the history is cut: what retrieval returned is in it or is sent."""
    chunks = ChunkMap()
    messages: list[tuple[str, set[str]]] = []
    for number, (retrieved, cut) in enumerate(turns):
        messages = messages[cut:]
        parted = chunks.part("talk", [key for key, _ in messages], refs(retrieved))
        sent = {str(c.id) for c in parted.new}
        held = set().union(*(content for _, content in messages)) if messages else set()
        assert set(retrieved) <= sent | held
        assert {str(c.id) for c in parted.in_history} <= held
        assert len(parted.new) + len(parted.in_history) == len(set(retrieved))
        messages.append((f"m{number}", sent))
        chunks.sent("talk", f"m{number}", [c.id for c in parted.new])
