"""Selectors pick the rows to recompute. Their contract is `fuse/selector.py`.

Add a selector:

1. Write `selectors/last_rows.py` over `Needs` (fuse/needs.py) and `Scene` (fuse/selector.py):

       @dataclass(frozen=True, slots=True)
       class LastRows:
           in_flight: ClassVar[Literal[False]] = False  # chooses before the pass, not inside it

           def needs(self, num_layers: int) -> Needs:
               return Needs()  # nothing is loaded or probed before it chooses

           def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
               # for each count the last positions that may be chosen, ascending
               return [scene.hits[-count:] for count in counts]

2. Name it in `_SELECTORS` of `strategies.py`, with its default ratio:
   `"last-rows": (lambda _: LastRows(), 0.15),`. CLI, API and planner know it then, and
   `kvweave calibrate --strategies last-rows`. Names in `_OURS` get drift; names in `_TAPERED` get a
   taper too.
3. Run `pytest tests/fuse`: the contract tests take every name of that table. Scores are told to
   `Scene.note`, for the record, and go through `ranked_positions` of `fuse/selector.py`, which
   breaks ties and refuses NaN; `places.py` holds whole examples.

In a package of your own step 2 is an entry point instead, see docs/fusion.md.
"""
