"""Trouble in the world, as a tree. An ordinary miss is not here: it is None, False or an enum.

    KVWeaveError
    ├── ConfigError            a setting is wrong; the user can change it
    ├── ModelError             a model cannot be used
    │   ├── ModelNotFound      no such name, folder, file or hub id
    │   ├── ModelCorrupt       the bytes are truncated, altered or incomplete
    │   ├── UnsupportedModel   an architecture or option we refuse by name
    │   └── NoNumbers          it gave logits that are no numbers
    ├── RequestError           this request cannot be answered as asked
    │   └── PromptTooLong      the model's context, or the engine's room, does not hold it
    ├── EngineClosed           the engine stopped before the answer was finished
    ├── NoDeviceMemory         the device had no memory left for a request
    ├── UpstreamError          no upstream of a gateway answered
    ├── UpstreamRefusal        an upstream refused this request
    ├── CorpusError            a document or a knowledge base cannot be used
    │   ├── CorpusDamaged      its bytes are not those that were stored
    │   ├── CorpusMismatch     it was made with another embedder or tokenizer
    │   ├── CorpusBusy         another process writes it
    │   ├── CorpusFull         there is no room on its disk
    │   └── CorpusReadOnly     its disk, or its folder, cannot be written
    └── TierError              a place for bytes failed
        ├── TierCorrupt        it answered, with the wrong bytes
        └── TierForeign        it holds what another version wrote and this one cannot read

Each message is one line that names the thing and the way out. The command line prints it and exits
with 2; the server answers 400 for those that are the caller's fault, 503 where the engine is
closed or its device is full.
"""


class KVWeaveError(Exception):
    """Everything kvweave raises on purpose."""


class ConfigError(KVWeaveError):
    """A setting is wrong; the message says which values are right."""


class ModelError(KVWeaveError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """No embedded model, folder, file or hub id goes by that name."""


class ModelCorrupt(ModelError):
    """Model bytes are truncated, altered or incomplete."""


class UnsupportedModel(ModelError):
    """An architecture or option that the decoder refuses by name."""


class NoNumbers(ModelError):
    """The model gave logits that are no numbers: nothing can be drawn from them."""


class RequestError(KVWeaveError):
    """The request cannot be answered as asked; the caller can change it."""


class PromptTooLong(RequestError):
    """The prompt has more tokens than the model's context or the engine's room for KV."""


class EngineClosed(KVWeaveError):
    """The engine was closed; nothing is wrong with the request."""


class NoDeviceMemory(KVWeaveError):
    """The device had no memory left; nothing is wrong with the request, but it may be too long."""


class UpstreamError(KVWeaveError):
    """No upstream answered; nothing is wrong with the request."""


class UpstreamRefusal(KVWeaveError):
    """An upstream refused this request, and others would too."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status  # of HTTP
        self.param = param  # the request's field at fault
        self.code = code  # for programs


class CorpusError(KVWeaveError):
    """A document or a knowledge base cannot be used."""


class CorpusDamaged(CorpusError):
    """What a knowledge base has stored was changed, or is gone."""


class CorpusMismatch(CorpusError):
    """The embedder or the tokenizer that a knowledge base was made with is not the one here."""


class CorpusBusy(CorpusError):
    """Another process writes this knowledge base. Nothing was changed; try again."""


class CorpusFull(CorpusError):
    """There is no room where this knowledge base lies. What was committed stays."""


class CorpusReadOnly(CorpusError):
    """This knowledge base can be read and not written."""


class TierError(KVWeaveError):
    """A place for bytes failed. Callers turn it into a miss with a counter."""


class TierCorrupt(TierError):
    """A tier answered with bytes that do not match their checksum."""


class TierForeign(TierError):
    """An intact object that this build cannot read. It is left alone for the build that can."""


def error_words(error: BaseException, most: int | None = None) -> str:
    """Return what an error says in one line, at most so many characters; its type where it says
    nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__
