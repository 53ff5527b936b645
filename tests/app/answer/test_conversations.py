"""A turn brings what its history does not hold, and everything retrieved is in the prompt."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave import Weave
from kvweave.app.answer.conversations import Conversations
from kvweave.app.weave import Answer, Sampling
from kvweave.errors import RequestError
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.prompt import PastMessage, lay_out, past_messages
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import open_weave

A, B, C = (1, 2, 3), (4, 5), (6, 7, 8, 9)


def user(text: str) -> PastMessage:
    return PastMessage("user", text)


def assistant(text: str) -> PastMessage:
    return PastMessage("assistant", text)


def test_a_later_turn_has_the_earlier_chunks_in_its_history_and_brings_only_new_ones() -> None:
    talks = Conversations()
    talks.talk("t", "one", []).remember("why?", [A, B])
    next_turn = talks.talk("t", "one", [user("why?"), assistant("so")])
    assert next_turn.messages[0].chunks == (A, B)
    assert next_turn.find_in_history([B, C]) == [B]


def test_a_message_that_was_cut_or_edited_takes_its_chunks_with_it() -> None:
    talks = Conversations()
    first = talks.talk("t", "one", [])
    first.remember("why?", [A])
    past = [user("why?"), assistant("so")]
    talks.talk("t", "one", past).remember("how?", [B])
    past += [user("how?"), assistant("thus")]
    assert talks.talk("t", "one", past).find_in_history([A, B]) == [A, B]
    cut = talks.talk("t", "one", past[2:])
    assert cut.find_in_history([A, B]) == [B]
    edited = talks.talk("t", "one", [user("when?"), *past[1:]])
    assert edited.find_in_history([A, B]) == [B]


def test_the_same_words_said_twice_are_two_turns() -> None:
    talks = Conversations()
    talks.talk("t", "one", []).remember("go on", [A])
    past = [user("go on"), assistant("1")]
    talks.talk("t", "one", past).remember("go on", [B])
    past += [user("go on"), assistant("2")]
    both = talks.talk("t", "one", past)
    assert [m.chunks for m in both.messages] == [(A,), (), (B,), ()]
    cut = talks.talk("t", "one", past[2:])
    assert [m.chunks for m in cut.messages] == [(B,), ()]


def test_chunks_of_the_oldest_turns_are_given_up_where_they_take_too_much() -> None:
    talks = Conversations()
    past: list[PastMessage] = []
    for turn, chunk in enumerate((A, B)):
        talks.talk("t", "one", past).remember(f"{turn}?", [chunk])
        past += [user(f"{turn}?"), assistant("so")]
    most = len(A) + len(B)
    assert talks.talk("t", "one", past, most_tokens=most).find_in_history([A, B]) == [A, B]
    cut = talks.talk("t", "one", past, most_tokens=most - 1)
    assert cut.messages[0].chunks == ()
    assert A not in cut.find_in_history([A, B]), "it is sent again where it is wanted"


def test_tenants_and_nameless_requests_share_nothing() -> None:
    talks = Conversations()
    talks.talk("t", "one", []).remember("why?", [A])
    past = [user("why?"), assistant("so")]
    assert talks.talk("u", "one", past).find_in_history([A]) == []
    assert talks.talk("", "tone", past).find_in_history([A]) == []
    nameless = talks.talk("t", None, past)
    nameless.remember("how?", [B])
    assert (nameless.find_in_history([A]), nameless.messages) == ([], tuple(past))
    assert len(talks) == 1


def test_conversations_are_bounded_by_number_and_by_tokens() -> None:
    talks = Conversations(max_conversations=2)
    for name in ("one", "two", "three"):
        talks.talk("t", name, []).remember("why?", [A])
    assert len(talks) == 2
    assert talks.talk("t", "one", [user("why?")]).find_in_history([A]) == []
    small = Conversations(max_tokens=5)
    small.talk("t", "one", []).remember("why?", [A])
    small.talk("t", "two", []).remember("why?", [C])
    assert small.talk("t", "one", [user("why?")]).find_in_history([A]) == []
    assert small.talk("t", "two", [user("why?")]).find_in_history([C]) == [C], "the last one stays"


TURNS = st.lists(
    st.tuples(st.sampled_from("xyz"), st.sets(st.sampled_from([A, B, C])), st.integers(0, 3)),
    max_size=8,
)


@given(TURNS)
def test_whatever_is_cut_every_retrieved_chunk_is_in_the_prompt(
    turns: list[tuple[str, set[tuple[int, ...]], int]],
) -> None:
    talks = Conversations()
    past: list[PastMessage] = []
    for text, retrieved, cut in turns:
        past = past[2 * cut :]
        talk = talks.talk("t", "one", past)
        held = talk.find_in_history(sorted(retrieved))
        new = [ids for ids in sorted(retrieved) if ids not in held]
        in_history = {ids for message in talk.messages for ids in message.chunks}
        assert set(held) <= in_history
        assert retrieved <= in_history | set(new)
        talk.remember(text, new)
        past += [user(text), assistant("…")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("talk"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_decoder(folder, device="cpu")


@pytest.fixture
def weave(
    tmp_path: Path, folder: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Weave]:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvweave.app.auto.machine_profile.PREFILL_BUDGET_S", 0.2)
    monkeypatch.setattr("kvweave.app.auto.machine_profile.RECOMPUTE_BUDGET_S", 0.2)
    with open_weave(tmp_path / "kb", (decoder, Tokenizer(folder))) as weave:
        yield weave


def test_a_history_has_the_ids_that_its_turns_had_and_the_preamble_stays(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    chunks = [tuple(tokenizer.encode_text("Tom has a boat.\n\n"))]
    first = lay_out(tokenizer, "Who has a boat?", chunks)
    past = [PastMessage("user", "Who has a boat?", tuple(chunks)), assistant("Tom.")]
    new = [tuple(tokenizer.encode_text("It is blue.\n\n"))]
    second = lay_out(tokenizer, "Which colour?", new, history=past)
    assert second.preamble == first.preamble
    assert second.history[0] == chunks[0], "a chunk is a part of its own there too"
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert second.chunks == tuple(new)
    said = [{"role": m.role, "content": m.content} for m in past]
    plain = lay_out(tokenizer, "Which colour?", [], history=past_messages(said))
    system = tokenizer.decode(first.preamble)
    assert system in tokenizer.decode(plain.token_ids)
    assert "Tom." in tokenizer.decode(plain.history[-1])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "assistant", "content": "hi"}], "begins with a user's message"),
        ([{"role": "system", "content": "x"}], "user, assistant and tool messages"),
        ([{"role": "user", "content": None}], "whose content is text"),
    ],
)
def test_a_history_that_is_none_is_refused(
    weave: Weave, messages: list[dict[str, object]], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        weave.ask("why?", documents=["x"], history=messages)


DOCUMENTS = ["Tom has a blue boat.", "Anna lives in a red house.", "Drain a node before you go."]
GREEDY = Sampling(max_tokens=8)


def turn(weave: Weave, question: str, documents: list[str], **more: object) -> Answer:
    return weave.ask(question, documents=documents, sampling=GREEDY, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("reuse", ["full", "reuse", "auto"])
def test_chunks_of_the_history_are_not_sent_again(weave: Weave, reuse: str) -> None:
    talk = {"conversation_id": "c", "reuse": reuse}
    first = turn(weave, "Who has a boat?", DOCUMENTS[:2], **talk)
    past = [
        {"role": "user", "content": "Who has a boat?"},
        {"role": "assistant", "content": first.text},
    ]
    again = turn(weave, "And a house?", DOCUMENTS[:2], history=past, **talk)
    other = turn(weave, "And a house?", DOCUMENTS[:2], history=past, reuse=reuse)
    bare = turn(weave, "And a house?", [], history=past, reuse=reuse)
    assert again.prompt_tokens < other.prompt_tokens + 5, "the chunks stand once, not twice"
    assert again.prompt_tokens > bare.prompt_tokens + 10, "and they do stand there"
    more = turn(weave, "And a node?", DOCUMENTS, history=past, conversation_id="c", reuse=reuse)
    assert more.prompt_tokens > again.prompt_tokens
    cut = turn(weave, "And now?", DOCUMENTS[:2], history=[], **talk)
    assert cut.prompt_tokens > 40, "nothing of it is left: sent again"


def test_behind_a_history_answers_are_exact_and_say_so(weave: Weave) -> None:
    """The decoder run over the whole prompt at once is the judge."""
    weave.ingest(*[(f"d{i}", text) for i, text in enumerate(DOCUMENTS)], chunk_kv=True)
    past = [
        {"role": "user", "content": "Who has a boat?"},
        {"role": "assistant", "content": "Tom has one, and it is blue."},
    ]
    same = {"k": 2, "history": past, "sampling": GREEDY}
    first = weave.ask("And a house?", reuse="prefix", **same)
    assert first.explain is not None
    assert {chunk.state for chunk in first.explain.chunks} == {"computed"}, (
        "none is first behind it"
    )
    exact = weave.ask("And a house?", **same)
    assert first.text == exact.text
    for reuse in ("prefix", "auto"):
        answer = weave.ask("And a house?", reuse=reuse, **same)
        assert answer.text == exact.text
        assert answer.prompt_tokens == exact.prompt_tokens
        assert answer.explain is not None
        assert answer.explain.chunks[0].tier == "tree", "what was said stays exact, too"
    woven = weave.ask("And a house?", k=2, history=past, sampling=GREEDY, reuse="weave", ratio=1.0)
    assert woven.text == exact.text, "all rows recomputed behind the history"
    plan = weave.plan("And a house?", k=2, history=past)
    assert [span.in_history for span in plan.spans] == [False, True, False, False, False]
    assert plan.num_tokens == exact.prompt_tokens


def test_the_model_sees_the_same_prompt_as_a_chat_of_the_same_messages(weave: Weave) -> None:
    past = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    asked = weave.ask("how are you?", documents=[], history=past, sampling=GREEDY)
    system = {"role": "system", "content": weave.system}
    messages = [system, *past, {"role": "user", "content": "how are you?"}]
    chat = weave.chat(messages, sampling=GREEDY).finish()
    assert (asked.text, asked.prompt_tokens) == (chat.text, chat.prompt_tokens)
