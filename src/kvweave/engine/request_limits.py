"""What an engine can compute at all: how long prompts and answers may be, and of which tokens."""

from collections.abc import Sequence

from kvweave.engine.reference import check_prompt
from kvweave.engine.request import EngineRequest
from kvweave.errors import PromptTooLong, RequestError
from kvweave.model.spec import ModelSpec


class RequestLimits:
    """The limits of one model and one pool. Any thread."""

    def __init__(self, spec: ModelSpec, pool_tokens: int) -> None:
        self._spec = spec
        self._pool_tokens = pool_tokens

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise RequestError unless a prompt can be computed here."""
        check_prompt(prompt_ids, self._spec.vocab_size, self._spec.max_context)
        if len(prompt_ids) >= self._pool_tokens:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, the KV pool holds {self._pool_tokens} "
                "with the answer; send less text or give the engine more pool_tokens"
            )

    def check_answer(self, request: EngineRequest) -> None:
        """Raise RequestError unless what is asked about the answer makes sense."""
        size = self._spec.vocab_size
        if any(not 0 <= token_id < size for token_id in request.forced):
            raise RequestError(f"`forced` has token ids outside the vocabulary of {size}")
        if any(not 0 <= token_id < size for token_id, _ in request.sampling.logit_bias):
            raise RequestError(f"logit_bias has token ids outside the vocabulary of {size}")
        if request.watched < 0:
            raise RequestError(f"watched must be 0 or more, got {request.watched}")

    def answer_tokens(self, request: EngineRequest, prompt_len: int) -> int:
        """Tokens that the answer may have at most."""
        most = min(self._spec.max_context, self._pool_tokens) - prompt_len
        return min(len(request.forced) or request.sampling.max_tokens, most)
