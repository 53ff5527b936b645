"""The chat template: compiled once, and no rendering sees another."""

import json
import shutil
import time
from pathlib import Path

import pytest

from kvweave.errors import RequestError
from kvweave.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def with_template(folder: Path, into: Path, template: str) -> Tokenizer:
    shutil.copyfile(folder / "tokenizer.json", into / "tokenizer.json")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (into / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Tokenizer(into)


def test_a_template_is_compiled_once_however_often_it_is_rendered(
    chat_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    compiled = []
    compile_ = ImmutableSandboxedEnvironment.from_string

    def counting(self: ImmutableSandboxedEnvironment, *args: object) -> object:
        compiled.append(1)
        return compile_(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", counting)
    tokenizer = Tokenizer(chat_model_folder)
    texts = [tokenizer.render_chat(HELLO) for _ in range(3)]
    assert len({*texts}) == 1
    assert "Hello" in texts[0]
    assert len(compiled) == 1


def test_what_a_template_counts_starts_anew_with_every_rendering(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    template = (
        "{% set seen = namespace(n=0) %}"
        "{% for m in messages %}{% set seen.n = seen.n + 1 %}{% endfor %}{{ seen.n }}"
    )
    tokenizer = with_template(chat_model_folder, tmp_path, template)
    assert [tokenizer.render_chat(HELLO * n) for n in (1, 3, 2)] == ["1", "3", "2"]


def test_a_template_with_a_mistake_is_refused_every_time(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(chat_model_folder, tmp_path, "{% for m in messages %}")
    for _ in range(2):
        with pytest.raises(RequestError, match="the chat template refuses these messages"):
            tokenizer.render_chat(HELLO)


def test_a_template_may_refuse_one_conversation_and_take_the_next(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    template = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}fine"
    tokenizer = with_template(chat_model_folder, tmp_path, template)
    with pytest.raises(RequestError, match="one only"):
        tokenizer.render_chat(HELLO * 2)
    assert tokenizer.render_chat(HELLO) == "fine"


def test_parts_are_found_in_a_time_that_grows_with_the_text(chat_model_folder: Path) -> None:
    """Four times the messages took sixteen times as long: 26 s for 20,000."""
    tokenizer = Tokenizer(chat_model_folder)

    def seconds(num: int) -> float:
        began_s = time.process_time()
        parts = tokenizer.render_parts(HELLO * num)
        assert [part.message for part in parts if part.message is not None] == list(range(num))
        return time.process_time() - began_s

    seconds(10)
    assert seconds(8000) < 3.0


def test_a_number_in_a_message_is_no_place_in_the_conversation(chat_model_folder: Path) -> None:
    tokenizer = Tokenizer(chat_model_folder)
    said = [{"role": "user", "content": "00000001"}, {"role": "assistant", "content": "0" * 40}]
    contents = [part.text for part in tokenizer.render_parts(said) if part.message is not None]
    assert contents == ["00000001", "0" * 40]


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
}


@pytest.mark.parametrize("how", list(ENDLESS))
def test_a_template_that_never_ends_is_ended(
    chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("kvweave.text.tokenizer.RENDER_S", 0.5)
    tokenizer = with_template(chat_model_folder, tmp_path, ENDLESS[how])
    began_s = time.monotonic()
    with pytest.raises(RequestError, match=r"the chat template takes longer than 0\.5 s"):
        tokenizer.render_chat(HELLO)
    assert time.monotonic() - began_s < 20.0


def test_what_is_over_in_time_is_left_alone(
    chat_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(chat_model_folder)
    monkeypatch.setattr("kvweave.text.tokenizer.RENDER_S", 0.3)
    tokenizer.render_chat(HELLO)
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:  # nothing arrives here afterwards
        pass


@pytest.mark.parametrize("product", ["'a' * 9999999999", "[0] * 9999999999", "9 ** 99999999"])
def test_a_template_cannot_take_all_memory(
    chat_model_folder: Path, tmp_path: Path, product: str
) -> None:
    tokenizer = with_template(chat_model_folder, tmp_path, f"{{{{ ({product})|string|length }}}}")
    with pytest.raises(RequestError, match="a product in it is too large"):
        tokenizer.render_chat(HELLO)
