"""What is told of the quality of reuse: curves, gate, audit. Looking changes nothing."""

from kvweave import Weave
from kvweave.app.libraries.quality_view import quality_of
from kvweave.reasons import Reason
from worlds.auto import World, model, weave, world

__all__ = ["model", "weave", "world"]


def test_curves_and_gate_are_those_of_the_profile(world: World, weave: Weave) -> None:
    world.calibrate(("weave", 0.3, 0.01), ("weave", 0.1, 0.05), ("epic", 0.3, 0.5))
    with world.open() as fresh:
        view = quality_of(fresh, over_library=True)
    assert (view.bound, view.doubt) == (0.02, None)
    curves = {curve.strategy: curve for curve in view.curves}
    assert [(p.ratio, p.kl) for p in curves["weave"].points] == [(0.1, 0.05), (0.3, 0.01)]
    assert (curves["weave"].kind, curves["weave"].num_questions) == ("own", 100)
    gate = {line.strategy: line for line in view.gate}
    assert (gate["weave"].ratio, gate["weave"].why) == (0.3, "")
    assert (gate["epic"].ratio, gate["epic"].why) == (None, str(Reason.BOUND_NOT_MET))
    assert (view.audited, view.moves) == ((), ())


def test_without_a_calibration_it_says_what_to_do(world: World, weave: Weave) -> None:
    for over_library in (False, True):
        view = quality_of(weave, over_library=over_library)
        assert (view.curves, view.gate) == ((), ())
        assert view.doubt is not None
        assert "kvweave calibrate" in view.doubt


def test_what_the_audit_found_is_told_and_looking_moves_nothing(world: World, weave: Weave) -> None:
    world.calibrate(("weave", 0.1, 0.01), ("weave", 0.3, 0.005))
    with world.open() as fresh:
        found = fresh.auditor.log
        for _ in range(40):
            found.add("weave", 0.1, 0.5, flipped=False)
        version = found.version
        view = quality_of(fresh, over_library=True)
        assert quality_of(fresh, over_library=True) == view
        assert found.version == version
        assert view.moves == ()
        (cell,) = view.audited
        assert (cell.strategy, cell.ratio, cell.total) == ("weave", 0.1, 40)
        assert cell.figures.kl == 0.5
        found.move("weave", 0.02, 0.1, 0.3)
        (line,) = quality_of(fresh, over_library=True).gate
        assert (line.ratio, line.why) == (0.3, f"{Reason.AUDITED} at 0.1")
