"""What a request has come to so far, so that another replica can go on with it. Pure.

    engine ── groups of token ids ──► Progress ── news with every chunk ──► Transcript ── Resume ──► another engine
             (replica process)                      (ingress process)

A *group* is the token ids that the engine handed to its serving layer at once. The text of a stream's chunks is a
function of the request and its groups, so an engine that is given the same groups again makes the same chunks.
The ingress lets those pass that the client has not seen.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vtoken.core.errors import VTokenError

Finish = tuple[str, int | str | None]
"""Why a generation has ended: vLLM's finish reason and stop reason."""

DONE = "data: [DONE]\n\n"
"""The last event of every whole stream."""

_CREATED = re.compile(r'^(data: \{"id":"[^"]*","object":"[^"]*","created":)(\d+)')
"""Begin of a chunk; nothing that a client or a model wrote stands before the time."""


class NotResumable(VTokenError):
    """A stream can't go on elsewhere; the message says why.

    Attributes:
        param: the request's field that is the reason, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TokenGroups:
    """Token ids in groups; 8 bytes per token of a stream, whatever its length. Crosses process borders."""

    def __init__(self, groups: Iterable[Iterable[int]] = ()) -> None:
        self._ids, self._ends = array("i"), array("i")
        self.extend(groups)

    def extend(self, groups: Iterable[Iterable[int]]) -> None:
        """Append groups; empty ones count as groups too."""
        for group in groups:
            self._ids.extend(group)
            self._ends.append(len(self._ids))

    @property
    def ids(self) -> list[int]:
        """All token ids in order."""
        return self._ids.tolist()

    @property
    def tokens(self) -> int:
        """Number of token ids."""
        return len(self._ids)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for end in self._ends:
            yield self._ids[start:end].tolist()
            start = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenGroups) and (self._ids, self._ends) == (other._ids, other._ends)

    __hash__ = None  # type: ignore[assignment]  # it changes


@dataclass(frozen=True, slots=True)
class News:
    """What one message of a replica adds to a transcript.

    Attributes:
        groups: token ids since the last message.
        finish: if the generation has ended with them.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a replica begins with a request.

    Attributes:
        request_id: hexadecimal digits of the id that the client sees; the same on every replica.
        groups: what other replicas have generated; empty at first.
        finish: if they have ended the generation.
    """

    request_id: str
    groups: TokenGroups = field(default_factory=TokenGroups)
    finish: Finish | None = None


class Progress:
    """Owner of what one replica has generated for one request, and of what was not reported yet.

    Attributes:
        resume: where it began.
        obstacle: the request's field for which another replica could not go on from the tokens; None if it can.
        tokens: generated in all, by this replica and those before it.
        engine_ids: of the engine's requests for this one of a client; a list of prompts makes several.
    """

    def __init__(self, resume: Resume) -> None:
        self.resume = resume
        self.obstacle: str | None = None
        self.tokens = resume.groups.tokens
        self.engine_ids: list[str] = []
        self._new: list[tuple[int, ...]] = []
        self._finish: Finish | None = None

    def add(self, ids: Iterable[int], finish: Finish | None = None) -> None:
        """The serving layer gets a group of new tokens (zero or more), maybe the last one."""
        group = tuple(ids)
        self.tokens += len(group)
        self._new.append(group)
        self._finish = finish

    def take(self) -> News | None:
        """What is new since the last call; None if nothing is."""
        if not self._new:
            return None
        news = News(tuple(self._new), self._finish)
        self._new = []
        return news


class Transcript:
    """Owner of what a client was sent and of the tokens behind it.

    Attributes:
        request_id: hexadecimal digits of the id that the client sees.
        delivered: chunks that the client was sent.
        obstacle: see Progress; None until a replica has said so.
        ended: whether the client was sent the end of the stream.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.delivered = 0
        self.obstacle: str | None = None
        self.ended = False
        self._groups = TokenGroups()
        self._finish: Finish | None = None
        self._created: str | None = None
        self._sent, self._replayed = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        self._to_replay = 0

    @property
    def tokens(self) -> int:
        """Tokens that are known to be generated."""
        return self._groups.tokens

    def learn(self, news: News | None) -> None:
        """Take what a replica reports, before the chunk that came with it."""
        if news is not None:
            self._groups.extend(news.groups)
            self._finish = news.finish

    def begin(self) -> Resume:
        """A replica is about to get the request: where it must begin.

        Raises:
            NotResumable: the client has seen something, and an obstacle forbids to go on from tokens.
        """
        if self.obstacle is not None:
            if self.delivered:
                raise NotResumable(f"a request with `{self.obstacle}` can't go on from its tokens", self.obstacle)
            self._groups, self._finish = TokenGroups(), None  # nothing was sent: the request starts afresh
        self._to_replay, self._replayed = self.delivered, hashlib.blake2b(digest_size=16)
        return Resume(self.request_id, self._groups, self._finish)

    def deliver(self, chunk: str) -> str | None:
        """What the client is to be sent for an event; None if it was sent that before.

        Raises:
            NotResumable: the replica repeats something else than the client was sent.
        """
        chunk = self._dated(chunk)
        if self._to_replay:
            self._repeat(chunk)
            return None
        self.delivered += 1
        self.ended = chunk == DONE
        self._sent.update(chunk.encode("utf-8", "surrogatepass"))
        return chunk

    def _repeat(self, chunk: str) -> None:
        self._to_replay -= 1
        self._replayed.update(chunk.encode("utf-8", "surrogatepass"))
        if not self._to_replay and self._replayed.digest() != self._sent.digest():
            raise NotResumable(f"the first {self.delivered} events were made anew and differ from those sent")

    def _dated(self, chunk: str) -> str:
        """The event with the time of the first one: all chunks of a stream carry the same."""
        found = _CREATED.match(chunk)
        if found is None:
            return chunk
        if self._created is None:
            self._created = found[2]
        return found[1] + self._created + chunk[found.end() :]
