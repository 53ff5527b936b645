"""The profile of a model: its critical layers and its calibration tables, as one JSON file.

A user's own profile lies under the cache folder and is written by `kvweave calibrate`; the embedded
models come with one in the package. The user's wins. A profile names the weights it was measured
on and is refused for any others.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvweave import paths
from kvweave.calibrate.gate import (
    ENOUGH_QUESTIONS,
    OWN,
    Cell,
    Table,
    cheapest,
    choose,
    deciding_tables,
    worst_cells,
)
from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import Variant, variant_name
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.decoder import Decoder

FORMAT = 7
NO_LEADS = 6  # its cells take the lead of close calls from their table: read as it is
ONE_KIND = 5  # its tables do not say what kind of questions they hold: the user's own
# The table that came with kvweave when profiles had that format: one kind of questions, which let
# through what others do not bear. A user's profile may hold a copy of it.
REPLACED = ("298465d60b8ca5a7fcff7c5ac822a226",)
# Of these the layers are read and the tables are not: no gate could trust them. Format 1 does not
# say what stood in front of the chunks, the `weave` of formats 2 and 4 chose other rows, and that
# of format 3 recomputed them in every layer.
OLD_TABLES = (1, 2, 3, 4)
SHORT = 12  # characters of the fingerprint in the name of a packaged profile
NEIGHBOURS = re.compile("neighbours:([1-9][0-9]{0,5}):")  # how `variant_name` begins for them
Data = TypeVar("Data")


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Which layers of a model show best what a question asks for, see layer_profile.py."""

    num_samples: int
    mean_context_tokens: float
    recall: tuple[float, ...]  # Recall@10 % of every layer alone
    recall_low: tuple[float, ...]  # its 95 % interval over samples
    recall_high: tuple[float, ...]
    order: tuple[int, ...]  # all layers, best first
    curve: tuple[float, ...]  # recall of the best 1, 2, … layers together
    all_layers: float  # recall of all layers together, for comparison
    full_context: float  # the same with a probe that sees the whole context: the reference
    critical: tuple[int, ...]  # the beginning of `order` that is worth it

    def __post_init__(self) -> None:
        """Check the fields, because a profile is a file that people edit. Raises ValueError."""
        for name in ("order", "critical"):
            for layer in getattr(self, name):
                if layer < 0:
                    raise ValueError(f"LayerProfile.{name} has {layer}, which is no layer")


