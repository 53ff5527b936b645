"""How answers are drawn where a request does not say it.

request > configuration (file, variables, flags) > the model's generation_config.json > built in
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvweave.engine.sampling import Sampling
from kvweave.errors import ModelCorrupt, RequestError
from kvweave.model.files.generation import FILE, unless_greedy


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Fields of `Sampling`, by who set them. Raises ModelCorrupt for a model's that cannot be."""

    configured: Mapping[str, Any] = field(default_factory=dict)  # by the user
    of_model: Mapping[str, Any] = field(default_factory=dict)  # by its makers: `read_generation`

    def __post_init__(self) -> None:
        try:
            Sampling(**self.of_model)
        except RequestError as error:
            raise ModelCorrupt(f"{FILE} of the model: {error}; correct the file") from error

    def sampling(
        self, asked: Mapping[str, Any] | None = None, built_in: Mapping[str, Any] | None = None
    ) -> Sampling:
        """With what a request `asked` for. `built_in` stands behind everything else, in front of
        the defaults of `Sampling`. Raises RequestError."""
        chosen = {**self.configured, **(asked or {})}
        of_model = unless_greedy(self.of_model, chosen.get("temperature"))
        return Sampling(**{**(built_in or {}), **of_model, **chosen})
