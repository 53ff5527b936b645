"""What cannot be true of a measured profile, in words; and what can be put right without measuring.

A machine that was busy while it was measured shows prices that no machine has: recomputing some
rows of a prompt is the same work as prefilling as many behind the rest of it, within a factor, and
more rows never cost less. Other work makes runs longer, never shorter: of two prices that do not
fit together the higher one is wrong.
"""

import statistics
from collections.abc import Iterator
from itertools import pairwise

from kvweave.kv.tree.node import HOST
from kvweave.plan.profile import Grid, MachineProfile

MOST_RELATION = 3.0  # recomputing a row over prefilling one, or one over it
MOST_SPREAD = 1.5  # median of a point's samples over the shortest
MOST_FALL = 0.75  # of a price, with more rows
MOST_PER_ROW = 10.0  # a row of a large pass over one of a small pass
CPU_SMALL_SHARE = 0.5  # a small pass over one of sixteen times as many rows, on a CPU
LEAST_S = 0.020  # below that a pass costs what starting it does, and nothing follows from it
HOST_BYTES_PER_S = (1e8, 1e12)


def find_doubts(profile: MachineProfile) -> list[str]:
    """Why a profile cannot be right, in words for people; [] where nothing speaks against it.

    Prices that answers have confirmed are not held against each other.
    """
    return [
        *_falling("prefill", profile.prefill),
        *_falling("recomputing", profile.recompute),
        *_per_row(profile),
        *_relation(profile),
        *_noise(profile),
        *_bytes(profile),
    ]


def relation_of(profile: MachineProfile) -> float:
    """Recomputing over prefilling, in the middle of the measured points; 1: they cannot say."""
    found = [ratio for _, _, ratio in _relations(profile)]
    middle = statistics.median(found) if found else 1.0
    return middle if 1 / MOST_RELATION <= middle <= MOST_RELATION else 1.0


def correct(profile: MachineProfile) -> None:
    """Put right what can be, so that a doubtful profile serves until it is measured again.

    Recomputing that is too dear gets the price of prefilling as many rows; where it is too cheap,
    prefill was measured too dear, and all of it comes down.
    """
    ratios = [ratio for _, _, ratio in _relations(profile)]
    if ratios and statistics.median(ratios) < 1 / MOST_RELATION:
        profile.prefill.scale(statistics.median(ratios))
    prefill, recompute = profile.prefill, profile.recompute
    profile.recompute = Grid(
        recompute.xs,
        recompute.ys,
        [
            [
                _plausible(prefill, x, y, seconds)
                for y, seconds in zip(recompute.ys, row, strict=True)
            ]
            for x, row in zip(recompute.xs, recompute.seconds, strict=True)
        ],
    )
    profile.relation = relation_of(profile)
    per_token_s = _token_s(profile)
    if per_token_s:
        profile.stitch_s = min(profile.stitch_s, per_token_s)


def _plausible(prefill: Grid, total: int, rows: int, seconds: float) -> float:
    usual_s = prefill.at(max(0, total - rows), rows)
    too_dear = seconds > max(LEAST_S, MOST_RELATION * usual_s)
    return usual_s if too_dear else seconds


def _falling(what: str, grid: Grid) -> Iterator[str]:
    for row in grid.seconds:
        for (less, fewer_s), (more, more_s) in pairwise(zip(grid.ys, row, strict=True)):
            if more_s < MOST_FALL * fewer_s and fewer_s > LEAST_S:
                yield (
                    f"{what} {more:,} rows was cheaper ({more_s:.3g} s) than {less:,} "
                    f"({fewer_s:.3g} s)"
                )
                return


def _per_row(profile: MachineProfile) -> Iterator[str]:
    """Of the first pass and the largest below 2,000 rows, nothing in front."""
    grid = profile.prefill
    small, small_s = grid.ys[0], grid.seconds[0][0]
    large, large_s = [
        (y, s) for y, s in zip(grid.ys, grid.seconds[0], strict=True) if y < 2000 or y == small
    ][-1]
    if large_s < 5 * LEAST_S or large < 16 * small or small_s <= 0:
        return
    if large_s / large > MOST_PER_ROW * small_s / max(1, small):
        yield (
            f"a token among {large:,} took {large_s / large * 1e3:.3g} ms, one among {small:,} "
            f"only {small_s / small * 1e3:.3g} ms"
        )
    if profile.device.startswith("cpu") and small_s > CPU_SMALL_SHARE * large_s:
        yield f"{small:,} tokens took {small_s:.3g} s, {large:,} no more than {large_s:.3g} s"


def _relation(profile: MachineProfile) -> Iterator[str]:
    heard = profile.heard
    if heard.exact and heard.fused:  # answers of both kinds told what each costs
        return
    worst = max(_relations(profile), key=lambda r: max(r[2], 1 / r[2]), default=None)
    if worst is not None and not 1 / MOST_RELATION <= worst[2] <= MOST_RELATION:
        total, rows, ratio = worst
        words = f"{ratio:.1f} times" if ratio > 1 else f"1/{1 / ratio:.1f} of"
        yield (f"recomputing {rows:,} rows of {total:,} took {words} what prefilling as many does")


def _relations(profile: MachineProfile) -> Iterator[tuple[int, int, float]]:
    """All tokens, rows and the ratio, where prompts were measured and the work counts."""
    for x, row in zip(profile.recompute.xs[:2], profile.recompute.seconds[:2], strict=True):
        for y, seconds in zip(profile.recompute.ys, row, strict=True):
            prefilled_s = profile.prefill.at(max(0, x - y), y)
            if y < x and max(seconds, prefilled_s) > LEAST_S and min(seconds, prefilled_s) > 0:
                yield x, y, seconds / prefilled_s


def _noise(profile: MachineProfile) -> Iterator[str]:
    if profile.spread > MOST_SPREAD:
        yield (
            f"the machine was busy: a run took {profile.spread:.1f} times the shortest of its kind"
        )


def _bytes(profile: MachineProfile) -> Iterator[str]:
    token_s = _token_s(profile)
    if token_s and profile.stitch_s > token_s:
        yield (
            f"laying a stored token took {profile.stitch_s * 1e6:.3g} µs, computing one "
            f"{token_s * 1e6:.3g} µs"
        )
    host = profile.links.get(HOST.value)
    if host is not None and not HOST_BYTES_PER_S[0] <= host.bytes_per_s <= HOST_BYTES_PER_S[1]:
        yield f"host memory gave {host.bytes_per_s / 1e9:.3g} GB/s"


def _token_s(profile: MachineProfile) -> float:
    """Computing one token in the largest pass; 0 where passes are too short to say."""
    grid = profile.prefill
    seconds = grid.seconds[0][-1]
    return seconds / max(1, grid.ys[-1]) if seconds > 5 * LEAST_S else 0.0
