"""The next tokens of answers, guessed from what their requests have read.

Answers over passages repeat them: names, numbers, whole sentences. A draft is what followed the
last tokens of an answer where they stood before, in its prompt or in the answer. A step computes
the rows of the draft beside the row that is due, and the answer goes on through those that are
right. A draft changes no token: each one is drawn from its own logits, as it would be without, and
the first that is not the draft's ends it.

    known      … │ the │ lamp │          due: "lamp"; "the lamp" stood in a passage before
    draft                     is │ lit │ at │ dusk
    drawn                     is │ lit │ by                  two tokens copied, one drawn besides

Answers that decode together share a step, and more rows make it longer for all of them. So what
they draft is chosen for all at once (`Drafts.share_out`): the tokens most likely right, as many as
give most tokens per second, by how often drafts behind a match of this length were right and by
what steps of so many rows took on this device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST_MATCH = 8  # tokens in front of a draft that are compared
RIGHT_AT_FIRST = 0.5  # share of drafted tokens that are taken to be right before any was seen
FIRST_WEIGHT = 4.0  # of that, in tokens
KEPT = 0.98  # of what was seen before, with every draft that is judged, and with every step
KEPT_OWN = 0.9  # of what one answer saw: what it copies changes from sentence to sentence
FIRST_SLOPE = 0.05  # of a step without rows, that a row takes before any was seen
LEAST_GAIN = 1.02  # in tokens per second: choosing takes time, too
# Most rows of steps that are taken to be alike
BINS = np.array((*range(1, 33), *range(40, 129, 8), 160, 192, 256, 384, 512))
FORGOTTEN = 0.05  # of a step: what was seen of a bin counts until so little of it is left


class Draft(NamedTuple):
    """Tokens that may come next."""

    token_ids: Sequence[int]
    match: int  # tokens in front of them that stand in front of the answer's next one, too


class DraftSource:
    """Finds drafts for one answer in the tokens that its request knows. For the engine thread."""

    def __init__(self, token_ids: Sequence[int], room: int) -> None:
        """`token_ids` are the prompt's; the answer has at most `room` more."""
        self._ids = np.empty(len(token_ids) + room, dtype=np.int32)
        self._num_ids = 0
        self.grow(token_ids)

    def grow(self, token_ids: Sequence[int]) -> None:
        """Take in what stands behind the ids of the last call; `token_ids` begins with those."""
        new = token_ids[self._num_ids :]
        self._ids[self._num_ids : len(token_ids)] = new
        self._num_ids = len(token_ids)

    def find(self, most: int) -> Draft | None:
        """Return up to `most` tokens that followed the longest match of the last ones, the latest
        of equally long matches; None where the last token did not stand before."""
        ids, last = self._ids[: self._num_ids], self._num_ids - 1
        at: NDArray[np.int64] = np.flatnonzero(ids[:last] == ids[last])
        if not len(at) or most < 1:
            return None
        length = 1
        while length < LONGEST_MATCH:
            behind_start = at[at >= length]
            longer = behind_start[ids[behind_start - length] == ids[last - length]]
            if not len(longer):
                break
            at, length = longer, length + 1
        start = int(at[-1]) + 1
        return Draft(ids[start : start + most].tolist(), length)


class DraftOdds:
    """How often drafted tokens were right lately, by the length of the match in front of them.

    A length whose drafts are not computed any more is forgotten by and by, so that it is tried
    again.
    """

    def __init__(self, kept: float = KEPT) -> None:
        """`kept` of what was seen before counts behind the next draft."""
        self._kept = kept
        self._right = np.zeros(LONGEST_MATCH + 1)
        self._judged = np.zeros(LONGEST_MATCH + 1)

    def odds(self, match: int, before: "DraftOdds | None" = None) -> float:
        """Return the odds that a token of a draft is right if those in front of it were; `before`
        tells what is expected where little was seen."""
        expected = RIGHT_AT_FIRST if before is None else before.odds(match)
        right = self._right[match] + FIRST_WEIGHT * expected
        return float(right / (self._judged[match] + FIRST_WEIGHT))

    def observe(self, match: int, right: int, judged: int) -> None:
        """Note that of `judged` tokens of a draft `right` ones were right: the first ones."""
        self._right[match] = self._right[match] * self._kept + right
        self._judged[match] = self._judged[match] * self._kept + judged

    def forget_some(self, match: int) -> None:
        """Forget a little of a length whose draft was not computed."""
        self._right[match] *= KEPT
        self._judged[match] *= KEPT


