"""What is calibrated fits into the model's context, or is refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.calibrate.asked_kb import AskedKB
from kvweave.calibrate.encodings import Nearest
from kvweave.calibrate.experiment import Experiment, check_room
from kvweave.calibrate.measure import Setting
from kvweave.calibrate.profiles import Profile
from kvweave.calibrate.questions import Passage, QuestionRecord, repeat_ids
from kvweave.calibrate.subject import Subject
from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import filler_ids, parse_variant
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import open_kb

KB_CHUNK = 48
TEXTS = ("Drain the node.", "The quick brown fox jumps over the lazy dog.")


def no_neighbours(size: int) -> Nearest:
    return lambda chunks: [() for _ in chunks]


class World:
    def __init__(self, folder: Path, kb_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokenizer = Tokenizer(folder)
        self._decoder = load_decoder(folder, device="cpu")
        self._patch = monkeypatch
        self._kb_folder = kb_folder
        profile = Profile("tiny", "weights", self.tokenizer.fingerprint)
        self._subject = Subject("tiny", self._decoder, self.tokenizer, profile)
        record = QuestionRecord("What?", (), tuple(Passage(text) for text in TEXTS))
        self._case = self._subject.case(record)
        self.longest = max(map(len, self._case.chunks))
        assert self.longest == len(self._case.chunks[1]) < KB_CHUNK
        self.preamble_len = len(self._case.preamble)
        self.repeat_len = len(repeat_ids(self.tokenizer))

    def check(self, max_context: int, encoding: str, *strategies: str, kb: bool = True) -> None:
        self._patch.setattr(
            self._decoder, "spec", replace(self._decoder.spec, max_context=max_context)
        )
        num_layers = self._decoder.spec.num_layers
        facts = ModelFacts(num_layers, (num_layers - 1,))
        settings = [Setting(open_strategy(name, facts), 0.1) for name in ("reuse", *strategies)]
        variants = [parse_variant("isolated"), parse_variant(encoding)]
        experiment = Experiment("questions", [self._case], variants, settings)
        if not kb:
            check_room(self._subject, experiment)
            return
        with open_kb(self._kb_folder, self.tokenizer, chunk_tokens=KB_CHUNK) as opened:
            asked = AskedKB(opened, self.tokenizer, no_neighbours)
            check_room(self._subject, replace(experiment, kb=asked))

    def fillers(self, num_passages: int) -> int:
        return len(filler_ids(self.tokenizer, num_passages))

    def needed(self, encoding: str) -> int:
        kind, _, size = encoding.partition(":")
        chunk, behind = self.longest, 0
        if kind == "filler":
            behind = self.fillers(int(size))
        if kind == "neighbours":
            chunk, behind = KB_CHUNK, self.fillers(4) + int(size) * KB_CHUNK
        return self.preamble_len + behind + chunk


@pytest.fixture
def world(chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(chat_model_folder, tmp_path / "kb", monkeypatch)


@pytest.mark.parametrize("strategies", [(), ("epic",), ("epic", "qcfuse")])
@pytest.mark.parametrize("encoding", ["isolated", "filler:3", "neighbours:1", "neighbours:3"])
def test_what_just_fits_is_let_through_and_one_position_less_is_refused(
    world: World, encoding: str, strategies: tuple[str, ...]
) -> None:
    needed = world.needed(encoding)
    for kb in (True, False)[: 1 if encoding.startswith("neighbours") else 2]:
        world.check(needed, encoding, *strategies, kb=kb)
        with pytest.raises(ConfigError, match=f"do not fit into the {needed - 1:,} positions"):
            world.check(needed - 1, encoding, *strategies, kb=kb)


@pytest.mark.parametrize("kind", ["filler", "neighbours"])
def test_the_size_it_names_fits(world: World, kind: str) -> None:
    room = world.needed(f"{kind}:2") + 5
    with pytest.raises(ConfigError, match=f"^{kind}:7 and .*; give {kind}:2 or less$"):
        world.check(room, f"{kind}:7")
    world.check(room, f"{kind}:2")


def test_where_no_size_fits_another_encoding_is_named(world: World) -> None:
    with pytest.raises(ConfigError, match=r"give --encodings isolated$"):
        world.check(world.needed("isolated"), "filler:1")
    with pytest.raises(ConfigError, match=r"give --encodings isolated$"):
        world.check(world.preamble_len + KB_CHUNK, "neighbours:1")
    with pytest.raises(ConfigError, match=r"give --encodings filler$"):
        world.check(world.needed("neighbours:1") - 1, "neighbours:1")
