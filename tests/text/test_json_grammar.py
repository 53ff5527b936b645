"""Which tokens may come next in an answer that is JSON."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import RequestError
from kvweave.text.json_grammar import ANY_OBJECT, JsonGrammars
from kvweave.text.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="make test installs it")
SCHEMA = {
    "type": "object",
    "properties": {"tool": {"enum": ["zorb", "blint"]}, "wide": {"type": "integer"}},
    "required": ["tool", "wide"],
    "additionalProperties": False,
}
MORE = 7  # rows of a model's vocabulary that the tokenizer has no words for


@pytest.fixture(scope="module")
def tokenizer(chat_model_folder: Path) -> Tokenizer:
    return Tokenizer(chat_model_folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> JsonGrammars:
    return JsonGrammars(tokenizer, tokenizer.vocab_size + MORE)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_among_them_the_answer_keeps_the_schema(
    grammars: JsonGrammars, tokenizer: Tokenizer, seed: int
) -> None:
    rng, given = random.Random(seed), []
    constraint = grammars.constraint(json.dumps(SCHEMA))
    for _ in range(200):
        mask = constraint.mask()
        assert mask.shape == (tokenizer.vocab_size + MORE,)
        ends = [i for i in tokenizer.eos_ids if mask[i]]
        token_id = ends[0] if ends else int(rng.choice(np.flatnonzero(mask)))
        if token_id in tokenizer.eos_ids:
            break
        given.append(token_id)
        constraint.take([token_id])
    said = json.loads(tokenizer.decode(given))
    assert set(said) == {"tool", "wide"}
    assert said["tool"] in ("zorb", "blint")
    assert isinstance(said["wide"], int)


def test_a_bad_schema_is_one_line(grammars: JsonGrammars) -> None:
    grammars.check(ANY_OBJECT)
    for schema in ('{"type": "magic"}', "{", '{"$ref": "#/nowhere"}'):
        with pytest.raises(RequestError, match="JSON schema") as seen:
            grammars.check(schema)
        assert "\n" not in str(seen.value)
    with pytest.raises(RequestError, match="longer than"):
        grammars.check(json.dumps({"description": "x" * 70_000}))
