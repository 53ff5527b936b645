"""Prompts as the engine takes them: exact, or fused from stored chunk KV."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from kvweave.app.library.kv_behind import KVBehind
from kvweave.corpus.chunker import make_chunk_id
from kvweave.engine.request import EngineChunk, EngineRequest, FusedPart, LoadCost
from kvweave.engine.sampling import Sampling
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.strategy import Strategy
from kvweave.reasons import Reason
from kvweave.text.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Fusion:
    """How a prompt is fused from stored chunk KV. What is not stored is computed."""

    strategy: Strategy
    ratio: float  # of the reused tokens, recomputed
    # parts computed though stored, by place, history first: why
    computed: Mapping[int, str] = field(default_factory=dict)
    expected: LoadCost | None = None  # what it takes on this machine; None: not known
    close_call: float = 0.0  # nats; a first token that leads by less is computed exactly


def exact_request(
    prompt: Prompt, sampling: Sampling, eos_ids: Collection[int], *, use_tree: bool
) -> EngineRequest:
    """A prompt of which nothing is approximated. `use_tree`: read and feed the knowledge tree."""
    parts = (*prompt.history, *prompt.chunks)  # what was said before is a part like others
    return EngineRequest(
        prompt.question,
        sampling,
        frozenset(eos_ids),
        prompt.preamble,
        tuple(EngineChunk(make_chunk_id(ids), ids) for ids in parts),
        use_tree=use_tree,
        namespace=prompt.tenant,
        as_of=prompt.as_of,
    )


def fused_request(
    kv: KVBehind, prompt: Prompt, sampling: Sampling, eos_ids: Collection[int], fusion: Fusion
) -> EngineRequest:
    """A prompt that is fused from chunk KV. May wait for the engine, which computes the preamble
    once."""
    encoder = kv.encoder
    parts = (*prompt.history, *prompt.chunks)
    # of the history, chunks of earlier turns may be stored; what was said never is
    said = zip(prompt.history, kv.are_stored(prompt.history), strict=True)
    computed = {
        place: str(Reason.HISTORY) for place, (_, is_stored) in enumerate(said) if not is_stored
    }
    computed |= fusion.computed
    part = FusedPart(
        kv.store,
        kv.preamble(),
        tuple(PromptChunk(ids, encoder.key(ids), encoder.exact_key(ids)) for ids in parts),
        fusion.strategy,
        fusion.ratio,
        asked=prompt.asked,
        encoding=str(encoder.preparation.variant),
        computed=computed,
        expected=fusion.expected,
        close_call=fusion.close_call,
    )
    return replace(exact_request(prompt, sampling, eos_ids, use_tree=True), fused=part)
