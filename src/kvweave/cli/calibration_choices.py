"""What `kvweave calibrate` measures, as its options say it; and what is wrong with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.cli.calibrating import Subject
from kvweave.errors import CorpusError, RequestError

if TYPE_CHECKING:
    from kvweave.calibrate.measure import Setting
    from kvweave.calibrate.questions import QuestionRecord
    from kvweave.fuse.encode.contexts import Variant


def read_asked(qa_file: Path | None, questions_file: Path | None) -> "list[QuestionRecord]":
    from kvweave.calibrate.questions import read_questions, read_records

    path = qa_file or questions_file
    assert path is not None, "one of them was given"
    found = list(read_records(path) if qa_file else read_questions(path))
    if not found:
        raise CorpusError(f"{path.name} holds no question")
    return found


def settings_for(
    subject: Subject, names: Sequence[str], ratios: Sequence[float]
) -> "list[Setting]":
    """Every strategy at every ratio; plain reuse once, as it recomputes nothing."""
    from kvweave.calibrate.encodings import KVZIP
    from kvweave.calibrate.measure import Setting
    from kvweave.fuse.strategy import open_strategy

    num_layers = subject.decoder.spec.num_layers
    facts = subject.profile.facts(num_layers)
    settings = []
    for strategy in [open_strategy(name, facts) for name in names]:
        beyond = set(strategy.needs(num_layers).extras) - {KVZIP}
        if beyond:
            raise RequestError(
                f"calibrate cannot measure {strategy.name!r}: it needs {sorted(beyond)[0]!r} "
                "beside stored chunk KV; leave it out"
            )
        each = [0.0] if strategy.selector is None else ratios
        settings += [Setting(strategy, ratio) for ratio in each]
    return settings


def variants_of(encodings: str | None, kb_folder: Path | None) -> "list[Variant]":
    """The encoding contexts that were asked for, or else the one whose KV will be served."""
    from kvweave.fuse.encode.contexts import parse_variant

    names = split_list(encodings or encoding_of(kb_folder))
    variants = list(dict.fromkeys(parse_variant(name) for name in names))
    for variant in variants:
        if variant.kind == "neighbours" and kb_folder is None:
            raise RequestError(
                f"{variant} are chunks of a knowledge base, and --qa has none; "
                "give --questions FILE with --kb DIR"
            )
    return variants


def encoding_of(kb_folder: Path | None) -> str:
    """What chunk KV will be encoded behind when it is asked for: that is what must be measured."""
    from kvweave.app.library.stored_kv import KV_FOLDER
    from kvweave.fuse.encode.preparation import DEFAULT_ENCODING, read_preparation

    found = None if kb_folder is None else read_preparation(kb_folder / KV_FOLDER)
    return DEFAULT_ENCODING if found is None else str(found.variant)


def strategy_names(text: str) -> list[str]:
    from kvweave.fuse.strategy import NAMES

    names = split_list(text)
    for name in names:
        if name not in NAMES:
            raise RequestError(f"strategy {name!r} is unknown; known: {', '.join(NAMES)}")
        if name in ("full", "prefix"):
            raise RequestError(f"strategy {name!r} is exact; there is nothing to measure")
    return names


def shares_of(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in split_list(text)]
    except ValueError:
        ratios = [-1.0]
    if not all(0.0 < ratio < 1.0 for ratio in ratios):
        raise RequestError(f"--ratios {text!r}: give shares between 0 and 1, such as 0.05,0.15")
    return ratios


def split_list(text: str) -> list[str]:
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise RequestError("a list is empty; give names or numbers with commas between them")
    return parts
