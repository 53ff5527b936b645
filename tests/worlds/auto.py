"""A tiny knowledge base with stored chunk KV, a made-up calibration and a made-up machine."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvweave import Weave
from kvweave.app.answer.question import QuestionDefaults
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.auto.auto_planner import AutoPlanner
from kvweave.app.auto.machine_profile import profile_path
from kvweave.app.library.kv_behind import PreambleKey
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.weave import Answer, Sampling
from kvweave.calibrate.gate import OWN, Cell, Table
from kvweave.calibrate.profiles import Profile, save_profile, user_path
from kvweave.config import QualitySettings
from kvweave.fuse.encode.contexts import Variant, digest_ids, filler_ids, variant_name
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, TierConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import make_text, open_kb
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import ingest_with_fronts, library_of

TEXTS = [(f"Note {i}", make_text(40, seed=i)) for i in range(5)]
QUESTION = "How do I drain a node and evict its pods?"
GREEDY = Sampling(max_tokens=6)
TOKEN_S = 0.01  # what the slow machine takes for a token: fusing is worth a lot


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    folder = make_chat_model_folder(
        tmp_path_factory.mktemp("planning"), max_position_embeddings=4096
    )
    return load_decoder(folder, device="cpu"), Tokenizer(folder)


@dataclass
class World:
    """A knowledge base with stored chunk KV, opened as often as wanted."""

    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer
    tier: TierConfig | None = None

    def open(self, settings: AnswerSettings | None = None) -> Weave:
        """Unless `settings` say so, nothing is audited: tests count what is computed."""
        settings = settings or AnswerSettings(
            usual=QuestionDefaults(QualitySettings(audit_share=0.0))
        )
        kb = open_kb(self.folder, self.tokenizer, chunk_tokens=256)
        tiers: tuple[TierConfig, ...] = (
            HostTierConfig(1 << 26),
            DiskTierConfig(self.folder / "kv"),
        )
        tiers = (self.tier,) if self.tier else tiers
        runtime = ModelRuntime(self.decoder, self.tokenizer, "tiny")
        library = library_of(kb, runtime, KVOptions("filler:1", tiers=tiers))
        return Weave(runtime, library, settings)

    def calibrate(
        self,
        *cells: tuple[str, float, float],
        num_questions: int = 100,
        filler: tuple[int, ...] | None = None,
        preamble: tuple[int, ...] | None = None,
        num_fillers: int = 1,
        kind: str = OWN,
    ) -> None:
        """Write a table of (strategy, ratio, KL), behind the world's own filler and preamble."""
        variant = Variant("filler", num_fillers)
        filler = filler_ids(self.tokenizer, num_fillers) if filler is None else filler
        preamble = split_template(self.tokenizer, SYSTEM)[0] if preamble is None else preamble
        table = Table(
            encoding=str(variant),
            context=variant_name(variant, filler),
            preamble=digest_ids(preamble),
            num_chunk_tokens=90000,
            revision=self.decoder.revision,
            dtype="float32",
            data="made up",
            data_hash="0",
            date="2026-01-01",
            num_questions=num_questions,
            num_with_answers=0,
            mean_prompt_tokens=1000.0,
            noise=0.0,
            full_f1=None,
            full_em=None,
            cells=tuple(make_cell(*cell) for cell in cells),
            kind=kind,
        )
        weights = self.decoder.weights.fingerprint
        profile = Profile("tiny", weights, self.tokenizer.fingerprint, calibration=(table,))
        save_profile(user_path(weights), profile)

    def set_machine(self, token_s: float = TOKEN_S) -> Path:
        """Write a machine profile on which a token takes this long, whatever stands in front."""
        grid = Grid((0,), (1, 1000), [[token_s, 1000 * token_s]])
        again = Grid((0,), (1, 1000), [[token_s, 1000 * token_s]])
        links = {"host": TierLink(1e9), "disk": TierLink(1e9, seen_s=time.time())}
        decoder = self.decoder
        profile = MachineProfile(
            decoder.revision, "test", decoder.spec.num_layers, grid, again, links
        )
        profile.save(profile_path(decoder))
        return profile_path(decoder)


def make_cell(strategy: str, ratio: float, kl: float) -> Cell:
    return Cell(
        strategy, ratio, work=ratio, kl=kl, kl_low=kl, kl_high=kl, kl_p95=kl, kl_max=kl,
        flips=0.0, top1=1.0, nll_gap=0.0,
    )  # fmt: skip


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: tuple[Decoder, Tokenizer]
) -> World:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    return World(tmp_path / "kb", *model)


@pytest.fixture
def weave(world: World) -> Iterator[Weave]:
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        yield weave


def ask(weave: Weave, reuse: str = "auto", **settings: object) -> Answer:
    return weave.ask(QUESTION, reuse=reuse, sampling=GREEDY, **settings)  # type: ignore[arg-type]


def planning_of(weave: Weave) -> AutoPlanner:
    """What `auto` is planned with. It opens with the first plan."""
    library = weave.library
    kv = library.behind(PreambleKey("", library.encoder.preamble_ids))
    return weave._target.router.planner(kv)


def load_links(weave: Weave) -> dict[str, TierLink]:
    return planning_of(weave).machine.links


def probed(weave: Weave, link: str) -> dict[str, TierLink]:
    """Open the planning and wait until `link` was looked at: what is written there then stays."""
    give_up_s = time.monotonic() + 60
    weave.plan(QUESTION)
    while link not in load_links(weave):
        assert time.monotonic() < give_up_s, f"{link} was never looked at"
        time.sleep(0.05)
        weave.plan(QUESTION)
    return load_links(weave)
