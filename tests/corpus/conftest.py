import pytest

from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
