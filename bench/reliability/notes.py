"""The documents of the crash benches: what each version of each says, so that a reply can be judged.

Every sentence carries a word that no other version of any note has. So each chunk says which note
and version it is of, and a search by words for that version finds it or nothing.
"""

import random
import re
from collections.abc import Collection
from typing import NamedTuple

WORDS = (
    *("node", "pod", "drain", "cordon", "evict", "quota", "volume", "claim", "label", "probe"),
    *("image", "rollout", "taint", "replica", "secret", "ingress", "budget", "service"),
)
MARK = re.compile(r"k(\d+)v(\d+)z")


class Version(NamedTuple):
    """One state of a note."""

    key: int
    number: int

    @property
    def mark(self) -> str:
        return f"k{self.key}v{self.number}z"

    @property
    def title(self) -> str:
        return f"Note {self.mark}"

    @property
    def text(self) -> str:
        """Of one to four chunks."""
        rng = random.Random(f"{self.key}/{self.number}")
        sentences = []
        for _ in range(rng.randrange(3, 30)):
            words = [*rng.choices(WORDS, k=rng.randrange(4, 9)), self.mark]
            rng.shuffle(words)
            sentences.append(" ".join(words).capitalize() + ".")
        return " ".join(sentences)


def versions_in(text: str) -> set[Version]:
    """Whose sentences these are."""
    found = MARK.findall(text.lower())
    return {Version(int(key), int(number)) for key, number in found}


def fault_in(text: str, title: str, allowed: Collection[Version]) -> str | None:
    """What is wrong with a chunk that was served, in words; None: nothing."""
    found = versions_in(f"{title} {text}")
    if len(found) != 1:
        return f"a chunk of {len(found)} notes was served: {title!r} {text[:80]!r}"
    (version,) = found
    if version not in allowed:
        return f"{version.mark} was served, which is no more"
    said = " ".join(text.split()).lower()
    whole = " ".join(f"{version.title} {version.text}".split()).lower()
    body = said.removeprefix(version.title.lower()).lstrip("# ").strip()
    if body not in whole:
        return f"{version.mark} was served with other words: {text[:80]!r}"
    return None
