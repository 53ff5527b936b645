"""In which order a request takes its layers, and which of them travel to a GPU together.

A group is one copy per chunk and one thing to wait for, so fewer groups are fewer orders for the
host. But nothing of a group is computed before all of it is there. So they grow: the first layer
comes alone and the pass begins, then two, then as many as `group_for` allows; and they shrink
towards the end, where nothing is left to copy while the last group is computed.
"""

from collections.abc import Sequence

from kvweave.fuse.needs import Needs

GROUP_LAYERS = 4
GROUP_BYTES = 128 << 20  # unless one layer has more


def group_for(layer_bytes: int, ring_bytes: int) -> int:
    """How many layers may travel together: as many as leave room for two more such groups."""
    most = min(GROUP_BYTES, ring_bytes // 3) // max(1, layer_bytes)
    return max(1, min(GROUP_LAYERS, most))


def taking_order(needs: Needs, num_layers: int) -> list[int]:
    """The order in which a request takes its layers: those that rows are chosen by, then the pass.

    A view of the full context and choices in flight take them from the bottom up anyway.
    """
    first = sorted(needs.key_layers) if needs.probe not in ("none", "full") else []
    return [*first, *(layer for layer in range(num_layers) if layer not in first)]


class LayerQueue:
    """Layers of one request that are still to be brought, in the order they will be taken.

    For the thread that runs the pass. `most` is how many a group may have: 1 until all of them are
    known to be in host memory.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.most = 1
        self._grown = 1  # how many the next group may have
        self._order = list(order)
        pass_begins = self._order.index(0) if 0 in self._order else len(self._order)
        self._alone = frozenset(self._order[:pass_begins])  # scored before it, one by one

    def __bool__(self) -> bool:
        return bool(self._order)

    def next_group(self) -> range:
        """The layers to bring next: neighbours at the head of the order. They stay there."""
        first, size = self._order[0], 1
        most = min(self._grown, (len(self._order) + 1) // 2)
        while size < most and self._order[size] == first + size:
            size += 1
        return range(first, first + size)

    def take(self, group: range) -> None:
        """Remove the layers of `next_group`, which are being brought."""
        del self._order[: len(group)]
        if group.start not in self._alone:
            self._grown = min(2 * self._grown, self.most)

    def remove(self, layer: int) -> None:
        """Remove a layer that was asked for before its turn, or again."""
        if layer in self._order:
            self._order.remove(layer)

    def put_back(self, layers: Sequence[int]) -> None:
        """Put layers that made room for others back at the head of the order."""
        self._order[:0] = layers
