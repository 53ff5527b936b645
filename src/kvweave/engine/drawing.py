"""From the logits of a step to tokens of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvweave.engine.drafts import Drafts
from kvweave.engine.page_manager import PageManager
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence, is_close_call
from kvweave.engine.stats import EngineCounts
from kvweave.errors import NoNumbers


@dataclass(eq=False)
class TokenDrawer:
    """Draws tokens, gives them to their readers, and drafts what may come next. For the engine
    thread."""

    _scheduler: Scheduler[EngineSequence]
    _pages: PageManager
    _counts: EngineCounts
    _drafts: Drafts

    def draw(
        self,
        sequence: EngineSequence,
        logits: Tensor,
        likeliest: Sequence[int | None],
        lead: float | None = None,
    ) -> bool:
        """Draw the next token of a request from its logits [W, V], and then the ones behind it as
        long as the last one is what its draft of W - 1 tokens says. Returns whether the answer is
        finished; raises what made drawing fail.

        A held request keeps the logits instead. A fused prompt whose first token is a close call is
        computed again, exactly. `likeliest` [W] is the most likely token where it is known and
        nothing else matters; `lead` is how far the first one's logit is ahead of the next one, if
        that is known.
        """
        if sequence.progress.held:
            sequence.hold_back(logits[0])
            return False
        if not sequence.answered:
            if is_close_call(sequence, logits[0], lead):
                self._begin_again_exactly(sequence)
                return False
            if not sequence.progress.background:
                self._counts.count_prompt(sequence)
        draft, is_over, num_right = sequence.draft(len(logits) - 1), False, 0
        for row, best in enumerate(likeliest):
            is_over = self._draw_one(sequence, logits[row], best)
            if is_over or row >= len(draft) or sequence.ids[-1] != draft[row]:
                break
            sequence.progress.computed += 1
            num_right += 1
        if draft:
            sequence.judge_draft(num_right, len(draft))
            if not sequence.progress.background:
                self._counts.add("tokens_drafted", len(draft))
                self._counts.add("tokens_copied", num_right)
        if not is_over:
            sequence.prepare_draft(self._drafts)
        return is_over

    def share_out_drafts(self, sequences: Sequence[EngineSequence]) -> None:
        """Choose what those of a step draft that decode in the next one."""
        decoding = [each for each in sequences if each.progress.decodes]
        drafted = [(each, each.drafts) for each in decoding if each.drafts is not None]
        self._drafts.share_out([drafts for _, drafts in drafted], len(decoding))
        for each, drafts in drafted:
            each.progress.drafted = len(drafts.token_ids)

    def _draw_one(self, sequence: EngineSequence, logits: Tensor, likeliest: int | None) -> bool:
        """Draw one token from its logits [V] and hand it out. Returns whether it was the last."""
        try:
            choice = sequence.choose(logits, likeliest)
        except NoNumbers:
            self._counts.add("kv_distrusted", self._pages.drop_bad_pages(sequence))
            raise
        if not sequence.progress.background:
            self._counts.add("tokens_answered")
        return sequence.take(choice)

    def _begin_again_exactly(self, sequence: EngineSequence) -> None:
        """Forget what was computed of a fused prompt, and let it wait as one that is computed in
        full."""
        self._counts.add("fused_close_calls")
        # what is exact in front of it is found again by the pass that comes now
        self._counts.add("fused_offered", self._pages.offer(sequence))
        sequence.request = replace(sequence.request, fused=None)
        sequence.fuse_record = sequence.ticket.record = None
        self._scheduler.begin_again(sequence)
