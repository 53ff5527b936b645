"""What a key of the configuration is, and how its value is read from a file or a variable.

A field of a section becomes a key by its annotation (`Kind`: type, bounds, the only values there
are), its default, and what `setting` or `unset` say of it: one help text, and the flag of commands.
"""

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from kvweave.errors import ConfigError
from kvweave.paths import config_folder

FILE_NAME = "kvweave.toml"
FILE_VARIABLE = "KVWEAVE_CONFIG"  # names another file
# ours, but no keys
OTHER_VARIABLES = {
    *(FILE_VARIABLE, "KVWEAVE_HOME", "KVWEAVE_API_KEYS", "KVWEAVE_NATIVE"),
    *("KVWEAVE_URL", "KVWEAVE_API_KEY"),  # of a server that commands are for
}
MOST = 1e9  # more seconds than any wait has; infinity and NaN are above it or beside it


class Range(NamedTuple):
    """The numbers that a key may have."""

    least: float
    most: float = math.inf
    wants: str = ""  # in words; empty: made of the two numbers

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        if self.wants:
            return self.wants
        if self.most == math.inf:
            return f"at least {self.least:g}"
        return f"between {self.least:g} and {self.most:.10g}"


SIZE = "size"  # marks a number of bytes, which may be written with a unit: "8GiB"
MASKED = "masked"  # marks a url that may hold a password: shown without it

Url = Annotated[str, MASKED]
Bytes0 = Annotated[int, SIZE, Range(0)]
Bytes = Annotated[int, SIZE, Range(1)]
Count = Annotated[int, Range(1)]
Count0 = Annotated[int, Range(0)]
Seconds = Annotated[float, Range(0, MOST)]
Share = Annotated[float, Range(0, 1)]


def setting(default: Any, help: str = "", flag: str = "") -> Any:
    """A key with its one help text, a sentence without its period. Commands may take it by `flag`,
    which is written as people type it: "--bound", "--reranker MODEL", "--rewrite/--no-rewrite"."""
    return field(default=default, metadata={"help": help, "flag": flag})


def unset(words: str, help: str = "", flag: str = "", *, is_shown: bool = True) -> Any:
    """A key that is None unless it is given; `words` say what happens then."""
    metadata = {"unset": words, "help": help, "flag": flag}
    return field(default=None, metadata=metadata, repr=is_shown)


class Kind(NamedTuple):
    """What values a key takes."""

    type: type  # str, int, float, bool, Path or tuple (of str)
    is_optional: bool
    known: tuple[str, ...]  # the only values there are; empty: any
    range: Range | None  # of a number
    is_size: bool  # a number of bytes
    is_masked: bool = False  # a url that may hold a password

    @classmethod
    def from_hint(cls, hint: Any) -> "Kind":
        """Read the annotation of a field."""
        is_optional = False
        marks: list[object] = []
        if get_origin(hint) in (Union, UnionType):
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
            is_optional = True
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        known = get_args(hint) if get_origin(hint) is Literal else ()
        plain = str if known else get_origin(hint) or hint
        bounds = next((mark for mark in marks if isinstance(mark, Range)), None)
        return cls(plain, is_optional, known, bounds, SIZE in marks, MASKED in marks)

    def complaint(self, value: object) -> str | None:
        """What is wrong with a value, and which are right; None if nothing is."""
        if value is None:
            return None if self.is_optional else "cannot be None; leave it out"
        types = (int, float) if self.type is float else (self.type,)
        is_right = isinstance(value, types) and (self.type is bool or not isinstance(value, bool))
        if self.type is tuple and isinstance(value, tuple):
            is_right = all(isinstance(each, str) for each in value)
        if not is_right:
            return f"must be {self._words()}, got {value!r}"
        if self.known and value not in self.known:
            return f"must be one of {', '.join(self.known)}; got {value!r}"
        if isinstance(value, int | float) and self.range and not self.range.holds(value):
            return f"must be {self.range}, got {value!r}"
        return None

    def from_toml(self, raw: object, folder: Path) -> object:
        """Return the value of what a file says; a path begins at the file's own folder. What cannot
        be a value stays as it is, and `complaint` says so."""
        if isinstance(raw, str) and (self.is_size or self.type is Path):
            return parse_size(raw) if self.is_size else folder / expand_home(raw)
        if isinstance(raw, list) and self.type is tuple:
            return tuple(raw)
        return float(raw) if self.type is float and type(raw) is int else raw

    def from_text(self, text: str) -> object:
        """Return the value of what a variable says; what cannot be one stays as it is."""
        if self.is_size:
            return parse_size(text)
        if self.type is tuple:
            return () if text == "none" else tuple(part.strip() for part in text.split(","))
        if self.type is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        try:
            return expand_home(text) if self.type is Path else self.type(text)
        except ValueError:
            return text

    def _words(self) -> str:
        if self.is_size:
            return 'bytes or a size such as "8GiB"'
        return {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            tuple: "a list of texts",
        }.get(self.type, "a text")


