"""Knowledge bases that are open: few at a time, never closed under anybody's hands."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.libraries.libraries import Libraries, LibrariesConfig, TextSource
from kvweave.app.libraries.open_cache import AllInUse, InUse, OpenCache
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import Sampling
from kvweave.engine.config import EngineConfig
from kvweave.errors import ConfigError, EngineClosed
from kvweave.kv.tiers.host import HostTier
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.serving import serving, user
from worlds.tiny_corpus import WordEmbedder
from worlds.weaves import plain_weave

MIB = 1 << 20
GREEDY = Sampling(max_tokens=4)


class Book:
    """Something to lend, which knows when it is used too late."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self.is_pinned = False

    def is_at_rest(self) -> bool:
        return not self.is_pinned

    def close(self) -> None:
        assert not self.is_closed, "once"
        assert not self.is_pinned, "a lease was left"
        self.is_closed = True


def lending(most: int, wait_s: float = 0.05) -> OpenCache[str, Book]:
    return OpenCache(Book, most, wait_s)


def test_one_that_cannot_say_whether_it_is_at_rest_stays_and_is_lent() -> None:
    """It was left as being closed, and whoever wanted it waited for ever."""

    class Sick(Book):
        is_sick = True

        def is_at_rest(self) -> bool:
            if self.is_sick:
                raise EngineClosed("the engine was closed")
            return super().is_at_rest()

    books: OpenCache[str, Sick] = OpenCache(Sick, 2, 0.05)
    books.lend("a").give_back()
    with pytest.raises(EngineClosed):
        books.retire("a", lambda book: None, lambda: None)
    with ThreadPoolExecutor(1) as pool:
        loan = pool.submit(books.lend, "a").result(timeout=5)
    loan.give_back()
    loan.thing.is_sick = False
    books.retire("a", lambda book: None, lambda: None)
    assert loan.thing.is_closed


def test_the_one_unused_for_longest_makes_way() -> None:
    books = lending(2)
    first, second = books.lend("a"), books.lend("b")
    second.give_back()
    first.give_back()
    books.lend("c").give_back()
    assert (first.thing.is_closed, second.thing.is_closed) == (False, True)
    assert books.lend("a").thing is first.thing, "it never went"
    assert books.counts() == (2, 1, 3, 1, 0)


def test_one_that_is_retired_is_closed_between_the_two_calls_and_lent_to_nobody() -> None:
    books = lending(2)
    first = books.lend("a")
    first.give_back()
    seen: list[tuple[str, bool]] = []

    def last(book: Book) -> None:
        seen.append((book.name, book.is_closed))

    books.retire("a", last, lambda: seen.append(("then", first.thing.is_closed)))
    assert seen == [("a", False), ("then", True)]
    assert books.lend("a").thing is not first.thing, "a new one"
    books.retire("b", last, lambda: None)
    assert seen[-1] == ("b", False), "opened for it"
    assert books.counts().open == 1


def test_one_that_is_lent_or_pinned_is_not_retired_and_goes_on() -> None:
    books, called = lending(2), []
    loan = books.lend("a")
    with pytest.raises(InUse, match="in use"):
        books.retire("a", lambda _: called.append("last"), lambda: called.append("then"))
    loan.give_back()
    loan.thing.is_pinned = True
    with pytest.raises(InUse, match="still holds"):
        books.retire("a", lambda _: called.append("last"), lambda: called.append("then"))
    loan.thing.is_pinned = False
    assert called == []
    assert books.lend("a").thing is loan.thing, "as it was"


def test_those_who_want_one_that_is_being_retired_wait_for_the_end_of_it() -> None:
    books, may_end, order = lending(2, wait_s=30), threading.Event(), []

    def last(book: Book) -> None:
        order.append("retiring")
        assert may_end.wait(30)

    with ThreadPoolExecutor(2) as threads:
        retiring = threads.submit(books.retire, "a", last, lambda: order.append("gone"))
        while not order:
            time.sleep(0.001)
        lending_it = threads.submit(books.lend, "a")
        time.sleep(0.05)
        assert not lending_it.done()
        may_end.set()
        retiring.result(30)
        assert lending_it.result(30).thing.name == "a"
    assert order == ["retiring", "gone"]


def test_what_fails_while_one_is_retired_leaves_it_closed_and_lendable() -> None:
    books = lending(2)

    def last(_: Book) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        books.retire("a", last, lambda: pytest.fail("it did not get there"))
    assert books.lend("a").thing.name == "a"


def test_one_that_is_not_closed_in_order_makes_way_all_the_same_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Torn(Book):
        def close(self) -> None:
            super().close()
            raise OSError("the disk is gone")

    books: OpenCache[str, Book] = OpenCache(Torn, 1, 0.05)
    books.lend("a").give_back()
    books.lend("b").give_back()
    assert books.counts() == (1, 0, 2, 1, 1)
    books.close()
    assert books.counts().close_failures == 2
    assert caplog.text.count("not closed in order") == 2
    assert "the disk is gone" in caplog.text


