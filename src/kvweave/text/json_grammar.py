"""Answers that are JSON: which tokens may come next, by llguidance.

The grammar is made of a JSON schema, whatever the model; a token that would leave it is never
drawn. White space between parts is fixed, or a small model fills its answer with it.
"""

import json
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import ModelError, RequestError
from kvweave.text.tokenizer import Tokenizer

ANY_OBJECT = '{"type": "object"}'  # what JSON mode asks for
LONGEST_SCHEMA = 64 << 10  # characters
OPTIONS = {"whitespace_flexible": False}

Mask = NDArray[np.bool_]  # [V]: whether a token may come


class JsonConstraint:
    """One answer on its way. For one thread."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def take(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that were given out."""
        for token_id in token_ids:
            self._matcher.consume_token(token_id)
        self._check()

    def mask(self) -> Mask:
        """Which tokens may come next; the end of the answer is one of them."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            words = " ".join(str(self._matcher.get_error()).split())
            raise ModelError(f"the answer left its JSON schema: {words[:200]}")


class JsonGrammars:
    """Makes constraints for one tokenizer. Any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` of the model, which may have more rows than the tokenizer has words."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def check(self, schema: str) -> None:
        """Raise RequestError for a schema that no answer can be held to, and where the library is
        missing."""
        if len(schema) > LONGEST_SCHEMA:
            raise RequestError(f"the JSON schema is longer than {LONGEST_SCHEMA:,} characters")
        grammar = self._grammar(schema)
        reason = self._library.LLMatcher.validate_grammar(grammar, self._words)
        if reason and not reason.startswith("WARNING"):
            shown = " ".join(reason.split())
            raise RequestError(f"no answer can be held to this JSON schema: {shown[:300]}")
        try:
            has_first = bool(self.constraint(schema).mask().any())
        except ModelError:  # such as {"$ref": "#"}, which parses and never says what it is
            has_first = False
        if not has_first:
            raise RequestError("no answer can be held to this JSON schema: nothing fits it")

    def constraint(self, schema: str) -> JsonConstraint:
        """Make the constraint of one answer; its schema was checked before."""
        matcher = self._library.LLMatcher(self._words, self._grammar(schema), log_level=0)
        return JsonConstraint(matcher, self._vocab_size)

    def _grammar(self, schema: str) -> str:
        try:
            json.loads(schema)
            return str(self._library.LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is no JSON: {error}") from error

    @property
    def _words(self) -> Any:
        """The tokenizer as the library has it: about a second, once."""
        with self._lock:
            return self._made_words

    @cached_property
    def _made_words(self) -> Any:
        stop = sorted(self._tokenizer.eos_ids)
        return self._library.LLTokenizer(
            self._tokenizer.as_json(), n_vocab=self._vocab_size, eos_token=stop
        )

    @property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                "answers in JSON need llguidance; run: pip install 'kvweave[serve]'"
            ) from error
        return llguidance
