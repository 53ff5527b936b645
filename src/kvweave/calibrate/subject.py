"""The model that is measured, and its profile: found, read, written."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvweave.calibrate.asked_kb import AskedKB
from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import ContextPrefixes, FixedContext, NeighbourContext
from kvweave.calibrate.measure import MAX_ANSWER_TOKENS
from kvweave.calibrate.profiles import (
    Profile,
    aside,
    load_profile,
    packaged_profile,
    save_profile,
    set_aside,
    user_path,
)
from kvweave.calibrate.questions import QuestionRecord, make_case, repeat_ids
from kvweave.errors import ConfigError, CorpusError
from kvweave.fuse.encode.contexts import Variant, context_filler
from kvweave.model.decoder import Decoder
from kvweave.model.files.embedded import default_model
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer

Say = Callable[[str], None]  # one line for the user


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A loaded model and what is known of it so far."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    profile: Profile
    unusable: Path | None = None  # a profile that cannot be read; kept as .old when one is written

    @property
    def revision(self) -> str:
        return self.decoder.calibrated_as.revision

    @property
    def dtype(self) -> str:
        return str(self.decoder.dtype).removeprefix("torch.")

    def case(self, record: QuestionRecord) -> Case:
        return make_case(self.tokenizer, record)

    def fitting(self, cases: Iterable[Case], say: Say) -> list[Case]:
        """Return the cases that the model's context holds; `say` hears of the rest. Raises
        CorpusError."""
        every = list(cases)
        most = self.decoder.spec.max_context - MAX_ANSWER_TOKENS
        fit = [case for case in every if case.num_tokens <= most]
        if not fit:
            raise CorpusError(f"no prompt fits into the model's context; at most {most:,} tokens")
        if len(fit) < len(every):
            say(f"{len(every) - len(fit)} prompts of more than {most:,} tokens are left out")
        return fit

    def encoding(self, variant: Variant, kb: AskedKB | None) -> FixedContext | NeighbourContext:
        """Chunk KV behind this encoding context, computed on the spot. Neighbours are those that
        `kb` has."""
        prefixes, repeat = ContextPrefixes(self.decoder), repeat_ids(self.tokenizer)
        name, filler = str(variant), context_filler(self.tokenizer, variant)
        if variant.kind != "neighbours":
            return FixedContext(self.decoder, prefixes, name, filler, repeat)
        assert kb is not None, "neighbours without a knowledge base are refused before"
        nearest = kb.nearest(variant.size)
        return NeighbourContext(self.decoder, prefixes, name, filler, repeat, nearest)

    def save(self, profile: Profile, path: Path | None) -> Path:
        """Write a profile, to the user's folder unless there is a `path`; returns where it lies."""
        path = path or user_path(self.decoder.calibrated_as.fingerprint)
        if path == self.unusable:
            set_aside(path)
        save_profile(path, profile)
        return path


def load_subject(
    profile_file: Path | None, say: Say, *, model: str | None, device: str, dtype: str, quant: str
) -> Subject:
    """Load a model, the default if `model` is None, and its profile if it has one: from
    `profile_file` where that is there.

    A profile that cannot be used is no reason to stop: measuring again is what every other command
    tells the user to do about it. `say` hears of it.
    """
    model = default_model() if model is None else model
    folder = locate(model)
    tokenizer = Tokenizer(folder)
    if quant == "auto":  # what it rounds is held to the tables of the exact weights
        quant = "none"
    decoder = load_decoder(folder, device=device, dtype=dtype, quant=quant)
    weights = decoder.calibrated_as.fingerprint
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else model
    written = profile_file or user_path(weights)
    source = written if written.exists() else user_path(weights)
    known: Profile | None = None
    unusable = None
    try:
        if source.is_file():
            packaged = packaged_profile(weights, tokenizer.fingerprint)
            known = load_profile(source, weights, tokenizer.fingerprint).beside(packaged)
    except ConfigError as error:
        reason = str(error).rpartition("; ")[0] or str(error)  # what to do about it is being done
        kept = f"it is kept as {aside(source).name}" if source == written else "it is left alone"
        say(f"{reason}: measured anew, {kept}")
        unusable = source
    known = known or packaged_profile(weights, tokenizer.fingerprint)
    fresh = Profile(name, weights, tokenizer.fingerprint)
    return Subject(name, decoder, tokenizer, known or fresh, unusable)
