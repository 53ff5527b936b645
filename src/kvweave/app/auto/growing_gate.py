"""The gate of one encoding context: what calibration measured of the model, what the documents
themselves give in the course of time, and how audits moved that.

Tables of the model hold for all kinds of questions, so the worst kind decides. What its own
documents prove (`calibrate/own_evidence.py`) holds for one knowledge base, and for prompts like
those that were asked: there the least ratio passes that either of the two lets through, the latter
within a quarter of the bound.
"""

from collections.abc import Sequence

from kvweave.app.audit.audit_log import AuditLog
from kvweave.app.audit.audited_gate import AuditedGate, measured_ratios
from kvweave.app.auto.facts import CalibratedGate, counted_tokens
from kvweave.calibrate.gate import MADE_ALONE, MADE_BESIDE, Table, speaking_beside
from kvweave.calibrate.own_evidence import OwnEvidence
from kvweave.calibrate.profiles import DecoderTables
from kvweave.plan.plan import Gate, PromptShape, Verdict


class EvidencedGate:
    """A `plan.Gate` by the tables of a model and those of its knowledge base. Any thread."""

    def __init__(self, tables: Sequence[Table], made: Sequence[Table], preamble: str) -> None:
        """`tables` are of this very decoder and encoding context, and so are those that were `made`
        from the documents; `preamble` is the digest of what stands in front of all chunks."""
        self._tables = tables
        self._made = made
        self._calibrated = CalibratedGate(tables or made, preamble)
        self._evidenced = CalibratedGate(made, preamble)

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        if not self._tables:
            return self._evidenced.min_ratio(strategy, MADE_ALONE * bound, shape)
        calibrated = self._calibrated.min_ratio(strategy, bound, shape)
        size = shape.num_chunks, counted_tokens(shape)
        # made questions have no history
        if shape.has_history or not speaking_beside(self._made, self._tables, *size):
            return calibrated
        found = self._evidenced.min_ratio(strategy, MADE_BESIDE * bound, shape)
        if found.ratio is None:
            return calibrated
        return found if calibrated.ratio is None or found.ratio < calibrated.ratio else calibrated

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        return self._calibrated.may_reorder(bound, shape)


class GrowingGate:
    """A `plan.Gate` that is made anew whenever the evidence has another table. Any thread."""

    def __init__(
        self,
        tables: DecoderTables,
        evidence: OwnEvidence | None,
        preamble: str,
        audited: AuditLog,
    ) -> None:
        """`tables` are of this encoding context; `preamble` is the digest of what stands in front
        of all chunks."""
        self._tables = tables
        self._evidence = evidence
        self._preamble = preamble
        self._audited = audited
        self._made: tuple[int, Gate, bool] | None = None  # by which look; whether a table speaks

    @property
    def speaks(self) -> bool:
        """Whether anything was measured so far."""
        return self._current()[2]

    @property
    def is_growing(self) -> bool:
        """Whether documents are being asked about themselves."""
        return self._evidence is not None and self._evidence.is_asked

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        return self._current()[1].min_ratio(strategy, bound, shape)

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        return self._current()[1].may_reorder(bound, shape)

    def _current(self) -> tuple[int, Gate, bool]:
        look = 0 if self._evidence is None else self._evidence.look
        made = self._made
        if made is None or made[0] != look:
            found = self._evidence
            is_precise = found is not None and found.is_rounding_small
            calibrated = self._tables.that_count(is_precise=is_precise)
            own = () if found is None else found.tables()
            tables = (*calibrated, *own)
            evidenced = EvidencedGate(calibrated, own, self._preamble)
            gate = AuditedGate(evidenced, measured_ratios(tables), self._audited)
            made = self._made = look, gate, bool(tables)
        return made