class Key(NamedTuple):
    """One setting."""

    section: str
    name: str
    owner: type  # class of the section
    kind: Kind
    default: Any
    unset: str  # what None means, in words
    help: str  # what it does, without a period
    flag: str  # of commands, as people type it; "": none

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """KVWEAVE_SECTION_KEY; KVWEAVE_MODEL for the key that is named like its section."""
        parts = dict.fromkeys(("KVWEAVE", self.section.upper(), self.name.upper()))
        return "_".join(parts)


Given = tuple[Key, Any, str]  # key, value, where it comes from


def find_file(named: Path | None, env: Mapping[str, str]) -> Path | None:
    """Return the file to read. One that is named and not there is an error when it is read."""
    if named is not None or env.get(FILE_VARIABLE):
        return named or expand_home(env[FILE_VARIABLE])
    usual = (Path(FILE_NAME), config_folder() / FILE_NAME)
    # os.path: a folder that may not be looked into has no file, Path.is_file would raise
    return next((path for path in usual if os.path.isfile(path)), None)


def expand_home(text: str) -> Path:
    """Put the home folder in place of ~, where it is known."""
    return Path(os.path.expanduser(text))


def read_file(path: Path, keys: Mapping[str, Key]) -> Iterator[Given]:
    """Read the keys of a TOML file. Raises ConfigError."""
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or no TOML
        raise ConfigError(f"{path} is no TOML: {error}") from error
    sections = list(dict.fromkeys(key.section for key in keys.values()))
    for section, table in document.items():
        if section not in sections:
            raise ConfigError(f"{path}: no section [{section}]; known: {', '.join(sections)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is a section; write [{section}] and its keys")
        for name, raw in table.items():
            key = keys.get(f"{section}.{name}")
            if key is None:
                known = [k.name for k in keys.values() if k.section == section]
                raise ConfigError(
                    f"{path}: no key {name!r} in [{section}]; known: {', '.join(known)}"
                )
            yield key, key.kind.from_toml(raw, path.parent), path.name


def read_variables(env: Mapping[str, str], keys: Mapping[str, Key]) -> Iterator[Given]:
    """Read the keys that variables name. Raises ConfigError."""
    known = {key.variable: key for key in keys.values()}
    for name in sorted(env):
        text = env[name]
        if not name.startswith("KVWEAVE_") or name in OTHER_VARIABLES or not text:
            continue
        if _is_service_link(name, text):
            continue
        if name not in known:
            near = [
                v for v, key in known.items() if name.startswith(f"KVWEAVE_{key.section.upper()}_")
            ]
            raise ConfigError(f"{name} is no setting; known: {', '.join(near or known)}")
        yield known[name], known[name].kind.from_text(text), name


def _is_service_link(name: str, text: str) -> bool:
    """Kubernetes tells every container of a service "kvweave" or "kvweave-…" where it is, in
    variables that look like ours: KVWEAVE_SERVICE_HOST, KVWEAVE_PORT=tcp://…"""
    of_service = r"KVWEAVE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
    return (
        re.fullmatch(of_service, name) is not None
        or re.match("(tcp|udp|sctp)://", text) is not None
    )


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_size(text: str) -> int | str:
    """Return the bytes of "8GiB", "64 MB" or "1024"; the text itself if it is no size."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) *([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        return text
    amount = float(found[1]) if "." in found[1] else int(found[1])
    return int(amount * _UNITS[found[2]])
