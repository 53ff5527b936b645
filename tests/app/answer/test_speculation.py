"""Speculative prefill: the real engine, index and knowledge base. It changes when, never what."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvweave import Weave
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.auto.machine_profile import profile_path
from kvweave.app.auto.requests import exact_request
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.weave import Answer
from kvweave.config import SpeculationSettings
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import Ticket
from kvweave.engine.sampling import Sampling
from kvweave.errors import ConfigError, CorpusError
from kvweave.kv.tiers.config import HostTierConfig
from kvweave.kv.tree.node import Node
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from kvweave.text.prompt import plain_prompt
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Hit
from worlds.tiny_corpus import make_text, open_kb
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import library_of

# The flat index compares in order of arrival: what came first is known first.
TEXTS = [
    ("Anna", "The albatross of Anna flies to the harbour."),
    ("Tom", "Tom paints the albatross in the harbour."),
    *((f"Note {i}", make_text(30, seed=i)) for i in range(20)),
    ("Vera", "A walrus rests on the pier, says Vera."),
    ("Nils", "Nils feeds the walrus near the pier."),
]
EARLY = "Who saw the albatross in the harbour?"  # its list stands after the first stage
LATE = "Who saw the walrus on the pier?"  # its list comes with the last stage
GREEDY = Sampling(max_tokens=6)
SEEDED = Sampling(max_tokens=6, temperature=1.0, top_p=0.9, seed=11)
SMALL = EngineConfig(page_tokens=8, pool_tokens=8 * 400, step_rows=16, alone_rows=64, guess_rows=16)
Between = Callable[[], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    root = tmp_path_factory.mktemp("speculation")
    folder = make_chat_model_folder(root, max_position_embeddings=2048)
    return load_decoder(folder, device="cpu"), Tokenizer(folder)


@dataclass
class World:
    """A Weave whose tickets are kept and whose searches stop between two stages."""

    weave: Weave
    tickets: list[Ticket] = field(default_factory=list)
    between: Between | None = None  # called behind every stage
    slow_s: float = 0.0  # so much longer a search takes, whatever it is cut into

    @property
    def engine(self) -> Engine:
        return self.weave.engine

    def ask(self, question: str, reuse: str = "prefix", sampling: Sampling = GREEDY) -> Answer:
        return self.weave.ask(question, k=2, reuse=reuse, sampling=sampling)

    def wait_for_prefill(self) -> None:
        """Until every prompt is computed."""
        deadline_s = time.perf_counter() + 10
        while self.engine.pending_prefills():
            assert time.perf_counter() < deadline_s, "prompts are stuck"
            time.sleep(1e-3)

    def _leased(self) -> list[Node]:
        """Of the tree, without the preamble, which reuse="auto" pins for good."""
        return [node for node in self.engine.tree if node.pins and node.depth > 1]

    def assert_at_rest(self) -> None:
        """Nothing runs, nothing is leased, and every page is the tree's or free."""
        for ticket in self.tickets:
            assert ticket.wait(5.0)
        self.engine.run_alone(self.engine.check_integrity)
        stats = self.engine.stats()
        assert [stats[name] for name in ("running", "waiting", "parked")] == [0, 0, 0]
        assert self.weave.library.store.num_pinned() == 0
        assert self.engine.run_alone(self._leased) == []


def set_machine(decoder: Decoder) -> None:
    """Write a machine profile, so that reuse="auto" need not measure one."""
    grid = Grid((0,), (1, 1000), [[1e-3, 1.0]])
    links = {"host": TierLink(1e9)}
    layers = decoder.spec.num_layers
    profile = MachineProfile(decoder.revision, "test", layers, grid, grid, links)
    profile.save(profile_path(decoder))


