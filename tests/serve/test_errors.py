"""What a client is told about trouble that is not its own."""

import torch

from kvweave.errors import NoDeviceMemory
from kvweave.serve.access.errors import as_api_error, error_body


def test_a_full_device_is_a_503_that_says_when_to_come_back() -> None:
    error = NoDeviceMemory("the device has no memory left for this request; try again later")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    told = as_api_error(error)
    assert (told.status_code, told.code) == (503, "no_device_memory")
    assert told.headers == {"Retry-After": "5"}
    assert "CUDA" not in error_body(told)["error"]["message"]
