"""In which runs an object is read, and in which order."""

import pytest

from kvweave.kv.arrival_reads import ReadingOrder, plan_spans
from kvweave.kv.format.header import ALIGN
from worlds.kv import make_chunk


@pytest.mark.parametrize("first_layers", [(), (6,), (0,), (3, 4), (1, 5, 99)])
def test_reads_cover_every_byte_of_the_layers_once(first_layers: tuple[int, ...]) -> None:
    header = make_chunk(extras={"anchors": b"abc"}, num_layers=7).header
    for best_read_bytes in (1, 3 * ALIGN, 1 << 30):
        spans = plan_spans(header, best_read_bytes, first_layers)
        assert [s.start_byte for s in spans[1:]] == [s.end_byte for s in spans[:-1]]
        assert spans[0].start_byte == header.layers[0].offset
        assert spans[-1].end_byte == header.total_bytes
        assert [i for s in spans for i in range(s.first, s.end)] == list(range(7))
        for span in spans:
            assert len({i in first_layers for i in range(span.first, span.end)}) == 1


def test_spans_are_read_in_the_order_their_layers_were_asked_for() -> None:
    header = make_chunk(num_layers=7).header
    order = ReadingOrder()
    order.ask([0, 1, 2])
    order.ask_first([6, 3])
    assert order.take() is None  # the object is not open yet
    assert order.plan(header, 1) == 7
    assert order.num_due(4) == 4
    assert [order.take().first for _ in range(2)] == [6, 3]  # type: ignore[union-attr]
    order.ask_first([5])
    order.ask([4, 3, 99])
    assert order.num_due(9) == 5
    taken = [span.first for span in iter(order.take, None)]
    assert taken == [5, 0, 1, 2, 4]