@pytest.fixture
def open_world(
    tmp_path: Path, model: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    set_machine(model[0])

    def make(mode: str = "on", max_prefill_bs: int = 1) -> World:
        decoder, tokenizer = model
        kb = open_kb(tmp_path / f"kb{len(worlds)}", tokenizer, chunk_tokens=64, index="flat")
        runtime = ModelRuntime(decoder, tokenizer, "tiny", SMALL)
        options = KVOptions("isolated", tiers=(HostTierConfig(1 << 24),))
        library = library_of(kb, runtime, options)
        speculation = SpeculationSettings(mode, max_prefill_bs)  # type: ignore[arg-type]
        world = World(Weave(runtime, library, AnswerSettings(speculation=speculation)))
        world.weave.ingest(*TEXTS, chunk_kv=True)
        submit, staged = world.engine.submit, kb.search_staged

        def remembered(*arguments: object, **options: object) -> Ticket:
            world.tickets.append(submit(*arguments, **options))  # type: ignore[arg-type]
            return world.tickets[-1]

        def stopping(query: object, k: int, stages: int, *how: object) -> Iterator[list[Hit]]:
            for hits in staged(query, k, stages, *how):  # type: ignore[arg-type]
                time.sleep(world.slow_s / stages)
                yield hits
                if world.between is not None:
                    world.between()

        monkeypatch.setattr(world.engine, "submit", remembered)
        monkeypatch.setattr(kb, "search_staged", stopping)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.weave.close()


OpenWorld = Callable[..., World]


@pytest.mark.parametrize("reuse", ["full", "prefix", "reuse", "auto"])
def test_answers_are_the_same_with_and_without(open_world: OpenWorld, reuse: str) -> None:
    plain, guessing = open_world("off"), open_world("on")
    for question in (EARLY, LATE, "What does the note say of a node?"):
        for sampling in (GREEDY, SEEDED):
            want = plain.ask(question, reuse, sampling)
            got = guessing.ask(question, reuse, sampling)
            assert (got.text, got.prompt_tokens) == (want.text, want.prompt_tokens)
            assert want.speculation is None
            assert got.speculation is not None
            assert got.speculation.guesses > 0
    guessing.assert_at_rest()


def test_a_guess_that_stands_is_computed_while_the_search_goes_on(open_world: OpenWorld) -> None:
    world = open_world()
    world.between = world.wait_for_prefill
    answer = world.ask(EARLY)
    said = answer.speculation
    assert said is not None
    assert (said.stages, said.guesses, said.right_stage) == (8, 1, 1)
    assert answer.explain is not None
    assert said.saved_tokens == answer.explain.counts["computed"] > 0
    assert said.wasted_tokens == 0
    assert 0.0 < said.hidden_ms < said.search_ms
    stats = world.engine.stats()
    assert stats["speculation_saved_tokens"] == said.saved_tokens
    assert "stage 1" in said.summary()


def test_nothing_is_handed_out_before_the_search_is_over(open_world: OpenWorld) -> None:
    world = open_world()
    seen: list[bool] = []

    def look() -> None:
        world.wait_for_prefill()
        time.sleep(0.01)  # more than a step: a token would be there by now
        seen.append(world.engine.stats().get("tokens_answered", 0) == 0)
        assert all(ticket.timeline.first_token_s is None for ticket in world.tickets)

    world.between = look
    world.ask(EARLY)
    assert seen == [True] * 8


def test_a_wrong_guess_ends_and_gives_everything_back(open_world: OpenWorld) -> None:
    world = open_world()
    world.between = world.wait_for_prefill
    said = world.ask(LATE).speculation
    assert said is not None
    assert said.right_stage is None
    assert said.guesses == len(world.tickets) - 1
    assert said.wasted_tokens > 0
    assert [ticket.is_cancelled for ticket in world.tickets] == [True] * said.guesses + [False]
    assert world.engine.stats()["speculation_wasted_tokens"] == said.wasted_tokens
    world.assert_at_rest()


def test_a_wrong_fused_guess_gives_its_chunk_kv_back(open_world: OpenWorld) -> None:
    world = open_world()
    world.ask(LATE, "reuse")
    world.assert_at_rest()


def test_a_changed_list_keeps_the_prefix_that_both_have(
    open_world: OpenWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = open_world()
    first, second, third = world.weave.search(EARLY, 3)

    def stages(*_: object, **__: object) -> Iterator[list[Hit]]:
        for hits in ([first, second], [first, third], [first, third]):
            yield hits
            world.wait_for_prefill()

    monkeypatch.setattr(world.weave.library.kb, "search_staged", stages)
    answer = world.ask(EARLY)
    record, said = answer.explain, answer.speculation
    assert record is not None
    assert said is not None
    assert [str(chunk.state) for chunk in record.chunks] == ["exact", "computed"]
    question = len(record.token_ids) - sum(c.num_tokens for c in record.chunks)
    lost = said.wasted_tokens  # whole chunks stay in the tree: the question is all that is lost
    assert 0 < lost < question
    assert said.right_stage == 2


def test_a_guess_waits_for_a_full_queue_and_begins_with_the_same_list(
    open_world: OpenWorld,
) -> None:
    world = open_world(max_prefill_bs=1)
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(10)

    stopped = threading.Thread(target=lambda: world.engine.run_alone(hold))
    stopped.start()
    assert held.wait(10)
    other = world.engine.submit(exact_request(plain_prompt(range(40)), GREEDY, (), use_tree=False))
    seen: list[int] = []

    def between() -> None:
        seen.append(len(world.tickets))
        go.set()
        stopped.join()
        world.wait_for_prefill()

    world.between = between
    said = world.ask(EARLY).speculation
    assert seen[:2] == [1, 2]  # none at the first stage, one at the second
    assert said is not None
    assert (said.guesses, said.right_stage) == (1, 2)
    assert len(list(other)) == GREEDY.max_tokens
    world.assert_at_rest()


@pytest.mark.parametrize("error", [CorpusError("the index is gone"), KeyboardInterrupt()])
def test_a_search_that_breaks_off_leaves_nothing_behind(
    open_world: OpenWorld, error: BaseException
) -> None:
    world = open_world()

    def between() -> None:
        raise error

    world.between = between
    with pytest.raises(type(error)):
        world.ask(EARLY)
    assert len(world.tickets) == 1
    world.assert_at_rest()
    world.between = None
    assert world.ask(EARLY).speculation is not None


@pytest.mark.parametrize("ends", ["close", "forget"])
def test_a_client_that_leaves_before_the_first_token_ends_the_work(
    open_world: OpenWorld, ends: str
) -> None:
    world = open_world()
    answering = world.weave.stream(EARLY, k=2, reuse="prefix", sampling=Sampling(max_tokens=500))
    if ends == "close":
        answering.close()
    else:
        del answering
        gc.collect()
    assert world.tickets[-1].is_cancelled
    world.assert_at_rest()
    assert world.engine.stats()["requests_aborted"] == 1


def test_auto_learns_that_a_long_search_pays(open_world: OpenWorld) -> None:
    world = open_world("auto")
    world.slow_s = 0.4
    assert world.ask(EARLY).speculation is None  # nobody knows how long anything takes
    for _ in range(3):
        world.ask(EARLY)
    said = world.ask(EARLY).speculation
    assert said is not None
    assert said.right_stage is not None
    assert said.right_stage > 3, "a short prefill waits until little of the search is left"


def test_many_at_once_get_the_answers_they_get_alone(open_world: OpenWorld) -> None:
    plain, guessing = open_world("off"), open_world("on", 3)
    questions = [f"{question} {i}" for i in range(6) for question in (EARLY, LATE)]
    want = [plain.ask(question).text for question in questions]
    with ThreadPoolExecutor(4) as threads:
        got: Sequence[Answer] = list(threads.map(guessing.ask, questions))
    assert [answer.text for answer in got] == want
    guessing.assert_at_rest()


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="one of auto, on, off; got 'maybe'"):
        SpeculationSettings("maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_prefill_bs"):
        SpeculationSettings(max_prefill_bs=0)
