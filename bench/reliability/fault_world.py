"""What the fault matrix asks about: a tiny model, documents, questions, and the right answers.

The model is random and small but for its KV: a layer of a chunk is as large as a read, so that a
fault can hit the first layer, or one in the middle, and not all of them. Answers are compared by
their text and the log probability of each token: bytes that were changed show there.
"""

import os
import random
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from common.files import CACHE, REPO
from reliability.fault_server import FaultServer, Reply

WORLD = CACHE / "fault_world"  # the model and the embedder of all parts
LAYERS = 8
HEADS, HEAD_DIM = 4, 128  # 4 KiB of KV per token and layer
BASE = 8  # documents that stay
SPARES = 6  # that come and go
TOLERANCE = 0.02  # between two log probabilities of one token, computed in another batch
K = 2  # chunks of a prompt: the first is exact where it is loaded, the second is not

_COMMON = """
the of and a in that it is was for on with as by at from this be are or
"""
_TOPICS = """
amber anvil apple arrow atlas bacon badge baker basil beach berry birch blade bloom brick brook
cabin cable camel candle canoe cedar chalk charm cider cliff clock cloud clover coal comet
copper coral cotton crane creek crown daisy delta diamond dove eagle ember fable falcon fern
flint forge fox frost garnet ginger glacier grain granite grove harbor hazel heron honey indigo
iris ivory jade jasper juniper kayak kelp lantern lava lemon lichen lilac linen lotus magnet
maple marble meadow mint mosaic moss nectar nickel oasis ochre olive onyx opal orchid otter
oyster paper pearl pebble pepper pine plum poppy prairie quartz quill raven reef rose ruby
saffron sage salmon sand sapphire shell silk silver slate sparrow spruce tulip velvet violet
walnut willow zinc
"""
COMMON, TOPICS = _COMMON.split(), _TOPICS.split()


class Document(NamedTuple):
    title: str
    text: str
    question: str


class Truth(NamedTuple):
    """The two right answers: computed in full, and from stored KV."""

    full: Reply
    fused: Reply

    def judge(self, reply: Reply) -> str:
        """Which of them an answer is, or "wrong"."""
        if is_same(reply, self.fused):
            return "fused"
        return "full" if is_same(reply, self.full) else "wrong"


def is_same(one: Reply, other: Reply) -> bool:
    pairs = zip(one.logprobs, other.logprobs, strict=False)
    return (
        one.text == other.text
        and len(one.logprobs) == len(other.logprobs)
        and all(abs(a - b) <= TOLERANCE for a, b in pairs)
    )


@dataclass
class FaultWorld:
    """Made once, shared by all lanes; they only read."""

    model: Path
    embedder: Path
    base: list[Document]
    spares: list[Document]
    truths: dict[str, Truth] = field(default_factory=dict)  # by title


def make_world(folder: Path, seed: int = 0) -> FaultWorld:
    """In `folder`, which is made once, by whoever comes first."""
    if not folder.exists():
        making = folder.with_name(f"{folder.name}.{os.urandom(6).hex()}")
        _make_models(making)
        try:
            making.rename(folder)
        except OSError:  # another one was faster
            shutil.rmtree(making)
    documents = [make_document(n, seed) for n in range(BASE + SPARES)]
    model, embedder = folder / "model" / "llama", folder / "embedder" / "model"
    return FaultWorld(model, embedder, documents[:BASE], documents[BASE:])


def _make_models(folder: Path) -> None:
    sys.path.insert(0, str(REPO / "tests"))
    from worlds.tiny_embedder import make_embedder_folder
    from worlds.tiny_models import make_chat_model_folder

    make_chat_model_folder(
        folder / "model",
        max_position_embeddings=4096,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
    )
    make_embedder_folder(folder / "embedder", words=[*COMMON, *TOPICS])


def make_document(number: int, seed: int) -> Document:
    """One chunk about three things that no other document is about."""
    rng = random.Random(f"{seed} {number}")
    own = TOPICS[3 * number : 3 * number + 3]
    words = [w for n in range(14) for w in (own[n % 3], *rng.sample(COMMON, 2))]
    kind = "Base" if number < BASE else "Spare"
    text = " ".join(own) + ". " + " ".join(words) + "."
    return Document(f"{kind} {number}", text, text[:140])  # as much as the embedder reads


def learn_truths(world: FaultWorld, server: FaultServer) -> None:
    """Ask an undisturbed server everything, in full and from stored KV."""
    for document in world.base:
        must(server.upload(document.title, document.text))
    for document in world.base:
        world.truths[document.title] = _truth(server, document, K)
    for document in world.spares:
        must(server.upload(document.title, document.text))
        world.truths[document.title] = _truth(server, document, 1)
        must(server.delete(document.title))


def _truth(server: FaultServer, document: Document, k: int) -> Truth:
    full = must(server.ask(document.question, k, "full"))
    if document.title not in full.sources:
        raise RuntimeError(f"{document.title} is not found by its own words, but {full.sources}")
    return Truth(full, must(server.ask(document.question, k)))


def must(reply: Reply) -> Reply:
    """Of what nothing stands in the way of."""
    if reply.status != 200:
        raise RuntimeError(f"an undisturbed server says {reply.status}: {reply.error}")
    return reply
