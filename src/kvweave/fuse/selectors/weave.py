"""kvweave's own: what the whole question looks at, two thirds up, among the chunks alone.

Attention of every question row counts, the chat header before the answer included, because that is
where the answer starts from; the layers right above two thirds of the model, where a question has
become a search; softmax over the chunks only, so that what the preamble soaks up does not matter.
Rows are chosen by score per cost: one at the end of the prompt sees twice the keys of one in the
middle. The rest of each chunk is then moved along with the recomputed rows (see drift.py). Behind
the layers in which the question searches only a fifth of the rows goes on (see taper.py).

    weave        the question sees the preamble alone on its way up: choosing rows needs the stored
                 keys of a few layers, and the pass streams behind
    weave-deep   it sees the full stitched context: better rows, but most layers must be there first
    weave-through   the same for models that still take much from chosen rows behind the layers of
                 the search (Qwen2.5): all go through all layers, and rows beside a row that is
                 looked at count as well

docs/fusion.md tells how this was found and what was tried.
"""

from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.taper import Taper

# A row at the end of a prompt is taken to cost four times one at its front (products with weights
# are the same for both, attention is not, and runs slower) and must be looked at four times as much
# to be worth it.
LATE = 3.0
SMOOTH = 5  # rows: a name, a number with its unit
STAYING = 0.2  # of the rows, behind the layers of the search


def weave(num_layers: int) -> QueryAttention:
    return QueryAttention(
        view="preamble", layers=_search_layers(num_layers), normaliser="context", asks="all",
        late=LATE,
    )  # fmt: skip


def weave_deep(num_layers: int) -> QueryAttention:
    return QueryAttention(
        view="full", layers=_search_layers(num_layers), normaliser="context", asks="all", late=LATE
    )


def weave_through(num_layers: int) -> QueryAttention:
    return QueryAttention(
        view="full", layers=_search_layers(num_layers), normaliser="full", asks="all", late=LATE,
        smooth=SMOOTH,
    )  # fmt: skip


def taper(num_layers: int) -> Taper:
    """Where rows of the first two leave."""
    return Taper(max(_search_layers(num_layers)), STAYING)


def _search_layers(num_layers: int) -> tuple[int, ...]:
    """A sixth of the layers, from two thirds on."""
    first = num_layers - max(1, num_layers // 3)
    return tuple(range(first, first + max(1, num_layers // 6)))
