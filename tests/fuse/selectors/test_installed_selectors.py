"""Selectors of other packages: a small wheel is really installed, and found by its entry points."""

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.app.answer.question import Question, parse_reuse
from kvweave.errors import ConfigError, RequestError
from kvweave.fuse.selectors import strategies
from kvweave.fuse.selectors.strategies import known_names, open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.load import load_decoder
from worlds.fuse import World, make_ids
from worlds.tiny_models import make_model_folder

FACTS = ModelFacts(num_layers=6)
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "selector"
PROJECT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
CODE = """
from last_rows import LastRows

from kvweave.fuse.selectors.cacheblend import CacheBlend
from kvweave.fuse.strategy import Strategy


def make_strategy(facts):
    return Strategy("any name", LastRows(), 0.4, drift=0.5)


def make_in_flight(facts):
    return CacheBlend("v")


def make_nothing(facts):
    return object()
"""
ENTRIES = f"""
[kvweave.selectors]
last-rows = {PROJECT["project"]["entry-points"]["kvweave.selectors"]["last-rows"]}
last-rows-drifting = their_selectors:make_strategy
weave = their_selectors:make_strategy
in-flight = their_selectors:make_in_flight
no-module = their_selectors_that_are_not:make
no-selector = their_selectors:make_nothing
"""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("theirs")
    wheel = folder / "their_selectors-1.0-py3-none-any.whl"
    info = "their_selectors-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("their_selectors.py", CODE)
        archive.write(EXAMPLE / "last_rows.py", "last_rows.py")
        archive.writestr(f"{info}/entry_points.txt", ENTRIES)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: their-selectors\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    target = folder / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(target))
        strategies._find_installed.cache_clear()
        yield target
    strategies._find_installed.cache_clear()


def test_a_selector_of_another_package_chooses_the_rows(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama", num_hidden_layers=6)
    world = World(load_decoder(folder, device="cpu", dtype="float32"), chunks=make_ids(8, 12, 20))
    fused, _ = world.fuse("last-rows", 0.25)
    hits = list(world.request.hits)
    assert list(fused.recomputed) == hits[-(len(hits) // 4) :]


def test_it_may_bring_a_whole_strategy_which_goes_by_the_name_of_its_entry() -> None:
    opened = open_strategy("last-rows-drifting", FACTS)
    assert (opened.name, opened.ratio, opened.drift) == ("last-rows-drifting", 0.4, 0.5)
    assert open_strategy("last-rows", FACTS).ratio == 0.15


def test_it_may_choose_inside_the_pass() -> None:
    assert not open_strategy("in-flight", FACTS).can_be_sliced


def test_a_name_of_ours_is_not_taken_over() -> None:
    assert type(open_strategy("weave", FACTS).selector).__module__.startswith("kvweave.")


def test_requests_and_settings_may_name_it() -> None:
    assert Question("Why?", reuse="last-rows").reuse == "last-rows"
    assert parse_reuse("last-rows:0.3") == ("last-rows", 0.3)
    with pytest.raises(RequestError, match=r"unknown; known: .*last-rows"):
        Question("Why?", reuse="first-rows")
    assert known_names()[-1] == "no-selector"


@pytest.mark.parametrize(
    ("name", "said"), [("no-module", "ModuleNotFoundError"), ("no-selector", "no attribute")]
)
def test_one_that_does_not_work_is_a_line_that_names_the_package(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*their-selectors.*{said}.*uninstall") as told:
        open_strategy(name, FACTS)
    assert "\n" not in str(told.value)
