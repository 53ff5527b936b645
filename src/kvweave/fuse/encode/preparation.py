"""What a knowledge base's chunk KV is prepared with: the encoding context.

Written once into the folder of the chunk KV, so that asking finds what ingest has made. All of it
must fit into the model's context while KV is computed: preamble ‖ encoding context ‖ chunk.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import (
    ISOLATED,
    Variant,
    context_filler,
    filler_passages,
    parse_variant,
)
from kvweave.fuse.encode.extras import REPEAT
from kvweave.text.tokenizer import Tokenizer

FILE = "preparation.json"
DEFAULT_ENCODING = "filler"


@dataclass(frozen=True, slots=True)
class Preparation:
    """How chunks are encoded."""

    variant: Variant

    @classmethod
    def parse(cls, encoding: str = DEFAULT_ENCODING) -> "Preparation":
        """Read what the user typed. Raises ConfigError."""
        return cls(parse_variant(encoding))


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids that preparation needs besides the chunks'."""

    filler: tuple[int, ...] = ()
    repeat: tuple[int, ...] = ()  # asks for a repetition, answer header included
    passage_ends: tuple[int, ...] = ()  # tokens of filler:1, filler:2, … as far as there is any

    @classmethod
    def for_preparation(
        cls, tokenizer: Tokenizer, preparation: Preparation, closing: Sequence[int] = ()
    ) -> "Texts":
        """`closing` is what the chat template puts behind the user's words."""
        repeat = (*tokenizer.encode_text(REPEAT), *closing)
        filler = context_filler(tokenizer, preparation.variant)
        if not filler:
            return cls(repeat=repeat)
        lengths = (len(tokenizer.encode_text(passage)) for passage in filler_passages())
        return cls(filler, repeat, tuple(accumulate(lengths)))


def read_preparation(folder: Path) -> Preparation | None:
    """What the chunk KV in `folder` was prepared with; None if nothing was yet."""
    try:
        return _parse_stored(json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{folder / FILE} cannot be read ({error}); delete it") from error


def choose_preparation(folder: Path, encoding: str | None = None) -> Preparation:
    """How to prepare chunk KV in `folder`: as given, else as stored, else as usual."""
    if encoding is not None:
        return Preparation.parse(encoding)
    return read_preparation(folder) or Preparation.parse()


def write_preparation(folder: Path, preparation: Preparation) -> None:
    """Write how the chunk KV in `folder` is prepared. An upload and what makes KV in the background
    may both do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {"encoding": str(preparation.variant)}
    temporary = folder / f"{FILE}.{os.urandom(6).hex()}.tmp"  # nobody else's
    temporary.write_text(json.dumps(stored) + "\n")
    temporary.replace(folder / FILE)


def _parse_stored(stored: object) -> Preparation:
    match stored:
        case {"encoding": str(encoding)}:  # and extras, in those of versions that had them
            return Preparation.parse(encoding)
    raise ValueError("it is no object with an encoding")


class Shortage(NamedTuple):
    """What does not fit, and what would."""

    says: str  # the beginning of a line for the user
    chunk_tokens: int | None  # chunks of so many fit; None: it is the encoding context
    encoding: str  # fits, and so does a smaller one of that kind; empty: none of that kind does
    less: str  # the encoding context to take then


def find_shortage(
    variant: Variant,
    texts: Texts,
    preamble_len: int,
    chunk_tokens: int,
    max_context: int,
) -> Shortage | None:
    """What would run past the model's last position, for chunks of at most `chunk_tokens`. None:
    all fits."""
    room = max_context - preamble_len - chunk_tokens  # for the encoding context
    chunks = f"chunks of {chunk_tokens} tokens"
    where = f"do not fit into the {max_context:,} positions of this model"
    if room < 0:
        return Shortage(f"{chunks} {where}", max(0, max_context - preamble_len), "", ISOLATED)
    needed, less = len(texts.filler), ISOLATED  # which is filler of no passages
    if variant.kind == "neighbours":
        less = "filler" if needed <= room else less
        largest = max(0, room - needed) // chunk_tokens
        needed += variant.size * chunk_tokens
    else:
        largest = sum(end <= room for end in texts.passage_ends)
    if needed <= room:
        return None
    fits = f"{variant.kind}:{largest}" if largest else ""
    return Shortage(f"{variant} and {chunks} {where}", None, fits, less)


def check_room(
    preparation: Preparation, texts: Texts, preamble_len: int, max_context: int, chunk_tokens: int
) -> None:
    """Refuse what would run past the model's last position, for chunks of at most `chunk_tokens`.

    Raises ConfigError with the largest size that fits. Computes nothing.
    """
    short = find_shortage(preparation.variant, texts, preamble_len, chunk_tokens, max_context)
    if short is None:
        return
    if short.chunk_tokens is not None:
        advice = f"make a new knowledge base with --chunk-tokens {short.chunk_tokens} or fewer"
    else:
        advice = "give " + (
            f"{short.encoding} or less" if short.encoding else f"--encoding {short.less}"
        )
    raise ConfigError(f"{short.says}; {advice}")
