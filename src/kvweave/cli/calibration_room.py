"""Whether what `kvweave calibrate` is to measure fits into the model's context."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from kvweave.calibrate.case import Case
    from kvweave.calibrate.measure import Setting
    from kvweave.cli.asked_kb import AskedKB
    from kvweave.cli.calibrating import Subject
    from kvweave.fuse.encode.context_room import Shortage
    from kvweave.fuse.encode.contexts import Variant


def check_contexts(
    subject: "Subject",
    variants: "Sequence[Variant]",
    kb: "AskedKB | None",
    cases: "Sequence[Case]",
    settings: "Sequence[Setting]",
) -> None:
    """Refuse encoding contexts that leave no room for a chunk, before anything is measured.

    Neighbours may be as long as chunks of `kb` are at most; else the longest chunk of `cases`
    counts. Raises ConfigError.
    """
    from kvweave.calibrate.questions import template_closing
    from kvweave.fuse.encode.chunk_encoder import Texts
    from kvweave.fuse.encode.context_room import KVZIP, find_shortage
    from kvweave.fuse.encode.preparation import Preparation

    spec, closing = subject.decoder.spec, template_closing(subject.tokenizer)
    strategies = {each.strategy.name: each.strategy for each in settings}
    repeating = [n for n, s in strategies.items() if KVZIP in s.needs(spec.num_layers).extras]
    longest = max(len(chunk) for case in cases for chunk in case.chunks)
    preamble_len = len(cases[0].preamble)  # the same for all: it is the system prompt's
    for variant in variants:
        chunk_tokens = longest
        if variant.kind == "neighbours":
            assert kb is not None, "neighbours without a knowledge base are refused before"
            chunk_tokens = kb.chunk_tokens
        short = find_shortage(
            variant,
            Texts.of(subject.tokenizer, Preparation(variant), closing),
            preamble_len,
            chunk_tokens,
            spec.max_context,
            repeats=bool(repeating),
        )
        if short is not None:
            raise ConfigError(f"{short.says}; {_way_out(short, repeating, has_kb=kb is not None)}")


def _way_out(short: "Shortage", repeating: Sequence[str], *, has_kb: bool) -> str:
    if short.chunk_tokens is None:
        fits = f"{short.encoding} or less" if short.encoding else f"--encodings {short.less}"
        return f"give {fits}"
    without = f"give --strategies without {', '.join(repeating)}, or " if repeating else "make "
    if has_kb:
        return f"{without}a new knowledge base with --chunk-tokens {short.chunk_tokens} or fewer"
    return f"{without}passages of {short.chunk_tokens} tokens or fewer"
