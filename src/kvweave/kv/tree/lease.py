"""A request's hold on a path of the tree."""

from collections.abc import Callable
from types import TracebackType

from kvweave.kv.tree.node import Node


class TreeLease:
    """A pin on a path, preamble included. Belongs to one request; releases itself once."""

    def __init__(self, nodes: list[Node], unpin: Callable[[list[Node]], None]) -> None:
        self.nodes = nodes  # pinned, from the preamble on; empty when even that is gone
        self._unpin = unpin
        for node in nodes:
            node.pins += 1

    @property
    def num_tokens(self) -> int:
        """Exact tokens it holds, preamble included."""
        return self.nodes[-1].end if self.nodes else 0

    def join(self, node: Node) -> None:
        """Hold one node more, the next on the path."""
        node.pins += 1
        self.nodes.append(node)

    def cut(self, num_nodes: int) -> None:
        """Hold only the first so many nodes."""
        rest = self.nodes[num_nodes:]
        del self.nodes[num_nodes:]
        self._unpin(rest)

    def release(self) -> None:
        self.cut(0)

    def __enter__(self) -> "TreeLease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
