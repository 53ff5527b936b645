"""What tests of compiled kernels share."""

from collections.abc import Callable

import pytest
from torch import Tensor

from kvweave.kernels import dispatch
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.loading import native_kernels


@pytest.fixture(scope="module")
def library() -> CompiledLibrary:
    library, words = native_kernels()
    if library is None:
        pytest.skip(words)
    return library


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Runs something as a machine without compiled kernels does."""

    def run(what: Callable[[], Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "loaded_library", lambda: None)
            return what()

    return run
