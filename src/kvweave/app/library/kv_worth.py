"""Whether chunk KV would be used: what was measured of the model, and of the documents."""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress

from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.calibrate.gate import (
    BOUND,
    ELSEWHERE,
    ENOUGH_QUESTIONS,
    MADE_ALONE,
    MADE_BESIDE,
    OWN,
    Cell,
    Table,
    choose,
    deciding_tables,
    speaking_beside,
    tables_for_size,
    worst_cells,
)
from kvweave.calibrate.own_evidence import EvidenceState, EvidenceSubject, OwnEvidence
from kvweave.calibrate.profiles import DecoderTables, find_profile
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import ConfigError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.contexts import digest_ids
from kvweave.kv.format.codec import dtype_name
from kvweave.model.decoder import Decoder
from kvweave.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FEWEST_FUSED = 2  # chunks of a prompt that is fused: the first is exact


class KVWorth:
    """What was measured of the chunk KV of one knowledge base. Any thread."""

    def __init__(
        self,
        kb: KnowledgeBase,
        decoder: Decoder,
        tokenizer: Tokenizer,
        encoder: ChunkEncoder,
        num_chunks: int,
        bound: float | None,
    ) -> None:
        """`encoder` makes it with `decoder`. `num_chunks` are what a question finds, `bound` is
        what it may cost in nats per token; None: the usual."""
        self.num_chunks = max(FEWEST_FUSED, num_chunks)
        self._decoder = decoder
        self._is_permitted = decoder.weights.is_random  # for load tests: it is always used
        self._tokenizer = tokenizer
        self._context = encoder.encoding_context
        self._preamble = digest_ids(encoder.preamble_ids)
        subject = EvidenceSubject(
            decoder.revision,
            dtype_name(decoder.dtype),
            str(encoder.preparation.variant),
            self._context,
            self._preamble,
            decoder.spec.num_layers,
            encoder.context.codec,
        )
        digest = hashlib.blake2b(repr(subject).encode(), digest_size=6).hexdigest()
        usual, found = BOUND if bound is None else bound, DecoderTables()
        with suppress(ConfigError):  # said where it is asked or planned
            found = self._find_measured()
        tables, is_lent = found.that_count(is_precise=True), bool(found.lent)
        allowed = self._find_allowed(tables, usual)
        than = "" if allowed is None else f"-{allowed.strategy}-{allowed.ratio:g}"
        name = f"calibration-{digest}-{self.num_chunks}{than}.json"
        self.evidence = OwnEvidence(
            subject,
            usual,
            kb.folder / KV_FOLDER / name,
            allowed,
            is_beside=bool(tables),
            is_lent=is_lent,
        )

    def begin_asking(self) -> None:
        """Have the documents asked about themselves, unless enough was asked: whether anything may
        be fused, or whether less is enough than the profile of the model lets through."""
        if self.evidence.is_over or self._is_permitted:
            return
        try:
            tables = self.find_tables()
        except ConfigError as error:  # who plans says so, too
            log.warning("%s", error)
            return
        is_answered = any(
            table.kind == OWN and table.num_questions >= ENOUGH_QUESTIONS for table in tables
        )  # by the user's own questions, whatever came of them
        self.evidence.is_asked = not is_answered

    def why_unused(self, bound: float) -> str | None:
        """Why no answer would be fused from it within so many nats; None: some would be, at least
        where nothing was said before, or its evidence may still come to that. Raises ConfigError
        for a profile that cannot be read."""
        evidence, tables = self.evidence, self.find_tables()
        found = evidence.tables()
        made, share = speaking_beside(found, tables), MADE_BESIDE if tables else MADE_ALONE
        why = self.why_shut(tables, bound)
        if why is None or evidence.is_asked or self._find_allowed(made, share * bound) is not None:
            return None
        found_out = evidence.state().why
        return f"{self.why_shut(tables or found, bound)}: {found_out}" if found_out else why

    def state(self) -> EvidenceState | None:
        """How far the documents were asked about themselves; None: they never were. It is open
        where the gate is, with all that it goes by."""
        evidence = self.evidence
        if not (evidence.is_asked or evidence.num_answered):
            return None
        found = evidence.state()
        if found.state != "open" or evidence.allowed is not None:
            return found
        with suppress(ConfigError):  # said where it is planned
            if not speaking_beside(evidence.tables(), self.find_tables()):
                return found._replace(state="measuring" if evidence.is_asked else "shut")
        return found

    def find_tables(self) -> tuple[Table, ...]:
        """What the profile of the model has of it. Raises ConfigError for one that cannot be
        read."""
        return self._find_measured().that_count(is_precise=self.evidence.is_rounding_small)

    def _find_measured(self) -> DecoderTables:
        weights = self._decoder.calibrated_as.fingerprint
        profile = find_profile(weights, self._tokenizer.fingerprint)
        if profile is None:
            return DecoderTables()
        return profile.tables_for(self._decoder, self._context, self._preamble)

    def why_shut(self, tables: Sequence[Table], bound: float) -> str | None:
        """Why these tables let nothing be fused; None: they do, at least where nothing was said
        before."""
        if self._is_permitted or self._find_allowed(tables, bound) is not None:
            return None
        if all(table.has_history for table in tables):
            return "the model is not calibrated, so nothing would be fused"
        return f"calibration lets nothing be fused within {bound:g} nats per token"

    def _find_allowed(self, tables: Sequence[Table], bound: float) -> Cell | None:
        """The least work that these tables let through, where nothing was said before."""
        deciding = deciding_tables(tables, self.num_chunks)
        alone = tables_for_size([t for t in deciding if not t.has_history], self.num_chunks)
        is_here = all(table.preamble == self._preamble for table in alone)
        return choose(worst_cells(alone), bound if is_here else ELSEWHERE * bound)