class DecoderTables(NamedTuple):
    """Tables that speak for a decoder."""

    own: tuple[Table, ...] = ()
    # of a half type: those of its weights in float32, which count once its rounding was measured
    # and is small
    lent: tuple[Table, ...] = ()

    def that_count(self, *, is_precise: bool) -> tuple[Table, ...]:
        """Return those that count, where rounding `is_precise` enough, or is not known to be."""
        return self.own or (self.lent if is_precise else ())


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of one model."""

    model: str  # name, for people
    weights: str  # fingerprint
    tokenizer: str  # fingerprint
    layers: LayerProfile | None = None
    calibration: tuple[Table, ...] = ()

    def facts(self, num_layers: int) -> ModelFacts:
        """What strategies want to know."""
        return ModelFacts(num_layers, self.layers.critical if self.layers else ())

    def tables(self, revision: str, context: str, preamble: str) -> tuple[Table, ...]:
        """What was measured with this very decoder and encoding context (`contexts.variant_name`),
        a table for each subject (`Table.subject`): behind this preamble (`contexts.digest_ids`),
        and for those that were not measured there, behind another one."""
        fits = [t for t in self.calibration if (t.revision, t.context) == (revision, context)]
        here = [table for table in fits if table.preamble == preamble]
        subjects = {table.subject for table in here}
        # what others asked elsewhere speaks beside what was asked here, the user's own only alone
        others = [t for t in fits if t.subject not in subjects and (t.kind != OWN or not here)]
        elsewhere = {table.subject: table for table in others}
        return (*here, *elsewhere.values())

    def tables_for(self, decoder: Decoder, context: str, preamble: str) -> "DecoderTables":
        """What was measured with this very decoder, or where there is nothing, with its weights in
        float32."""
        own = self.tables(decoder.calibrated_as.revision, context, preamble)
        exact = decoder.revision_in_float32
        lent = () if own or exact is None else self.tables(exact, context, preamble)
        return DecoderTables(own, lent)

    def with_tables(self, *tables: Table) -> "Profile":
        """Return the profile with these tables added; each replaces one of equal decoder, context,
        preamble and subject."""
        fresh = set(map(_table_identity, tables))
        kept = [table for table in self.calibration if _table_identity(table) not in fresh]
        return replace(self, calibration=(*kept, *tables))

    def beside(self, packaged: "Profile | None") -> "Profile":
        """Return a user's profile with what comes with the model: its tables of all kinds as they
        are packaged now, and its layers where the user never looked for any."""
        if packaged is None:
            return self
        own = tuple(table for table in self.calibration if table.kind == OWN)
        layers = self.layers or packaged.layers
        return replace(self, layers=layers, calibration=(*own, *packaged.calibration))


def _table_identity(table: Table) -> tuple[str, str, str, tuple[str, int]]:
    """Return what a table measured: two tables of equal identity replace each other."""
    return table.revision, table.context, table.preamble, table.subject


def calibrated_neighbours(
    profile: Profile, revision: str, preamble: str, filler: Sequence[int]
) -> int | None:
    """How many neighbours calibration found to be good with this very decoder, preamble
    (`contexts.digest_ids`) and filler: those whose choice costs the least work.

    None: no number was measured, or none has a choice. Tables of few questions speak only where no
    other has a choice: chunk KV that `auto` takes is worth more than some that looks cheap.
    """
    named = (NEIGHBOURS.match(table.context) for table in profile.calibration)
    tables = {}
    for size in sorted({int(found[1]) for found in named if found}):
        context = variant_name(Variant("neighbours", size), filler)
        measured = profile.tables(revision, context, preamble)
        here = deciding_tables([table for table in measured if table.preamble == preamble])
        if here:
            tables[str(size)] = here
    for least in (ENOUGH_QUESTIONS, 0):
        enough = {s: ts for s, ts in tables.items() if all(t.num_questions >= least for t in ts)}
        size_chosen = cheapest({size: choose(worst_cells(ts)) for size, ts in enough.items()})
        if size_chosen is not None:
            return int(size_chosen)
    return None


def user_path(weights: str) -> Path:
    """Where the user's profile of these weights lies."""
    return paths.home() / "profiles" / f"{weights}.json"


def find_profile(weights: str, tokenizer: str) -> Profile | None:
    """The user's profile of a model, or the packaged one; None if there is neither.

    Raises ConfigError if the file is damaged, of another version or of another model.
    """
    path = user_path(weights)
    packaged = packaged_profile(weights, tokenizer)
    if path.is_file():
        return load_profile(path, weights, tokenizer).beside(packaged)
    return packaged


def packaged_profile(weights: str, tokenizer: str) -> Profile | None:
    """The profile that comes with an embedded model; None for any other, such as the same model
    with quantised weights, of which nothing was measured. Raises ConfigError."""
    for packaged in files("kvweave.calibrate").joinpath("packaged").iterdir():
        if packaged.name.endswith(f"-{weights[:SHORT]}.json"):
            text = packaged.read_text("utf-8")
            if json.loads(text)["weights"] == weights:
                return _parse(packaged.name, text, weights, tokenizer)
    return None


