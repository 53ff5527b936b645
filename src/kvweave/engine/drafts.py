"""The next tokens of answers, guessed from what their requests have read.

Answers over passages repeat them: names, numbers, whole sentences. A draft is what followed the
last tokens of an answer where they stood before, in its prompt or in the answer. A step computes
the rows of the draft beside the row that is due, and the answer goes on through those that are
right. A draft changes no token: each one is drawn from its own logits, as it would be without, and
the first that is not the draft's ends it.

    known      … │ the │ lamp │          due: "lamp"; "the lamp" stood in a passage before
    draft                     is │ lit │ at │ dusk
    drawn                     is │ lit │ by                  two tokens copied, one drawn besides

A draft is as long as it pays: by how often drafts behind a match of this length were right, and by
what steps with more rows have taken on this device.
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
FIRST_SLOPE = 0.05  # of a step of one row, that another row takes before any was seen


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
    """What steps in which all sequences decode take by their rows: a line through the last ones."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weights, rows, seconds, rows squared, rows by seconds

    def observe(self, rows: int, seconds: float) -> None:
        """Note what a step took."""
        self._sums *= KEPT
        self._sums += (1.0, rows, seconds, rows * rows, rows * seconds)

    def relative(self, rows: int, than: int) -> float:
        """Return how many times as long a step of `rows` takes as one of `than` rows."""
        weight, x, y, xx, xy = self._sums
        if not y:
            base_s, slope_s = 1.0, FIRST_SLOPE
        else:
            x, y, spread = x / weight, y / weight, xx / weight - (x / weight) ** 2
            slope_s = FIRST_SLOPE * y / max(x, 1.0)
            if spread > 0.25:  # else all of them had about as many rows
                slope_s = max(0.0, (xy / weight - x * y) / spread)
            base_s = max(y - slope_s * x, 0.0)
        return float((base_s + slope_s * rows) / (base_s + slope_s * than))


class Drafts:
    """What an engine has learnt of drafts, and how long it makes them. For the engine thread."""

    def __init__(self, most: int) -> None:
        """`most` tokens are drafted at a time; 0: none are."""
        self.most = most
        self._odds = DraftOdds()
        self._times = StepTimes()
        self._num_answers = 1  # that decoded in the last step

    def open(
        self, token_ids: Sequence[int], room: int, forced: Sequence[int] = ()
    ) -> "AnswerDrafts":
        """Return the drafts of an answer behind a prompt of these tokens, which has at most `room`
        tokens; `forced` are all of them, where they are known."""
        return AnswerDrafts(self, DraftSource(token_ids, room), forced)

    def observe_step(self, num_answers: int, rows: int, seconds: float) -> None:
        """Note what a step took in which `num_answers` decode and nothing else happens, with so
        many rows in all."""
        self._num_answers = num_answers
        self._times.observe(rows, seconds)

    def observe(self, match: int, right: int, judged: int) -> None:
        """Note how many tokens of a draft behind such a match were right, of those judged."""
        self._odds.observe(match, right, judged)

    def best_length(self, odds: DraftOdds, draft: Draft) -> int:
        """Return the length of a draft with which most tokens come per second; `odds` are the
        answer's own."""
        others, match = self._num_answers, draft.match
        odds_of_one = odds.odds(match, self._odds)
        best, best_pace, expected = 0, 1.0, 1.0
        for length in range(1, len(draft.token_ids) + 1):
            expected += odds_of_one**length
            gained = (others - 1 + expected) / others
            pace = gained / self._times.relative(others + length, others)
            if pace > best_pace:
                best, best_pace = length, pace
        if not best:
            odds.forget_some(match)
            self._odds.forget_some(match)
        return best


class AnswerDrafts:
    """Drafts one answer, step by step. For the engine thread."""

    def __init__(self, shared: Drafts, source: DraftSource, forced: Sequence[int]) -> None:
        self._shared = shared
        self._source = source
        self._odds = DraftOdds(KEPT_OWN)
        self._forced = forced
        self._match = 0  # in front of the draft at hand
        self.token_ids: Sequence[int] = ()  # the draft at hand; empty: there is none

    def prepare(self, token_ids: Sequence[int], answered: int, room: int) -> int:
        """Draft what comes behind `token_ids`, of which `answered` are the answer's, which has at
        most `room`. Returns how many tokens."""
        most = min(self._shared.most, room - answered - 1)  # the last one is never looked at
        if self._forced:
            self.token_ids = self._forced[answered : answered + most]
            return len(self.token_ids)
        self.token_ids = ()
        self._source.grow(token_ids)
        draft = self._source.find(most)
        if draft is not None:
            length = self._shared.best_length(self._odds, draft)
            self.token_ids, self._match = draft.token_ids[:length], draft.match
        return len(self.token_ids)

    def judge(self, right: int, computed: int) -> None:
        """Note how many tokens of the draft at hand were right, of those that were computed."""
        judged = min(right + 1, computed)
        if judged and not self._forced:
            self._odds.observe(self._match, right, judged)
            self._shared.observe(self._match, right, judged)
