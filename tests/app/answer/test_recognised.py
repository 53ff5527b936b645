"""A conversation without a name goes on by what its user said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave import Weave
from kvweave.app.answer.conversations import Conversations, SaidBefore, Talk, conversation_name
from kvweave.app.answer.question import Question
from kvweave.app.weave import Sampling
from kvweave.model.load import load_decoder
from kvweave.text.prompt import PastMessage
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import open_weave

A, B, C, D = (1, 2, 3), (4, 5, 6), (6, 7, 8), (7, 8, 9)
GREEDY = Sampling(max_tokens=4, temperature=0.0)
WHOLE = Question("?", recognise=True)


def user(text: str) -> PastMessage:
    return PastMessage("user", text)


def assistant(text: str) -> PastMessage:
    return PastMessage("assistant", text)


def said(*questions: str) -> list[PastMessage]:
    return [message for text in questions for message in (user(text), assistant("so"))]


def talk_of(
    talks: Conversations, past: list[PastMessage], question: Question = WHOLE, **more: Any
) -> Talk:
    name = conversation_name(question, past, is_searched=True)
    assert isinstance(name, SaidBefore)
    return talks.talk(more.pop("tenant", "t"), name, past, **more)


def chunks_of(talk: Talk) -> list[tuple[tuple[int, ...], ...]]:
    return [message.chunks for message in talk.messages if message.role == "user"]


def test_a_prompt_goes_on_where_half_of_what_is_found_stood_in_it() -> None:
    talks = Conversations()
    talk_of(talks, []).remember("why?", [A, B])
    past = [user("why?"), assistant("trimmed by the client")]
    second = talk_of(talks, past)
    assert chunks_of(second) == [(A, B)]
    assert second.find_in_history([B, C]) == [B]
    assert second.choose_history([B, C]) is second
    plain = second.choose_history([B, C, D])
    assert plain is second.plain
    assert (chunks_of(plain), plain.find_in_history([A, B])) == ([()], [])
    second.remember("how?", [C])
    assert chunks_of(talk_of(talks, said("why?", "how?"))) == [(A, B), (C,)]


def test_what_follows_a_plain_turn_goes_on_from_that_turns_prompt() -> None:
    """Not from one that never was: its chunks would stand there twice."""
    talks = Conversations()
    talk_of(talks, []).remember("why?", [A, B])
    talk_of(talks, said("why?")).choose_history([A, C, D]).remember("how?", [A, C, D])
    third = talk_of(talks, said("why?", "how?"))
    assert chunks_of(third) == [(), (A, C, D)]
    assert third.find_in_history([B, C]) == [C]


def test_the_same_request_finds_the_same_turns_again() -> None:
    talks = Conversations()
    talk_of(talks, []).remember("why?", [A, B])
    for question in ("how?", "how?", "when?"):  # asked anew, and another in its place
        again = talk_of(talks, said("why?"))
        assert chunks_of(again) == [(A, B)]
        again.choose_history([A]).remember(question, [])


def test_people_who_said_or_search_other_things_are_not_taken_for_each_other() -> None:
    talks = Conversations()
    talk_of(talks, []).remember("why?", [A])
    past = said("why?")
    assert chunks_of(talk_of(talks, past)) == [(A,)]
    assert chunks_of(talk_of(talks, past, tenant="u")) == [()]
    assert chunks_of(talk_of(talks.part("other"), past)) == [()]
    for question in (
        Question("?", recognise=True, k=2),
        Question("?", recognise=True, rewrite=True),
        Question("?", recognise=True, retrieval="words"),
    ):
        assert chunks_of(talk_of(talks, past, question)) == [()]
    assert chunks_of(talk_of(talks, said("who?", "why?"))) == [(), ()]
    assert talks.talk("t", "why?", past).find_in_history([A]) == [], "no name says it either"
    one, two = (
        conversation_name(WHOLE, said(*texts), is_searched=True)
        for texts in (("a", "bc"), ("ab", "c"))
    )
    assert one != two


@pytest.mark.parametrize(
    "question",
    [
        Question("?", recognise=False),
        Question("?", recognise=True, filter={"of": "staff"}),
        Question("?", recognise=True, documents=["mine"]),
    ],
)
def test_who_forbids_it_filters_or_brings_documents_is_not_recognised(question: Question) -> None:
    assert conversation_name(question, said("why?"), is_searched=True) is None
    assert conversation_name(WHOLE, said("why?"), is_searched=False) is None


def test_a_name_goes_before() -> None:
    named = Question("?", recognise=True, conversation_id="c")
    assert conversation_name(named, [], is_searched=True) == "c"


def test_turns_are_bounded_and_push_no_conversation_with_a_name_out() -> None:
    talks = Conversations(max_conversations=2)
    talks.talk("t", "one", []).remember("why?", [A])
    for question in "abcd":
        talk_of(talks, []).remember(question, [B])
    assert talks.talk("t", "one", [user("why?")]).find_in_history([A]) == [A]
    assert len(talks.recognised) == 2
    assert chunks_of(talk_of(talks, said("a"))) == [()]
    assert chunks_of(talk_of(talks, said("d"))) == [(B,)]
    small = Conversations(max_tokens=4)
    for question in "ab":
        talk_of(small, []).remember(question, [A])
    assert len(small.recognised) == 1


def test_long_histories_and_deleted_chunks_stand_nowhere() -> None:
    talks = Conversations()
    talk_of(talks, []).remember("why?", [A, B])
    assert chunks_of(talk_of(talks, said("why?"), most_tokens=6)) == [(A, B)]
    assert chunks_of(talk_of(talks, said("why?"), most_tokens=5)) == [()]
    assert chunks_of(talk_of(talks, said("why?"), is_gone=lambda chunk, as_of: True)) == [()]


DOCUMENTS = [
    ("boat", "Tom has a boat. It is blue and lies in the harbour."),
    ("house", "Anna has a house by the sea, and a boat, too."),
    ("node", "A node is a machine of a cluster."),
]


@pytest.fixture
def weave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weave]:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvweave.app.auto.machine_profile.PREFILL_BUDGET_S", 0.2)
    monkeypatch.setattr("kvweave.app.auto.machine_profile.RECOMPUTE_BUDGET_S", 0.2)
    folder = make_chat_model_folder(tmp_path / "model", max_position_embeddings=4096)
    with open_weave(tmp_path / "kb", (load_decoder(folder), Tokenizer(folder))) as opened:
        opened.ingest(*DOCUMENTS, chunk_kv=True)
        yield opened


def test_a_later_turn_over_a_knowledge_base_needs_no_name(weave: Weave) -> None:
    first = weave.ask("Who has a boat?", k=3, sampling=GREEDY, reuse="prefix")
    past = [
        {"role": "user", "content": "Who has a boat?"},
        {"role": "assistant", "content": first.text},
    ]
    asked: dict[str, Any] = {"k": 3, "history": past, "sampling": GREEDY}
    plan = weave.plan("And a house?", k=3, history=past)
    second = weave.ask("And a house?", reuse="prefix", **asked)
    plain = weave.ask("And a house?", reuse="prefix", recognise=False, **asked)
    assert second.explain is not None
    assert plain.explain is not None
    assert (plain.explain.left_out, second.explain.left_out) == (0, 3)
    assert len(plan.in_history) == 3
    assert plan.num_tokens == second.prompt_tokens
    assert second.cached_tokens > plain.cached_tokens
    for reuse in ("full", "prefix", "auto"):
        again = weave.ask("And a house?", reuse=reuse, **asked)
        assert (again.prompt_tokens, again.text) == (second.prompt_tokens, second.text)


def test_where_nothing_is_found_a_recognised_turn_says_so(weave: Weave) -> None:
    first = weave.ask("Who has a boat?", k=3, sampling=GREEDY)
    past = [
        {"role": "user", "content": "Who has a boat?"},
        {"role": "assistant", "content": first.text},
    ]
    answer = weave.ask("And?", k=3, history=past, sampling=GREEDY, min_score=2.0)
    assert answer.nothing_found
