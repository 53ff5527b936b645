"""What the calibrate commands share: the model that is measured, its profile, a progress bar."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvweave.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from kvweave.calibrate.case import Case
    from kvweave.calibrate.encodings import FixedContext
    from kvweave.calibrate.neighbour_context import NeighbourContext
    from kvweave.calibrate.profiles import Profile
    from kvweave.calibrate.questions import QuestionRecord
    from kvweave.cli.asked_kb import AskedKB
    from kvweave.fuse.encode.contexts import Variant
    from kvweave.model.decoder import Decoder
    from kvweave.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A loaded model and what is known of it so far."""

    name: str
    decoder: "Decoder"
    tokenizer: "Tokenizer"
    profile: "Profile"
    unusable: Path | None = None  # a profile that cannot be read; kept as .old when one is written

    @property
    def revision(self) -> str:
        return self.decoder.revision

    @property
    def dtype(self) -> str:
        return str(self.decoder.dtype).removeprefix("torch.")

    def case(self, record: "QuestionRecord") -> "Case":
        from kvweave.calibrate.questions import make_case

        return make_case(self.tokenizer, record)

    def fitting(self, cases: "Iterable[Case]") -> "list[Case]":
        """Those that the model's context holds, with a line on stderr about the rest."""
        from kvweave.calibrate.measure import MAX_ANSWER_TOKENS

        every = list(cases)
        most = self.decoder.spec.max_context - MAX_ANSWER_TOKENS
        fit = [case for case in every if case.num_tokens <= most]
        if not fit:
            raise CorpusError(f"no prompt fits into the model's context; at most {most:,} tokens")
        if len(fit) < len(every):
            left = len(every) - len(fit)
            click.echo(f"{left} prompts of more than {most:,} tokens are left out", err=True)
        return fit

    def encoding(
        self, variant: "Variant", kb: "AskedKB | None"
    ) -> "FixedContext | NeighbourContext":
        """Chunk KV behind this encoding context, computed on the spot. Neighbours are those that
        `kb` has."""
        from kvweave.calibrate.encodings import ContextPrefixes, FixedContext
        from kvweave.calibrate.neighbour_context import NeighbourContext
        from kvweave.calibrate.questions import repeat_ids
        from kvweave.fuse.encode.contexts import context_filler

        name, prefixes, repeat = (
            str(variant),
            ContextPrefixes(self.decoder),
            repeat_ids(self.tokenizer),
        )
        filler = context_filler(self.tokenizer, variant)
        if variant.kind != "neighbours":
            return FixedContext(self.decoder, prefixes, name, filler, repeat)
        assert kb is not None, "neighbours without a knowledge base are refused before"
        nearest = kb.nearest(variant.size)
        return NeighbourContext(self.decoder, prefixes, name, filler, repeat, nearest)

    def save(self, profile: "Profile", path: Path | None) -> Path:
        from kvweave.calibrate.profiles import save_profile, set_aside, user_path

        path = path or user_path(self.decoder.weights.fingerprint)
        if path == self.unusable:
            set_aside(path)
        save_profile(path, profile)
        return path


def load_subject(
    profile_file: Path | None, *, model: str, device: str, dtype: str, quant: str
) -> Subject:
    """Load a model, and its profile if it has one: from `profile_file` where that is there.

    A profile that cannot be used is no reason to stop: measuring again is the way out that every
    other command names. A line on stderr says so.
    """
    from kvweave.calibrate.profiles import Profile, aside, load_profile, packaged_profile, user_path
    from kvweave.model.files.locate import locate
    from kvweave.model.load import load_decoder
    from kvweave.text.tokenizer import Tokenizer

    folder = locate(model)
    tokenizer = Tokenizer(folder)
    decoder = load_decoder(folder, device=device, dtype=dtype, quant=quant)
    weights = decoder.weights.fingerprint
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else model
    written = profile_file or user_path(weights)
    source = written if written.exists() else user_path(weights)
    known: Profile | None = None
    unusable = None
    try:
        if source.is_file():
            known = load_profile(source, weights, tokenizer.fingerprint)
    except ConfigError as error:
        reason = str(error).rpartition("; ")[0] or str(error)  # the way out is being walked
        kept = f"it is kept as {aside(source).name}" if source == written else "it is left alone"
        click.echo(f"{reason}: measured anew, {kept}", err=True)
        unusable = source
    known = known or packaged_profile(weights, tokenizer.fingerprint)
    fresh = Profile(name, weights, tokenizer.fingerprint)
    return Subject(name, decoder, tokenizer, known or fresh, unusable)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Count and time left on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
