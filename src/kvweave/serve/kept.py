"""What a server does that a keeper started: it tells stages, and gives away what it cannot answer.

See `keeper.py`. A server ends with its keeper, however that ended.
"""

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, Self

from kvweave.serve.access.held import HeldRequest, Message, receive_message, send_message
from kvweave.serve.keeper import VARIABLE
from kvweave.serve.starting import StageLog

if TYPE_CHECKING:
    from kvweave.app.hosts import LocalModel

log = logging.getLogger(__name__)

PARENT_DEATH = 1  # PR_SET_PDEATHSIG of prctl
GIVE_OVER_S = 30.0  # for the keeper to answer that this process may


class KeptStart:
    """Inside the `with` every stage is a line on stderr and goes to the keeper, which answers until
    `hand_over`. Any thread may tell it things."""

    def __init__(
        self, channel: socket.socket, listener: socket.socket, memory: int, failures: int
    ) -> None:
        """`memory` is a file for what one server leaves to the next; `failures` of others came
        before."""
        self.listener = listener
        self._memory = memory
        self._not_taken: Exception | None = None
        self.failures = failures
        self.held: Sequence[HeldRequest] = ()  # what is to be answered first, once handed over
        self._channel = channel
        self._log = StageLog(lambda stage: self._say(Message({"kind": "stage", "words": stage})))
        self._said = threading.Lock()  # one message after another
        self._heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._hear, name="keeper", daemon=True).start()

    @classmethod
    def find(cls) -> "KeptStart | None":
        """Return this process's place with its keeper; None: it has none."""
        told = os.environ.pop(VARIABLE, None)  # not for children of ours
        if told is None:
            return None
        *descriptors, failures, parent = map(int, told.split(","))
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        _end_with_parent(parent)
        channel, listener = (socket.socket(fileno=each) for each in descriptors[:2])
        return cls(channel, listener, descriptors[2], failures)

    def hand_over(self) -> socket.socket:
        """Have the keeper stop answering; the caller does from now on. `held` is there then."""
        self._say(Message({"kind": "serving"}))
        held: list[HeldRequest] = []
        with suppress(queue.Empty):
            while (message := self._heard.get(timeout=GIVE_OVER_S)).words["kind"] == "held":
                held.append(HeldRequest.from_message(message))
        self.held = held
        return self.listener

    def tell_broken(self, why: str) -> None:
        """Tell the keeper that the engine is lost: it answers from now on."""
        self._say(Message({"kind": "broken", "why": why}))

    def pass_on(self, held: HeldRequest) -> None:
        """Give a request to the keeper. Its connection stays the caller's to close here."""
        words = {"kind": "held", **held.describe()}
        self._say(Message(words, held.received, held.connection))

    def leave(self, models: "Sequence[LocalModel]") -> None:
        """Leave exact KV of models whose engine was lost to the next process. What fails is said in
        the log alone: the process ends anyway."""
        from kvweave.app.left_models import leave_models

        try:
            with self._open_memory() as file:
                file.truncate(0)
                leave_models(models, file)
        except Exception:
            log.exception("exact KV could not be left")

    def take(self, models: "Sequence[LocalModel]") -> None:
        """Take exact KV that the process before left, once. It is a cache: what cannot be read is
        computed again, and `raise_not_taken` says why."""
        from kvweave.app.left_models import take_models

        try:
            with self._open_memory() as file:
                try:
                    take_models(models, file)
                finally:  # whatever it was, the next process need not meet it again
                    file.truncate(0)
        except Exception as error:
            self._not_taken = error

    def raise_not_taken(self) -> None:
        """Raise what kept exact KV from being taken, if something did: a step of the start, whose
        failure the server logs and counts."""
        if self._not_taken is not None:
            raise self._not_taken

    def _open_memory(self) -> BinaryIO:
        file = os.fdopen(os.dup(self._memory), "r+b")
        file.seek(0)
        return file

    def _say(self, message: Message) -> None:
        with self._said, suppress(OSError):  # it is gone, and we are about to be
            send_message(self._channel, message)

    def _hear(self) -> None:
        while (message := receive_message(self._channel)) is not None:
            self._heard.put(message)
        os.kill(os.getpid(), signal.SIGKILL)  # as if it had been this process that was ended

    def __enter__(self) -> Self:
        self._log.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._log.__exit__()


def _end_with_parent(parent: int) -> None:
    """Let the system end this process with its keeper, where it can: at once, whatever it does. The
    end of the channel tells elsewhere."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
