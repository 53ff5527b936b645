"""End what is done at a step as a kill would: nothing behind it runs."""

from collections.abc import Callable

import pytest


def kill_at(owner: type, name: str, act: Callable[[], object], *, halfway: bool = False) -> None:
    """`act` dies where it calls `owner.name`; with `halfway`, once the first of what that is given
    is done."""
    original = getattr(owner, name)

    def die(self: object, *args: object) -> None:
        if halfway:
            original(self, list(args[0])[:1])  # type: ignore[call-overload]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(KeyboardInterrupt):
            act()