class StepTimes:
    """What steps in which all sequences decode took lately, by their rows: more of them may cost
    nothing, or the time of a whole block."""

    def __init__(self) -> None:
        self._seen = np.zeros((len(BINS) + 1, 3))  # of each bin: weight, rows, seconds

    def observe(self, rows: int, seconds: float) -> None:
        """Note what a step took, or what it took at most if nothing else came between: as long
        again as expected."""
        if self._seen.any():
            seconds = min(seconds, 2 * float(self.expect(np.array([rows]))[0]))
        self._seen *= KEPT
        self._seen[np.searchsorted(BINS, rows)] += (1.0, rows, seconds)

    def expect(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return how long steps of `rows`, in ascending order, take: a line between two that were
        seen, and as FIRST_SLOPE says beyond them. What fewer rows took longer for than more was
        chance."""
        times = 1 + FIRST_SLOPE * rows
        weight, sum_rows, seconds = self._seen[self._seen[:, 0] > FORGOTTEN].T
        if len(weight):
            mean, first = sum_rows / weight, 1 + FIRST_SLOPE * sum_rows / weight
            times = times * np.interp(rows, mean, seconds / weight / first)
        return np.asarray(np.minimum.accumulate(times[::-1])[::-1], dtype=np.float64)


class Drafts:
    """What an engine has learnt of drafts, and how long it makes them. For the engine thread."""

    def __init__(self, most: int) -> None:
        """`most` tokens are drafted at a time; 0: none are."""
        self.most = most
        self.odds = DraftOdds()
        self._times = StepTimes()

    def open(
        self, token_ids: Sequence[int], room: int, forced: Sequence[int] = ()
    ) -> "AnswerDrafts":
        """Return the drafts of an answer behind a prompt of these tokens, which has at most `room`
        tokens; `forced` are all of them, where they are known."""
        return AnswerDrafts(self, DraftSource(token_ids, room), forced)

    def observe_step(self, rows: int, seconds: float) -> None:
        """Note what a step took in which answers decode and nothing else happens, with so many rows
        in all."""
        self._times.observe(rows, seconds)

    def share_out(self, answers: "Sequence[AnswerDrafts]", num_decoding: int) -> None:
        """Choose how long the drafts of answers are, so that most tokens come per second from a
        step in which `num_decoding` decode."""
        found = [answer for answer in answers if answer.found is not None]
        if not found:
            return
        odds = [answer.odds_ahead() for answer in found]
        whose = np.repeat(np.arange(len(found)), [len(each) for each in odds])
        every = np.concatenate(odds)
        order = np.argsort(-every, kind="stable")  # of one answer they descend
        rows = num_decoding + np.arange(len(every) + 1)
        expected = num_decoding + np.concatenate(([0.0], every[order].cumsum()))
        times_s = self._times.expect(rows)
        pace = expected / num_decoding / (times_s / times_s[0])
        best = int(pace.argmax()) if pace.max() > LEAST_GAIN else 0
        lengths = np.bincount(whose[order[:best]], minlength=len(found))
        for answer, length in zip(found, lengths.tolist(), strict=True):
            answer.choose(length)


class AnswerDrafts:
    """Drafts one answer, step by step. For the engine thread."""

    def __init__(self, shared: Drafts, source: DraftSource, forced: Sequence[int]) -> None:
        self._shared = shared
        self._source = source
        self._odds = DraftOdds(KEPT_OWN)
        self._forced = forced
        self._match = 0  # in front of the draft at hand
        self.found: Draft | None = None  # may be drafted, if it is chosen
        self.token_ids: Sequence[int] = ()  # the draft at hand; empty: there is none

    def prepare(self, token_ids: Sequence[int], answered: int, room: int) -> None:
        """Look for what may come behind `token_ids`, of which `answered` are the answer's, which
        has at most `room`. Tokens that are known are drafted; others wait to be chosen."""
        most = min(self._shared.most, room - answered - 1)  # the last one is never looked at
        self.token_ids = self._forced[answered : answered + most]
        if not self._forced:
            self._source.grow(token_ids)
            self.found = self._source.find(most)

    def odds_ahead(self) -> NDArray[np.float64]:
        """Return the odds of each token that was found that it and those in front are right."""
        assert self.found is not None, "what was found has odds"
        odds = self._odds.odds(self.found.match, self._shared.odds)
        return np.asarray(odds ** np.arange(1, len(self.found.token_ids) + 1), dtype=np.float64)

    def choose(self, length: int) -> None:
        """Draft so many of the tokens that were found."""
        assert self.found is not None, "what is drafted was found"
        self.token_ids, self._match = self.found.token_ids[:length], self.found.match
        self.found = None
        if not length:
            self._odds.forget_some(self._match)
            self._shared.odds.forget_some(self._match)

    def judge(self, right: int, computed: int) -> None:
        """Note how many tokens of the draft at hand were right, of those that were computed."""
        judged = min(right + 1, computed)
        if judged and not self._forced:
            self._odds.observe(self._match, right, judged)
            self._shared.odds.observe(self._match, right, judged)
