"""Keys name everything that changes the bytes, the same on every machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvweave.corpus.chunker import make_chunk_id
from kvweave.kv.format.keys import context_of, make_chunk_key, make_tag, parse_key, tag_of
from worlds.kv import make_context, make_key

SRC = Path(__file__).parents[2] / "src"

# written down once; a change here orphans every store out there. One that changes what an object
# is needs a new layout version too; one of names alone does not: removals still find the old ones
GOLDEN = "e4c287b2d113ad26246925dc06d08ca220e539641bb1bba04f653f537b70b737"
GOLDEN_EMPTY = "b35ea3faf1d0aa60cae66941d9efbd40e8a0859f2c218424cd2f3d1a011ace94"


def test_golden_keys_do_not_change() -> None:
    assert make_chunk_key(make_context(), [5, 6, 7, 70000]).hex() == GOLDEN
    assert make_chunk_key(make_context(tenant_salt="a"), []).hex() == GOLDEN_EMPTY


@pytest.mark.parametrize(
    "change",
    [
        {"model": "weights-2"},
        {"dtype": "bfloat16"},
        {"codec": "int8"},
        {"tokenizer": "tokens-2"},
        {"preamble_ids": (1, 2)},
        {"rope": "yarn factor=4"},
        {"variant": "neighbours"},
        {"tenant_salt": "tenant"},
        {"layout_version": 99},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_part_of_the_context_changes_the_key(change: dict[str, object]) -> None:
    plain, changed = make_context(), make_context(**change)
    assert make_chunk_key(plain, [1]) != make_chunk_key(changed, [1])
    assert plain.context_id() != changed.context_id()


def test_fields_cannot_run_into_each_other() -> None:
    assert make_key(0, make_context(model="ab", tokenizer="c")) != make_key(
        0, make_context(model="a", tokenizer="bc")
    )
    assert make_chunk_key(make_context(preamble_ids=(1, 2)), [3]) != make_chunk_key(
        make_context(preamble_ids=(1,)), [2, 3]
    )


def test_keys_of_one_context_share_their_first_bytes_and_nothing_else() -> None:
    one, other = make_key(1), make_key(2)
    assert context_of(one) == context_of(other) == make_context().context_id()
    assert one[8:] != other[8:]


def test_every_key_of_a_chunk_carries_its_tag_whatever_it_was_computed_for() -> None:
    ids = [5, 6, 70000]
    contexts = (make_context(), make_context(model="weights-2", tenant_salt="tenant"))
    keys = [make_chunk_key(each, ids, behind) for each in contexts for behind in ((), ("aa", "b"))]
    assert len(set(keys)) == 4
    assert {tag_of(key) for key in keys} == {make_tag(make_chunk_id(ids))}
    assert tag_of(make_chunk_key(make_context(), [5, 6])) != tag_of(keys[0])
    assert [make_tag(text) for text in ("", "no id", "00", "00" * 17)] == [None] * 4


def test_another_process_with_another_hash_seed_makes_the_same_key() -> None:
    code = (
        "from kvweave.kv.format.keys import KeyContext, make_chunk_key\n"
        "rope = 'default theta=10000'\n"
        "c = KeyContext('weights-1', 'float32', 'raw', 'tokens-1', (1, 2, 3), rope)\n"
        "print(make_chunk_key(c, [5, 6, 7, 70000]).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert done.stdout.decode().strip() == GOLDEN


def test_only_the_hexadecimal_form_of_a_key_parses() -> None:
    key = make_key()
    assert parse_key(key.hex()) == key
    assert [parse_key(t) for t in ("", "xy", key.hex()[:-2], key.hex().upper())] == [None] * 4


def test_a_token_id_that_is_none_is_refused() -> None:
    with pytest.raises(Exception, match="argument"):
        make_chunk_key(make_context(), [-1])
