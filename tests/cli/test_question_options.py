"""An option of a question is written in two places: its field and the wire model."""

from dataclasses import dataclass
from typing import Annotated, Literal

import click
import pytest

from kvweave.app.answer import question as questions
from kvweave.app.answer.question import Question, option, question_options
from kvweave.cli.options import question_options as question_flags
from kvweave.config_keys import Range
from kvweave.serve.wire.chat import ChatRequest
from kvweave.serve.wire.web_page import page_options


@dataclass(frozen=True, slots=True)
class MoodyQuestion(Question):
    mood: Literal["glad", "sad"] | None = option(
        None, "How the answer sounds", "--mood", unset="as it comes", label="mood"
    )
    haste: Annotated[int, Range(1, 9)] = option(3, "How short it is", "--haste", label="haste")


class MoodyRequest(ChatRequest):
    mood: Literal["glad", "sad"] | None = None


def flags_of(question: type) -> dict[str, click.Option]:
    command = question_flags(question=question)(click.Command("ask", callback=lambda **_: None))
    assert isinstance(command, click.Command)
    return {each.opts[0]: each for each in command.params if isinstance(each, click.Option)}


def test_a_new_option_has_a_flag_with_its_values_help_and_default() -> None:
    flags = flags_of(MoodyQuestion)
    assert set(flags) - set(flags_of(Question)) == {"--mood", "--haste"}
    mood, haste = flags["--mood"], flags["--haste"]
    assert isinstance(mood.type, click.Choice)
    assert list(mood.type.choices) == ["glad", "sad"]
    assert mood.help == "How the answer sounds (as it comes)."
    assert isinstance(haste.type, click.IntRange)
    assert (haste.type.min, haste.type.max, haste.help) == (1, 9, "How short it is (3).")


def test_a_new_option_is_described_in_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    found = question_options(MoodyQuestion)
    monkeypatch.setattr("kvweave.serve.wire.chat.question_options", lambda: found)
    schema = MoodyRequest.model_json_schema()
    assert schema["properties"]["mood"]["description"] == "How the answer sounds."
    assert "haste" not in schema["properties"], "requests cannot have it"


def test_a_new_option_with_a_label_has_a_control_on_the_page() -> None:
    controls = {each.name: each for each in page_options(MoodyQuestion)}
    assert set(controls) == {"k", "mood", "haste"}
    assert (controls["mood"].kind, controls["mood"].choices) == ("choice", ["glad", "sad"])
    haste = controls["haste"]
    assert (haste.kind, haste.default, haste.least, haste.most) == ("number", 3, 1, 9)


def test_every_option_with_a_flag_is_one_of_ask_and_has_a_help_text() -> None:
    from kvweave.cli.ask import command

    known = {flag for each in command.params for flag in each.opts}
    for name, each in question_options().items():
        flag = each.key.flag.partition(" ")[0].partition("/")[0]
        assert each.key.help, name
        assert flag in known or name == "recognise", name
    assert questions.FILLED["k"] == "library.k"
