"""What kvweave's own decoder makes of a prompt that is fused: what vLLM's is held against."""

from pathlib import Path

import torch

from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.preparation import Preparation
from kvweave.fuse.prefill import PromptFrame, StoredPrompt
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.fuse.transfer.rooms import OwnRoom
from kvweave.hosts.vllm.chunk_maker import as_chunks
from kvweave.hosts.vllm.identity import ServedModel, identify
from kvweave.kv.store import KVStore
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.prompt import Prompt


class OwnPass:
    """kvweave's own decoder, encoder and store over the same folder."""

    def __init__(
        self, folder: Path, store: KVStore, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        self.decoder: Decoder = load_decoder(folder, device=device, dtype=name)
        served = ServedModel(str(folder), None, dtype, None)
        self._identity = identify(served, Preparation.parse("filler"), "raw")
        self._store = store

    def first_token(self, prompt: Prompt, reuse: str, ratio: float) -> torch.Tensor:
        """Logprobs [V] of the first token, fused."""
        identity = self._identity
        context = identity.names(prompt.preamble, "").context
        encoder = ChunkEncoder(
            self.decoder, self._store, context, identity.preparation, identity.texts
        )
        encoder.encode_isolated(as_chunks(prompt.chunks[:1]))
        encoder.encode(as_chunks(prompt.chunks[1:]))
        num_layers = self.decoder.spec.num_layers
        strategy = open_strategy(reuse, ModelFacts(num_layers))
        chunks = [PromptChunk(c, encoder.key(c), encoder.exact_key(c)) for c in prompt.chunks]
        frame = PromptFrame(encoder.preamble, prompt.question, asked=prompt.asked)
        with StoredPrompt(num_layers, chunks, self._store, strategy) as stored:
            kv = self.decoder.new_kv(len(prompt.token_ids))
            logits = stored.prefill(self.decoder, frame, OwnRoom(kv), ratio).logits
        return logits.float().log_softmax(-1)