def test_what_is_lent_never_closes_and_who_finds_all_in_use_is_refused() -> None:
    books = lending(2)
    loans = [books.lend("a"), books.lend("b"), books.lend("a")]
    with pytest.raises(AllInUse, match="all 2 knowledge bases that may be open are in use"):
        books.lend("c")
    loans[0].give_back()
    loans[0].give_back()  # twice is harmless: the other loan of it still counts
    with pytest.raises(AllInUse):
        books.lend("c")
    loans[2].give_back()
    assert not loans[1].thing.is_closed
    books.lend("c")
    assert loans[0].thing.is_closed


def test_one_with_a_lease_left_is_not_closed() -> None:
    books = lending(1)
    loan = books.lend("a")
    loan.thing.is_pinned = True
    loan.give_back()
    with pytest.raises(AllInUse):
        books.lend("b")
    loan.thing.is_pinned = False
    assert books.lend("b").thing.name == "b"


def test_one_with_a_lease_left_does_not_keep_another_from_making_way() -> None:
    books = lending(2)
    first, second = books.lend("a"), books.lend("b")
    first.thing.is_pinned = True
    first.give_back()
    second.give_back()
    assert books.lend("c").thing.name == "c"
    assert (first.thing.is_closed, second.thing.is_closed) == (False, True)


def test_one_that_was_about_to_make_way_is_closed_with_the_others() -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Book):
        def is_at_rest(self) -> bool:
            asked.set()
            assert go_on.wait(10)
            return False

    books: OpenCache[str, Slow] = OpenCache(Slow, 1, 30)
    loan = books.lend("a")
    loan.give_back()
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(books.lend, "b")
        assert asked.wait(10)
        books.close()
        go_on.set()
        with pytest.raises(EngineClosed):
            waiting.result(timeout=10)
    assert loan.thing.is_closed


def test_one_that_fails_to_close_leaves_no_other_open() -> None:
    class Stuck(Book):
        def close(self) -> None:
            super().close()
            if self.name == "a":
                raise OSError("the disk is gone")

    books: OpenCache[str, Stuck] = OpenCache(Stuck, 2, 0.05)
    loans = [books.lend(name) for name in "ab"]
    books.close()
    assert all(loan.thing.is_closed for loan in loans)


def test_who_waits_gets_room_when_somebody_leaves() -> None:
    books = lending(1, wait_s=30)
    loan = books.lend("a")
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(books.lend, "b")
        time.sleep(0.05)
        assert not waiting.done()
        loan.give_back()
        assert waiting.result(timeout=10).thing.name == "b"


def test_what_cannot_be_opened_takes_no_room() -> None:
    def fail(name: str) -> Book:
        raise ConfigError(f"no {name}")

    books: OpenCache[str, Book] = OpenCache(fail, 1, 0.05)
    for name in "ab":
        with pytest.raises(ConfigError, match=f"no {name}"):
            books.lend(name)
    assert books.counts() == (0, 0, 0, 0, 0)


def test_after_closing_nothing_is_lent() -> None:
    books = lending(2)
    loan = books.lend("a")
    books.close()
    assert loan.thing.is_closed
    loan.give_back()
    with pytest.raises(EngineClosed):
        books.lend("a")


