"""Who says how an answer is drawn: the request, the configuration, the model, what is built in."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.app.answer.answer_stream import REPETITION, Answer, AnswerStream
from kvweave.app.answer.settings import SamplingDefaults
from kvweave.app.weave import Sampling, Weave
from kvweave.config import ModelChoice, SamplingSettings, WeaveConfig
from kvweave.engine.sampling import Choice
from kvweave.errors import ModelCorrupt, RequestError
from kvweave.model.files.generation import FILE, read_generation
from kvweave.text.detokenizer import LEAST_TOKENS
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_models import make_chat_model_folder

OF_MODEL = {"temperature": 0.3, "top_p": 0.9, "repetition_penalty": 1.05}


def test_each_stands_in_front_of_the_next() -> None:
    defaults = SamplingDefaults({"top_p": 0.8, "max_tokens": 9}, OF_MODEL)
    drawn = defaults.sampling({"temperature": 0.7}, {"temperature": 1.0, "top_k": 5})
    wanted = Sampling(9, temperature=0.7, top_p=0.8, top_k=5, repetition_penalty=1.05)
    assert drawn == wanted
    assert defaults.sampling() == replace(wanted, temperature=0.3, top_k=0)
    assert SamplingDefaults().sampling({}, {"temperature": 1.0}) == Sampling(temperature=1.0)


def test_temperature_zero_is_greedy_without_a_penalty_unless_one_is_asked_for() -> None:
    of_model = {**OF_MODEL, "top_k": 20}
    assert SamplingDefaults({}, of_model).sampling({"temperature": 0}) == Sampling(temperature=0)
    assert SamplingDefaults({"temperature": 0.0}, of_model).sampling() == Sampling()
    asked = SamplingDefaults({}, of_model).sampling({"temperature": 0, "repetition_penalty": 1.2})
    assert asked == Sampling(temperature=0, repetition_penalty=1.2)
    configured = SamplingDefaults({"repetition_penalty": 1.3}, of_model)
    assert configured.sampling({"temperature": 0}).repetition_penalty == 1.3
    again = SamplingDefaults({"temperature": 0.0}, of_model).sampling({"temperature": 0.5})
    assert again.repetition_penalty == 1.05


def test_the_file_says_what_it_names_and_no_more(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == {}
    said = {"do_sample": True, "top_k": 20, "temperature": None, "eos_token_id": 3, "top_p": 0.8}
    (tmp_path / FILE).write_text(json.dumps(said))
    assert read_generation(tmp_path) == {"top_k": 20, "top_p": 0.8}
    (tmp_path / FILE).write_text('{"do_sample": false, "temperature": 0.6}')
    assert read_generation(tmp_path) == {"temperature": 0.0}
    for text in ("{", "[]", "\udcff"):
        (tmp_path / FILE).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ModelCorrupt, match=FILE):
            read_generation(tmp_path)


@pytest.mark.parametrize("value", ["hot", -1, True, float("nan")])
def test_what_cannot_be_is_one_line(value: object) -> None:
    with pytest.raises(ModelCorrupt, match=f"{FILE} of the model: temperature must be .*correct"):
        SamplingDefaults({}, {"temperature": value})
    with pytest.raises(RequestError, match="temperature must be"):
        SamplingDefaults().sampling({"temperature": value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose makers want it drawn: at such a temperature nearly any token may come."""
    folder = make_chat_model_folder(tmp_path_factory.mktemp("model"))
    path = folder / FILE
    told = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**told, "do_sample": True, "temperature": 50.0}))
    return folder


def opened(folder: Path, **sampling: object) -> Weave:
    drawn = SamplingSettings(max_tokens=24, **sampling)  # type: ignore[arg-type]
    return Weave.from_config(WeaveConfig(ModelChoice(str(folder), "cpu"), sampling=drawn))


def test_answers_are_drawn_as_the_model_wants_and_repeat_with_a_seed(folder: Path) -> None:
    with opened(folder, seed=3) as weave:
        assert weave.sampling() == Sampling(24, temperature=50.0, seed=3)
        drawn = [weave.ask("why?").text, weave.ask("why?").text]
        greedy = weave.ask("why?", sampling=weave.sampling({"temperature": 0})).text
        chatted = weave.chat([{"role": "user", "content": "why?"}]).finish().text
        told = weave.chat(
            [{"role": "user", "content": "why?"}], sampling=Sampling(24, temperature=50.0, seed=3)
        )
        assert drawn[0] == drawn[1] != greedy
        assert chatted == told.finish().text
        assert weave.ask("why?", sampling=Sampling(24)).text == greedy, "a whole one counts as is"
    with opened(folder, temperature=0.0) as weave:
        assert weave.ask("why?").text == greedy


class Repeating(Iterator[Choice]):
    """The tokens of an answer that says the same three again and again."""

    def __init__(self, num_tokens: int) -> None:
        self._left = iter([30, 31, 32] * (num_tokens // 3))
        self.is_closed = False

    def __next__(self) -> Choice:
        return Choice(next(self._left), None)

    def close(self) -> None:
        self.is_closed = True


def test_an_answer_that_only_repeats_is_ended_and_says_so(folder: Path) -> None:
    def answered(tokens: Repeating, **how: bool) -> Answer:
        sampling = Sampling(300, temperature=0.0, **how)  # type: ignore[arg-type]
        return AnswerStream(tokens, Tokenizer(folder), sampling, 5, time.perf_counter()).finish()

    stopped = answered(tokens := Repeating(300))
    assert (stopped.finish_reason, stopped.stopped_because) == ("stop", REPETITION)
    assert stopped.completion_tokens == LEAST_TOKENS
    assert tokens.is_closed, "no more of it is computed"
    let_go = answered(Repeating(300), stop_loops=False)
    assert (let_go.finish_reason, let_go.stopped_because) == ("length", None)
    assert let_go.completion_tokens == 300
    assert let_go.text.startswith(stopped.text)