def load_profile(path: Path, weights: str, tokenizer: str) -> Profile:
    """Read a profile of exactly this model. Raises ConfigError."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the profile {path}: {error}") from error
    return _parse(str(path), text, weights, tokenizer)


def set_aside(path: Path) -> None:
    """Keep a profile that cannot be used beside itself, as NAME.old; one from before goes."""
    try:
        path.replace(aside(path))
    except OSError as error:
        raise ConfigError(f"cannot rename the profile {path}: {error.strerror}") from error


def aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def save_profile(path: Path, profile: Profile) -> None:
    """Write whole or not at all: a reader sees the old file or the new one."""
    text = json.dumps(
        {"format": FORMAT, **asdict(_round_numbers(profile))}, indent=1, allow_nan=False
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from error


def _parse(name: str, text: str, weights: str, tokenizer: str) -> Profile:
    again = "make it again with `kvweave calibrate`"
    try:
        found = json.loads(text)
        version = found.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{name} is no profile of kvweave; delete it, then {again}") from error
    if version in OLD_TABLES:
        found["calibration"] = []
    elif version == ONE_KIND:
        kept = [t for t in found.get("calibration", ()) if t.get("data_hash") not in REPLACED]
        found["calibration"] = kept
    elif version not in (NO_LEADS, FORMAT):
        raise ConfigError(f"{name} has format {version}, this kvweave reads {FORMAT}; {again}")
    try:
        layers = found["layers"]
        tables = [
            _read(Table, {**table, "cells": tuple(_read(Cell, c) for c in table["cells"])})
            for table in found["calibration"]
        ]
        profile = _read(
            Profile,
            {
                **found,
                "layers": None if layers is None else _read(LayerProfile, layers),
                "calibration": tuple(tables),
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name} is damaged ({error}); delete it, then {again}") from error
    if profile.weights != weights:
        raise ConfigError(
            f"{name} was measured on other weights ({profile.model}, {profile.weights[:SHORT]}), "
            f"this model is {weights[:SHORT]}; {again}"
        )
    if profile.tokenizer != tokenizer:
        raise ConfigError(f"{name} was measured with another tokenizer; {again}")
    return profile


def _read(kind: type[Data], found: Mapping[str, Any]) -> Data:
    """A dataclass from a JSON object: every field, no other, lists as tuples."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    missing = [name for name, f in known.items() if f.default is MISSING and name not in found]
    unknown = sorted(set(found) - set(known))
    if missing or unknown:
        wrong = f"no {missing[0]!r}" if missing else f"{unknown[0]!r} is unknown"
        raise ValueError(f"{kind.__name__}: {wrong}")
    for name, value in found.items():
        _check_type(kind.__name__, name, value, str(known[name].type))
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in found.items()})


def _check_type(kind: str, name: str, value: Any, expected: str) -> None:
    """Raise ValueError for a number in place of a word, or the other way round. Annotations are
    plain types here."""
    if "str" in expected and not isinstance(value, str):
        raise ValueError(f"{kind}.{name} is {value!r}")
    if "float" in expected or "int" in expected:
        for one in value if "tuple" in expected else [value]:
            if not _is_number(one, expected):
                raise ValueError(f"{kind}.{name} has {one!r}")


def _is_number(value: Any, expected: str) -> bool:
    if value is None:
        return "None" in expected
    if isinstance(value, bool) or ("float" not in expected and not isinstance(value, int)):
        return False
    return isinstance(value, int | float) and math.isfinite(value)


def _round_numbers(profile: Profile) -> Profile:
    """Round all numbers to six significant digits: more is noise, and the file is read by people
    too."""
    layers = None if profile.layers is None else _round(profile.layers)
    tables = tuple(
        _round(replace(table, cells=tuple(_round(cell) for cell in table.cells)))
        for table in profile.calibration
    )
    return replace(profile, layers=layers, calibration=tables)


def _round(data: Data) -> Data:
    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        return tuple(map(short, value)) if isinstance(value, tuple) else value

    changes = {f.name: short(getattr(data, f.name)) for f in fields(data)}  # type: ignore[arg-type]
    return replace(data, **changes)  # type: ignore[type-var]
