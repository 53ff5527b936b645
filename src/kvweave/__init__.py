"""kvweave: RAG serving that never prefills the same passage twice.

The front door: `Weave` is loaded on first use, so that `import kvweave` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvweave.app.weave import Weave

__version__ = "0.1.0.dev0"
__all__ = ["Weave", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Weave":
        from kvweave.app.weave import Weave

        return Weave
    raise AttributeError(f"module 'kvweave' has no attribute {name!r}")
