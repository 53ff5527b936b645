"""Strategies by name: a selector, its default ratio and what else belongs to it.

    full            nothing is reused
    prefix          only what is exact is reused
    reuse           stored chunk KV as it is
    …               rows are recomputed, chosen by a selector of that name
    epic:16         EPIC as published: so many first tokens of every chunk, not a share
    qcfuse:sink     QCFuse over anchors of another rule (`encode/extras.py`), of another share of a
    qcfuse:20%      chunk's tokens, or both: qcfuse:knorm:20%

An installed package may bring selectors of its own (entry points `kvweave.selectors`). Names are
stable: calibrations, requests and benches refer to them.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from kvweave.errors import ConfigError, RequestError
from kvweave.fuse.drift import STRENGTH
from kvweave.fuse.encode.extras import RULES, SHARE
from kvweave.fuse.request import check_ratio
from kvweave.fuse.selector import AnySelector
from kvweave.fuse.selectors.cacheblend import CacheBlend, KVShareLike
from kvweave.fuse.selectors.cachecraft import CacheCraftLike
from kvweave.fuse.selectors.places import Epic, Random, Stride
from kvweave.fuse.selectors.query_attention import (
    FUSIONRAG_CODE,
    FUSIONRAG_PAPER,
    prophetkv,
    qcfuse,
    usual_critical_layers,
)
from kvweave.fuse.selectors.weave import taper, weave, weave_deep, weave_through
from kvweave.fuse.strategy import REUSE, ModelFacts, Strategy


def _qcfuse(facts: ModelFacts, rule: str = "kvzip", share: float = SHARE) -> AnySelector:
    layers = facts.critical_layers or usual_critical_layers(facts.num_layers)
    if max(layers) >= facts.num_layers:
        raise ConfigError(
            f"critical layer {max(layers)} is beyond the {facts.num_layers} layers "
            "of this model; find its own with `kvweave calibrate layers`"
        )
    return qcfuse(layers, rule, share)


_WITHOUT_SELECTOR = {
    "full": Strategy("full", None, 0.0, reuses="none"),
    "prefix": Strategy("prefix", None, 0.0, reuses="exact"),
    "reuse": REUSE,
}


_SELECTORS: dict[str, tuple[Callable[[ModelFacts], AnySelector], float]] = {
    "random": (lambda _: Random(), 0.15),
    "stride": (lambda _: Stride(), 0.15),
    "epic": (lambda _: Epic(), 0.15),
    "cacheblend": (lambda _: CacheBlend("v"), 0.15),
    "cacheblend-k": (lambda _: CacheBlend("k"), 0.15),
    "cacheblend-gradual": (lambda _: CacheBlend("v", ((1, 1.5), (2, 1.25), (4, 1.0))), 0.15),
    "kvshare-like": (lambda _: KVShareLike(), 0.15),
    "cachecraft-like": (lambda _: CacheCraftLike(), 0.30),
    "fusionrag": (lambda _: FUSIONRAG_PAPER, 0.15),
    "fusionrag-code": (lambda _: FUSIONRAG_CODE, 0.15),
    "prophetkv": (lambda facts: prophetkv(facts.num_layers), 0.20),
    "qcfuse": (_qcfuse, 0.50),
    "weave": (lambda facts: weave(facts.num_layers), 0.15),
    "weave-deep": (lambda facts: weave_deep(facts.num_layers), 0.15),
    "weave-through": (lambda facts: weave_through(facts.num_layers), 0.50),
}


_TAPERED = ("weave", "weave-deep")


_OURS = (*_TAPERED, "weave-through")


NAMES: Sequence[str] = (*_WITHOUT_SELECTOR, *_SELECTORS)


_RENAMED = {"cachecraft": "cachecraft-like"}  # the method as published was never here


VARIANTS = ("epic:16", "qcfuse:sink", "qcfuse:knorm")  # those that are offered; others are known


# what people may choose from, each variant behind the strategy that it is one of
OFFERED: Sequence[str] = tuple(
    each for name in NAMES for each in (name, *(v for v in VARIANTS if v.startswith(f"{name}:")))
)


# epic:1 is a ratio. Names are labels of counters: there is a bounded number of them
_EPIC = re.compile(r"epic:([2-9]|[1-9][0-9])")
_QCFUSE = re.compile(rf"qcfuse(?::({'|'.join(RULES)}))?(?::([1-9][0-9]?|100)%)?")


INSTALLED = "kvweave.selectors"  # the group of entry points that other packages name theirs in


INSTALLED_RATIO = 0.15  # of a selector of theirs that comes without a strategy


def default_ratio(name: str) -> float:
    """The ratio of a strategy where none is given; 0 for one that takes none."""
    base = "qcfuse" if takes_layers(name) else name
    return _SELECTORS[base][1] if base in _SELECTORS else 0.0


def takes_layers(name: str) -> bool:
    """Whether a strategy looks at the critical layers of a model."""
    return _QCFUSE.fullmatch(name) is not None


def is_known(name: str) -> bool:
    """Whether a strategy goes by this name. Other packages are asked for unknown names alone."""
    return name in NAMES or _is_variant(name) or name in _find_installed()


def known_names() -> Sequence[str]:
    """The names of all strategies, those of other packages last."""
    return (*OFFERED, *sorted(_find_installed().keys() - set(OFFERED)))


def say_unknown(name: str, known: Sequence[str]) -> str:
    """Why a name is refused, behind the name."""
    if name in _RENAMED:
        return f"is called {_RENAMED[name]!r} now"
    return f"is unknown; known: {', '.join(known)}"


def split_ratio(text: str) -> tuple[str, str | None]:
    """The name of a strategy, and what stands behind it as its ratio: "weave:0.15". None: nothing
    does; "epic:16" is a name as a whole."""
    if is_known(text) or ":" not in text:
        return text, None
    name, _, ratio = text.rpartition(":")
    return name, ratio


def _is_variant(name: str) -> bool:
    return _EPIC.fullmatch(name) is not None or _QCFUSE.fullmatch(name) is not None


def _open_variant(name: str, facts: ModelFacts) -> Strategy:
    """The strategy that a name with parts behind a colon stands for."""
    if found := _EPIC.fullmatch(name):
        count = int(found[1])
        return Strategy(name, Epic(count), 0.0, per_chunk=count)
    found = _QCFUSE.fullmatch(name)
    assert found is not None, "it is one of these"
    rule, percent = found[1] or "kvzip", found[2]
    share = SHARE if percent is None else int(percent) / 100
    return Strategy(name, _qcfuse(facts, rule, share), _SELECTORS["qcfuse"][1])


@functools.cache
def _find_installed() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=INSTALLED)}


def _open_installed(name: str, facts: ModelFacts) -> Strategy:
    """A strategy that another package brings: its entry point is called with the facts of a model
    and returns a selector or a whole `Strategy`. Raises ConfigError where that fails."""
    entry = _find_installed()[name]
    try:
        made = entry.load()(facts)
        if not isinstance(made, Strategy):
            made = Strategy(name, made, INSTALLED_RATIO)
        made.needs(facts.num_layers)
        if made.selector is not None:
            getattr(made.selector, "begin" if made.selector.in_flight else "select")
        check_ratio(made.ratio)
    except Exception as error:  # whatever it is that a stranger's code does
        package = "a package" if entry.dist is None else repr(entry.dist.name)
        raise ConfigError(
            f"selector {name!r} of {package} ({entry.value}) does not work: "
            f"{type(error).__name__}: {error}; mend that package or uninstall it"
        ) from error
    return replace(made, name=name)


def open_strategy(name: str, facts: ModelFacts) -> Strategy:
    """The strategy called `name` for a model. Raises RequestError or ConfigError, never guesses."""
    if name in _WITHOUT_SELECTOR:
        return _WITHOUT_SELECTOR[name]
    if not is_known(name):
        raise RequestError(f"reuse {name!r} {say_unknown(name, known_names())}")
    if name not in _SELECTORS:
        is_variant = _is_variant(name)
        return _open_variant(name, facts) if is_variant else _open_installed(name, facts)
    make, ratio = _SELECTORS[name]
    if name not in _OURS:
        return Strategy(name, make(facts), ratio)
    tapered = taper(facts.num_layers) if name in _TAPERED else None
    return Strategy(name, make(facts), ratio, STRENGTH, tapered)
