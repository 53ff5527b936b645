"""What requests may call a model: its own name, other names for it, and a knowledge base with it.

    qwen2.5-coder-0.5b             a model that is served; there may be several
    gpt-4o-mini                    another name of it (`server.aliases`)
    qwen2.5-coder-0.5b@handbook    the same, answering from the knowledge base `handbook`

So that a client that can choose a model, and nothing else, can choose a knowledge base.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvweave.app.hosts import ModelHost
from kvweave.app.libraries.libraries import Libraries
from kvweave.app.libraries.library_folders import NAME
from kvweave.errors import ConfigError
from kvweave.serve.access.errors import ApiError

AT = "@"  # between a model and a knowledge base
NameKind = Literal["model", "alias", "kb", "embedder"]


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What holds for requests that do not say it, and what they may call the model. Raises
    ConfigError for a name that cannot be."""

    sampling: "dict[str, Any]" = field(default_factory=dict)  # fields of `Sampling`
    aliases: tuple[str, ...] = ()  # other names of the model

    def __post_init__(self) -> None:
        for alias in self.aliases:
            if not alias.strip() or AT in alias:
                raise ConfigError(
                    f"server.aliases: {alias!r} cannot name a model; use a word without {AT}"
                )


class ModelRef(NamedTuple):
    """What a request means by its `model`."""

    name: str  # as the request has it; the model's own where it has none
    model: str  # that is served
    kb: str | None = None  # a knowledge base that it answers from


class ListedModel(NamedTuple):
    """A name that a request may have."""

    name: str
    kind: NameKind
    model: str | None  # that is served; None: an embedder


class ModelNames:
    """The names of one server. Any thread; `list_models` and `find` may read a disk."""

    def __init__(self, weave: ModelHost, libraries: Libraries, aliases: Sequence[str]) -> None:
        self._weave = weave
        self._libraries = libraries
        self._aliases = tuple(dict.fromkeys(aliases))

    def read(self, name: str | None) -> ModelRef:
        """What `name` means. Raises a 404 for a name that nothing here has; whether there is such a
        knowledge base is found out when it is opened."""
        if name is None:
            return ModelRef(self._own, self._own)
        if (model := self._find_model(name)) is not None:
            return ModelRef(name, model)
        named, at, kb = name.rpartition(AT)
        model = self._find_model(named) if at else None
        if model is not None and NAME.fullmatch(kb):
            return ModelRef(name, model, kb)
        raise self._unknown(name)

    def _find_model(self, name: str) -> str | None:
        """The model behind a name without a knowledge base; None: there is none."""
        if name in self._aliases:
            return self._own
        return name if name in self._weave.models() else None

    def read_plain(self, name: str | None) -> ModelRef:
        """Find out what `name` means where there is no knowledge base to answer from."""
        ref = self.read(name)
        if ref.kb is not None:
            message = f"{ref.name!r} is for /v1/chat/completions; here it is {self._own!r}"
            raise ApiError(400, message, param="model")
        return ref

    def list_models(self, tenant: str) -> list[ListedModel]:
        """Every name that a request of `tenant` may have, the model's own first."""
        own = self._own
        models = [ListedModel(name, "model", name) for name in self._weave.models()]
        models.sort(key=lambda each: each.name != own)
        aliases = [ListedModel(name, "alias", own) for name in self._aliases if name != own]
        kbs = [
            ListedModel(f"{model}{AT}{kb}", "kb", model)
            for kb in self._libraries.folders.names(tenant)
            for model in self._libraries.models_of(tenant, kb)
        ]
        return [
            *models,
            *aliases,
            *kbs,
            ListedModel(self._libraries.config.embedder, "embedder", None),
        ]

    def find(self, name: str, tenant: str) -> ListedModel:
        """One of `list_models`, or an alias with a knowledge base. Raises a 404."""
        listed = self.list_models(tenant)
        found = next((each for each in listed if each.name == name), None)
        if found is not None:
            return found
        ref = self.read(name)
        if ref.kb is not None and f"{ref.model}{AT}{ref.kb}" in [each.name for each in listed]:
            return ListedModel(name, "kb", ref.model)
        raise self._unknown(name)

    @property
    def _own(self) -> str:
        return self._weave.model_name

    def _unknown(self, name: str) -> ApiError:
        return ApiError(
            404,
            f"no model {name!r} here; this server has {', '.join(map(repr, self._weave.models()))} "
            "(GET /v1/models lists all)",
            param="model",
            code="model_not_found",
        )