def test_random_borrowers_never_meet_a_closed_one_and_never_too_many_are_open() -> None:
    most, now_open, lock = 3, 0, threading.Lock()

    class Counted(Book):
        def __init__(self, name: str) -> None:
            nonlocal now_open
            super().__init__(name)
            with lock:
                now_open += 1
                assert now_open <= most

        def close(self) -> None:
            nonlocal now_open
            super().close()
            with lock:
                now_open -= 1

    books: OpenCache[str, Counted] = OpenCache(Counted, most, 60)

    def borrow(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(200):
            name = draw.choice("abcdefg")
            loan = books.lend(name)
            assert loan.thing.name == name
            if draw.random() < 0.2:
                time.sleep(0)
            assert not loan.thing.is_closed
            loan.give_back()

    with ThreadPoolExecutor(8) as borrowers:
        list(borrowers.map(borrow, range(8)))
    counts = books.counts()
    assert counts.in_use == 0
    assert counts.opened - counts.closed == counts.open == now_open


# ── with real knowledge bases ────────────────────────────────────────────────


@pytest.fixture
def libraries(
    chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Libraries]:
    """Two may be open."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    decoder, engine = load_decoder(chat_model_folder, device="cpu"), EngineConfig(idle_s=0.05)
    weave = plain_weave(decoder, Tokenizer(chat_model_folder), engine)
    config = LibrariesConfig(
        root=tmp_path / "kbs",
        embedder="words",
        kv=KVOptions("isolated"),
        open_most=2,
        host_bytes=8 * MIB,
        wait_s=0.2,
    )
    made = Libraries(weave, config, open_embedder=lambda name: WordEmbedder())
    for name in "abc":
        text = TextSource(name, f"The node {name} has {name} pods of its own.")
        made.ingest("", name, [text], chunk_kv=True)
    yield made
    made.close()
    weave.close()


def test_a_knowledge_base_that_was_closed_answers_as_before(libraries: Libraries) -> None:
    told: dict[str, Any] = {}
    for name in "abcabc":
        for reuse in ("reuse", "auto"):
            with libraries.use("", name) as over:
                answer = over.ask("How many pods?", reuse=reuse, k=1, sampling=GREEDY)
            assert answer.explain is not None
            if reuse == "reuse":
                assert {chunk.tier for chunk in answer.explain.chunks} <= {"disk", "tree"}, (
                    "not computed"
                )
                assert told.setdefault(name, answer.text) == answer.text
        assert libraries.counts().open == 2
    assert libraries.counts().closed >= 5
    pins = [node.pins for node in libraries._weave.engine.tree.root.children.values()]
    assert sum(pins) == 1, "the preamble they share is pinned once, however often they open"


def test_all_host_tiers_together_stay_within_the_budget(libraries: Libraries) -> None:
    with libraries.use("", "a") as one, libraries.use("", "b") as other:
        capacities = [
            slot.tier.capacity_bytes
            for over in (one, other)
            for slot in over.library.store.inventory.slots
            if isinstance(slot.tier, HostTier)
        ]
    assert capacities == [4 * MIB, 4 * MIB]


def test_an_answer_in_the_making_keeps_its_knowledge_base_open(libraries: Libraries) -> None:
    with serving(libraries._weave, libraries=libraries) as url:

        def ask(name: str) -> httpx.Response:
            body = {"messages": user("How many pods?"), "kb": name, "max_tokens": 2}
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

        loans = [libraries.lend("", name) for name in "ab"]
        refused = ask("c")
        assert refused.status_code == 429
        assert "all 2 knowledge bases" in refused.json()["error"]["message"]
        assert refused.headers["Retry-After"]
        loans[0].give_back()
        assert ask("c").status_code == 200
        loans[1].give_back()
        for name in "abc" * 2:
            assert ask(name).status_code == 200
        page = httpx.get(f"{url}/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("kvweave_kb"))
    assert float(lines["kvweave_kb_open"]) == float(lines["kvweave_kb_open_most"]) == 2
    assert float(lines["kvweave_kb_in_use"]) == 0, "every answer gave it back"
    assert float(lines["kvweave_kb_closed_total"]) >= 5
    assert float(lines["kvweave_kb_close_failures_total"]) == 0
    assert float(lines["kvweave_kb_host_most_bytes"]) == 8 * MIB


def test_a_conversation_outlives_the_closing_of_its_knowledge_base(libraries: Libraries) -> None:
    history = [{"role": "user", "content": "How many pods?"}]
    with libraries.use("", "a") as over:
        first = over.ask("How many pods?", conversation_id="c", reuse="reuse", k=1, sampling=GREEDY)
    history.append({"role": "assistant", "content": first.text})
    for name in "bc":
        with libraries.use("", name):
            pass

    def first_part(name: str) -> tuple[int, ...]:
        """The ids of what stands right behind the preamble."""
        with libraries.use("", name) as over:
            answer = over.ask(
                "And now?", conversation_id="c", history=history, reuse="reuse", sampling=GREEDY
            )
        return ids_of(answer)

    def ids_of(answer: Any) -> tuple[int, ...]:
        part = answer.explain.chunks[0]
        return tuple(answer.explain.token_ids[part.start : part.start + part.num_tokens])

    assert first_part("b") != ids_of(first), "nothing is known of another's conversation"
    assert first_part("a") == ids_of(first), "the chunk stands where it stood"


def test_many_clients_of_many_knowledge_bases_all_get_their_answers(libraries: Libraries) -> None:
    libraries._open_cache._wait_s = 60  # there is room for two of the three

    def ask(n: int) -> str:
        name = "abc"[n % 3]
        with libraries.use("", name) as over:
            reuse = ("reuse", "auto", "full", "prefix")[n % 4]
            answer = over.ask(f"How many pods has {n}?", reuse=reuse, k=1, sampling=GREEDY)
        if reuse == "reuse":
            assert answer.explain is not None
            assert all(chunk.why is None for chunk in answer.explain.chunks)
        return answer.finish_reason

    with ThreadPoolExecutor(6) as clients:
        assert len(list(clients.map(ask, range(36)))) == 36
    assert libraries.num_pinned() == 0
    assert libraries.counts().in_use == 0
