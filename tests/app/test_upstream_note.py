"""What a gateway says of a prompt that was computed elsewhere: no more than it knows."""

from kvweave.app.answer.notes import UpstreamNote


def test_what_was_cached_is_exact_only_where_nothing_can_be_fused() -> None:
    note = UpstreamNote("http://a", 1, 0, cached_tokens=90)
    assert note.tokens(100) == {"exact": 90, "computed": 10}
    assert UpstreamNote("http://a", 1, 0, 90, may_be_fused=True).tokens(100) == {}
    assert UpstreamNote("http://a", 1, 0, None).tokens(100) == {}


def test_what_an_upstream_says_goes_before_what_it_counts() -> None:
    told = {"way": "fused", "exact": 20, "reused": 60, "recomputed": 9, "computed": 11}
    note = UpstreamNote("http://a", 1, 0, 99, told=told, may_be_fused=True)
    assert note.tokens(100) == {"exact": 20, "reused": 60, "recomputed": 9, "computed": 11}
