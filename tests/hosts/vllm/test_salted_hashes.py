"""Fused blocks get names of their own, whenever their tokens come."""

import hashlib

from kvweave.hosts.vllm.salted_hashes import salt_blocks

SIZE = 4  # tokens of a block


class HashedTokens:
    """A request as vLLM hashes it: a chain over full blocks."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.block_hashes: list[bytes] = []
        self._block_hasher = hash_new_blocks
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.update_block_hashes()


def hash_new_blocks(request: HashedTokens) -> list[bytes]:
    made: list[bytes] = []
    for block in range(len(request.block_hashes), len(request.tokens) // SIZE):
        parent = (request.block_hashes + made)[block - 1] if block else b""
        tokens = request.tokens[block * SIZE : (block + 1) * SIZE]
        made.append(hashlib.sha256(parent + repr(tokens).encode()).digest())
    return made


def plain(num_tokens: int = 22) -> HashedTokens:
    return HashedTokens(list(range(num_tokens)))


def test_blocks_in_front_keep_their_names_and_no_other_does() -> None:
    exact, fused = plain(), plain()
    salt_blocks(fused, 2, b"plan")
    assert fused.block_hashes[:2] == exact.block_hashes[:2]
    assert len(fused.block_hashes) == len(exact.block_hashes) == 5
    assert not set(fused.block_hashes[2:]) & set(exact.block_hashes)


def test_what_is_generated_later_is_apart_too() -> None:
    exact, fused = plain(), plain()
    salt_blocks(fused, 5, b"plan")  # the first fused block is not full yet
    assert fused.block_hashes == exact.block_hashes
    for token in range(10):
        exact.append(token)
        fused.append(token)
    assert len(fused.block_hashes) == 8
    assert not set(fused.block_hashes[5:]) & set(exact.block_hashes)


def test_the_same_plan_finds_its_blocks_again_and_another_does_not() -> None:
    one, same, other = plain(), plain(), plain()
    salt_blocks(one, 1, b"plan")
    salt_blocks(same, 1, b"plan")
    salt_blocks(other, 1, b"another plan")
    assert one.block_hashes == same.block_hashes
    assert not set(one.block_hashes[1:]) & set(other.block_hashes)


def test_salting_again_may_begin_further_in_front_and_never_behind() -> None:
    request, exact = plain(), plain()
    salt_blocks(request, 3, b"plan")
    salt_blocks(request, 1, b"plan")
    before = list(request.block_hashes)
    assert not set(before[1:]) & set(exact.block_hashes)
    salt_blocks(request, 4, b"plan")
    assert request.block_hashes == before
