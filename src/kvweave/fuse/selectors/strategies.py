"""Strategies by name: a selector, its default ratio and what else belongs to it.

    full            nothing is reused
    prefix          only what is exact is reused
    reuse           stored chunk KV as it is
    …               rows are recomputed, chosen by a selector of that name

An installed package may bring selectors of its own (entry points `kvweave.selectors`). Names are
stable: calibrations, requests and benches refer to them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from kvweave.errors import ConfigError, RequestError
from kvweave.fuse.drift import STRENGTH
from kvweave.fuse.request import check_ratio
from kvweave.fuse.selector import AnySelector
from kvweave.fuse.selectors.cacheblend import CacheBlend, KVShareLike
from kvweave.fuse.selectors.cachecraft import CacheCraftInter
from kvweave.fuse.selectors.places import Epic, Random, Stride
from kvweave.fuse.selectors.query_attention import (
    FUSIONRAG_CODE,
    FUSIONRAG_PAPER,
    prophetkv,
    qcfuse,
)
from kvweave.fuse.selectors.weave import taper, weave, weave_deep, weave_through
from kvweave.fuse.strategy import REUSE, ModelFacts, Strategy


def _qcfuse(facts: ModelFacts) -> AnySelector:
    if not facts.critical_layers:
        raise ConfigError(
            "strategy 'qcfuse' needs the critical layers of this model; "
            "find them with `kvweave calibrate layers`"
        )
    if max(facts.critical_layers) >= facts.num_layers:
        raise ConfigError(
            f"critical layer {max(facts.critical_layers)} is beyond the {facts.num_layers} layers "
            "of this model; find its own with `kvweave calibrate layers`"
        )
    return qcfuse(facts.critical_layers)


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
    "kvshare": (lambda _: KVShareLike(), 0.15),
    "cachecraft": (lambda _: CacheCraftInter(), 0.30),
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


INSTALLED = "kvweave.selectors"  # the group of entry points that other packages name theirs in


INSTALLED_RATIO = 0.15  # of a selector of theirs that comes without a strategy


NEEDS_PROFILE = frozenset({"qcfuse"})  # cannot be opened without the critical layers


def default_ratio(name: str) -> float:
    """The ratio of a strategy where none is given; 0 for one that takes none."""
    return _SELECTORS[name][1] if name in _SELECTORS else 0.0


def is_known(name: str) -> bool:
    """Whether a strategy goes by this name. Other packages are asked for unknown names alone."""
    return name in NAMES or name in _find_installed()


def known_names() -> Sequence[str]:
    """The names of all strategies, those of other packages last."""
    return (*NAMES, *sorted(_find_installed().keys() - set(NAMES)))


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
        raise RequestError(f"reuse {name!r} is unknown; known: {', '.join(known_names())}")
    if name not in _SELECTORS:
        return _open_installed(name, facts)
    make, ratio = _SELECTORS[name]
    if name not in _OURS:
        return Strategy(name, make(facts), ratio)
    tapered = taper(facts.num_layers) if name in _TAPERED else None
    return Strategy(name, make(facts), ratio, STRENGTH, tapered)
