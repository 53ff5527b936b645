"""Text to token ids and back, and the chat template.

A thin layer over `tokenizers`: everything is read from the files of a model folder, nothing is
guessed. Special tokens are added only by `encode_prompt` and by a chat template, because a chunk
hashed with a BOS in front would never match the same chunk without one.

A Tokenizer is immutable and safe to use from many threads.
"""

import hashlib
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from kvweave.errors import ModelCorrupt, ModelNotFound, RequestError, error_words
from kvweave.text.time_limit import LIMIT, TooLong
from kvweave.text.tool_calls import CALL_OPEN

if TYPE_CHECKING:
    from jinja2 import Template

LARGEST_PRODUCT = 1 << 20  # characters of a text that a template makes by repeating another
RENDER_S = 5.0  # for a chat template, which is foreign code
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # how some vocabularies write a space
DIGITS = 8  # of a message's number while a template runs


class TemplatePart(NamedTuple):
    """A stretch of a rendered conversation."""

    text: str
    message: int | None  # whose content it is; None for the template's own words
    is_foreign: bool = False  # it came with tools or calls, and spells a control token


class Tokenizer:
    """The tokenizer of one model folder (tokenizer.json, tokenizer_config.json)."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelNotFound(
                f"{folder} has no tokenizer.json; save the tokenizer there in the fast format"
            )
        try:
            self._fast = FastTokenizer.from_file(str(path))
            self._plain = FastTokenizer.from_file(str(path))
            _disarm(self._plain)  # "<|im_end|>" in a text is just characters
            for each in (self._fast, self._plain):
                # Some files carry a training run's settings; a cut chunk is another chunk.
                each.no_truncation()
                each.no_padding()
            self._config = _read_json(folder / "tokenizer_config.json")
            generation = _read_json(folder / "generation_config.json")
            model_config = _read_json(folder / "config.json")
        except Exception as error:  # tokenizers raises bare Exception for a broken file
            raise ModelCorrupt(f"{folder}: the tokenizer files do not parse: {error}") from error
        self._folder = folder
        self.bos_token = _token_text(self._config.get("bos_token"))
        self.eos_token = _token_text(self._config.get("eos_token"))
        self.bos_id = self._id_of(self.bos_token)
        stop_ids = {self._id_of(self.eos_token)}
        for source in (generation, model_config):
            declared = source.get("eos_token_id")
            stop_ids |= set(declared if isinstance(declared, list) else [declared])
        if not all(i is None or isinstance(i, int) for i in stop_ids):
            raise ModelCorrupt(f"{folder}: eos_token_id must be a number or a list of numbers")
        # what stands in front of and behind a user's words, by system prompt (text/prompt.py)
        self.frames: dict[str, tuple[list[int], list[int]]] = {}
        # every id that ends an answer: a chat model often has more than one
        self.eos_ids: frozenset[int] = frozenset(i for i in stop_ids if i is not None)

    def as_json(self) -> str:
        """The tokenizer itself, as the file of a fast tokenizer has it."""
        return str(self._fast.to_str())

    @property
    def vocab_size(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever the same text could give other ids. Stable across machines."""
        return hashlib.sha256((self._folder / "tokenizer.json").read_bytes()).hexdigest()[:32]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._fast.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that no text may become by spelling them out: every added one, special or not.
        Some chat models mark the tokens of their roles as not special."""
        named = {token.content for token in _controls(self._fast)}
        added = self._fast.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.content in named)

    def encode_text(self, text: str) -> list[int]:
        """Ids of foreign text, in which a spelled-out control token is ordinary characters."""
        try:
            return list(self._plain.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeError) as error:  # lone surrogates: bytes that were never text
            raise RequestError("the text is not valid Unicode; send UTF-8") from error

    def encode_text_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of foreign text, and for each id the half-open character range it came from.

        A character that takes several tokens is the range of each of them.
        """
        encoding = self._plain.encode(text, add_special_tokens=False)
        return list(encoding.ids), [(start, end) for start, end in encoding.offsets]

    def encode(self, text: str) -> list[int]:
        """Ids of exactly this text: no BOS, no EOS, no template. Control tokens are recognised."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt to be continued: control tokens are recognised, and what the tokenizer
        itself puts in front of every text (BOS, where the model wants one) is there."""
        try:
            return list(self._fast.encode(text).ids)
        except (TypeError, UnicodeError) as error:  # see encode_text
            raise RequestError("the text is not valid Unicode; send UTF-8") from error

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and, for each, the half-open character range of `text` it came from."""
        encoding = self._fast.encode(text, add_special_tokens=False)
        return list(encoding.ids), [(start, end) for start, end in encoding.offsets]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template_source is not None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, up to where the answer starts. Contents are foreign text."""
        return self.encode_parts(self.render_parts(messages))

    def encode_parts(self, parts: Sequence[TemplatePart]) -> list[int]:
        """Ids of rendered parts; only the template's own words can become control tokens."""
        return [token_id for part in parts for token_id in self.encode_part(part)]

    def encode_part(self, part: TemplatePart) -> list[int]:
        is_template = part.message is None and not part.is_foreign
        return self.encode(part.text) if is_template else self.encode_text(part.text)

    def render_parts(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[TemplatePart]:
        """The conversation in the template's words and in the messages' own, kept apart.

        A random word stands in for each content while the template runs and is cut out again. It is
        drawn anew each time, so nothing a user writes can play a part in where the cuts fall, and
        no content can pass for the template's control tokens. The words differ in their number
        alone: one pattern finds them all, in a time that grows with the text and not with messages
        times text.
        """
        word, foreign = secrets.token_hex(16), []

        def safe(value: Any) -> Any:
            """What is shown as it is, but for texts that spell a control token."""
            if isinstance(value, Mapping):
                return {safe(key): safe(each) for key, each in value.items()}
            if isinstance(value, list | tuple):
                return [safe(each) for each in value]
            if not isinstance(value, str) or not self._spells_control(value):
                return value
            foreign.append(value)
            return f"{word}f{len(foreign) - 1:0{DIGITS}}"

        def stand_in(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
            rest = {name: safe(each) for name, each in message.items() if name != "content"}
            is_silent = not message.get("content") and "tool_calls" in message
            return {**rest, "content": "" if is_silent else f"{word}m{place:0{DIGITS}}"}

        stand_ins = [stand_in(place, message) for place, message in enumerate(messages)]
        text = self.render_chat(stand_ins, tools=safe(tools))
        parts = []
        for place, piece in enumerate(re.split(f"{word}([mf][0-9]{{{DIGITS}}})", text)):
            if place % 2:  # what the pattern's group caught: which text stands here
                at = int(piece[1:])
                if piece[0] == "m":
                    parts.append(TemplatePart(str(messages[at]["content"]), at))
                else:  # mostly within JSON, so written as there
                    quoted = json.dumps(foreign[at], ensure_ascii=False)[1:-1]
                    parts.append(TemplatePart(quoted, None, is_foreign=True))
            elif piece:
                parts.append(TemplatePart(piece, None))
        return parts

    def check_tools(self) -> None:
        """Raise RequestError where the chat template shows no tools, or asks for calls in a form
        that is not read here."""
        if self._tools_problem is not None:
            raise RequestError(self._tools_problem)

    @cached_property
    def _tools_problem(self) -> str | None:
        name = self._folder.name
        if not self.has_chat_template:
            return f"{name} has no chat template, so it knows no tools; leave 'tools' out"
        said = [{"role": "user", "content": "?"}]
        word = secrets.token_hex(8)
        function = {"name": word, "description": "?", "parameters": {"type": "object"}}
        shown = self.render_chat(said, tools=[{"type": "function", "function": function}])
        if word not in shown:
            return (
                f"the chat template of {name} shows no tools; leave 'tools' out, or serve a model "
                "that has them, such as qwen2.5-coder-0.5b"
            )
        if CALL_OPEN not in shown or '"arguments"' not in shown:
            return (
                f"the chat template of {name} asks for tool calls in a form that kvweave does not "
                f"read (it reads JSON behind {CALL_OPEN}); leave 'tools' out"
            )
        return None

    def _spells_control(self, text: str) -> bool:
        return self._control_pattern.search(text) is not None

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        spelled = [re.escape(token.content) for token in _controls(self._fast)]
        return re.compile("|".join(spelled) or r"(?!)")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text of a conversation, by the model's own template.

        The template comes with the weights, so it is foreign code: it runs in Jinja's immutable
        sandbox and sees nothing but the messages, the tools and the special tokens.
        """
        if not self.has_chat_template:
            raise RequestError(
                f"{self._folder.name} has no chat template; use plain completions instead"
            )
        from jinja2 import TemplateError

        try:
            template = self._chat_template
            with LIMIT.within(RENDER_S):
                return template.render(
                    messages=list(messages),
                    add_generation_prompt=True,
                    bos_token=self.bos_token or "",
                    eos_token=self.eos_token or "",
                    **({"tools": list(tools)} if tools else {}),
                )
        except TooLong as error:
            raise RequestError(
                f"the chat template takes longer than {RENDER_S:g} s for these messages"
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError,
                ArithmeticError, RecursionError) as error:  # fmt: skip
            raise RequestError(
                f"the chat template refuses these messages: {error_words(error)}"
            ) from error

    @cached_property
    def _chat_template(self) -> "Template":
        """Compiled once: that takes far longer than rendering it, which any thread may do."""
        from jinja2.ext import loopcontrols
        from jinja2.runtime import Context
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Sandbox(ImmutableSandboxedEnvironment):
            """Also bounds what one product makes: a limit on time does not end it."""

            intercepted_binops = frozenset(("*", "**"))

            def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
                _refuse_large(operator, left, right)
                return super().call_binop(context, operator, left, right)

        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_template_error
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        assert self._chat_template_source is not None, "asked for only if there is one"
        return environment.from_string(self._chat_template_source)

    @cached_property
    def _chat_template_source(self) -> str | None:
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several named templates: take the default one
            template = {t["name"]: t["template"] for t in template}.get("default")
        if template is None:
            path = self._folder / "chat_template.jinja"
            template = path.read_text() if path.is_file() else None
        return template

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._fast.token_to_id(token)


def _controls(tokenizer: FastTokenizer) -> list[AddedToken]:
    """Added tokens that could mean something to the model besides text: those of white space alone,
    as code models have for indentation, cannot."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token for token in added if token.content.strip(f"{BLANK} \t\r\n")]


def _disarm(tokenizer: FastTokenizer) -> None:
    """Keep a tokenizer from making control tokens of text. Its vocabulary stays as it is."""
    tokenizer.add_special_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=True,
            )
            for token in _controls(tokenizer)
        ]
    )
    tokenizer.encode_special_tokens = True


def _refuse_large(operator: str, left: Any, right: Any) -> None:
    """Raise ValueError for a product that is longer than any prompt."""
    lengths = [len(each) for each in (left, right) if isinstance(each, str | list | tuple)]
    counts = [abs(each) for each in (left, right) if isinstance(each, int | float)]
    size = math.prod([*lengths, *counts]) if operator == "*" and lengths else 0
    if operator == "**":
        size = math.inf if any(count > 64 for count in counts) else 0
    if size > LARGEST_PRODUCT:
        raise ValueError("a product in it is too large")


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text())
    assert isinstance(value, dict), f"{path.name} is not a JSON object"
    return value


def _token_text(token: Any) -> str | None:
    """A special token is a plain string or a {"content": …} object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
