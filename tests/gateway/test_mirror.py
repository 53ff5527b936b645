"""The books a gateway keeps of what a replica holds."""

from kvweave.gateway.mirror import Mirror, PromptPart, path_keys

ROOT = b"r" * 16


def part(name: str, num_tokens: int = 10, is_chunk: bool = True) -> PromptPart:
    return PromptPart(name.encode(), num_tokens, is_chunk)


def send(mirror: Mirror, *parts: PromptPart, root: bytes = ROOT) -> None:
    mirror.record(path_keys(root, parts), parts)


def match(mirror: Mirror, *parts: PromptPart, root: bytes = ROOT) -> tuple[int, int]:
    return tuple(mirror.match(path_keys(root, parts), parts))


def test_a_prompt_that_begins_alike_matches_as_far_as_it_does() -> None:
    mirror = Mirror(1000)
    send(mirror, part("pre", is_chunk=False), part("a"), part("b"), part("q1", is_chunk=False))
    asked = (part("pre", is_chunk=False), part("a"), part("c"), part("b"))
    assert match(mirror, *asked) == (20, 10), "pre and a from the front, b by itself"
    assert match(mirror, part("a")) == (0, 10), "not from the front"


def test_whose_prompt_it_is_counts() -> None:
    mirror = Mirror(1000)
    send(mirror, part("a", is_chunk=False))
    assert match(mirror, part("a", is_chunk=False), root=b"s" * 16) == (0, 0)


def test_what_was_not_used_for_longest_is_forgotten_first_and_leaves_before_their_path() -> None:
    mirror = Mirror(40)
    send(mirror, part("a"), part("b"))
    send(mirror, part("a"), part("c"))
    send(mirror, part("d"))
    assert mirror.num_tokens == 40
    send(mirror, part("e"))  # one has to go: b, behind a
    assert match(mirror, part("a"), part("b"))[0] == 10
    assert match(mirror, part("a"), part("c"))[0] == 20


def test_a_replica_that_comes_back_holds_nothing() -> None:
    mirror = Mirror(100)
    send(mirror, part("a"))
    mirror.forget()
    assert match(mirror, part("a")) == (0, 0)


def test_the_order_is_that_of_the_longest_path() -> None:
    mirror = Mirror(1000)
    pre = part("pre", is_chunk=False)
    send(mirror, pre, part("b"), part("a"), part("x"))
    send(mirror, pre, part("c", 15))
    at = path_keys(ROOT, [pre])[-1]
    chunks = [part("a"), part("b"), part("c", 15)]
    assert mirror.order(at, chunks) == [1, 0], "b then a: 20 tokens, c alone 15"
    assert mirror.order(at, [part("z")]) == []
