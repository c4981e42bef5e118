"""What a request has come to so far, so that another replica can go on with it. Pure.

    engine ── groups of token ids ──► Progress ── news with every chunk ──► Transcript ── Resume ──► another engine
             (replica process)                      (ingress process)

A *group* is the token ids that the engine handed to its serving layer at once. The text of a stream's events is a
function of the request and its groups, so an engine that is given the same groups again makes the same events. Those
that the client has seen stay in the replica, which sends their fingerprint instead.
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
"""Begin of an event; nothing that a client or a model wrote stands before the time."""


class NotResumable(VTokenError):
    """A stream can't go on elsewhere; the message says why.

    Attributes:
        param: the request's field that is the reason, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Fingerprint:
    """Owner of a digest of a stream's events in their order; the time in them does not count."""

    def __init__(self) -> None:
        self.events = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, event: str) -> None:
        """The next event."""
        self.events += 1
        self._hash.update(_CREATED.sub(r"\1", event).encode("utf-8", "surrogatepass"))

    @property
    def hex(self) -> str:
        """Equal for equal events only."""
        return self._hash.hexdigest()


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
        delivered: events of a stream that the client was sent.
    """

    request_id: str
    groups: TokenGroups = field(default_factory=TokenGroups)
    finish: Finish | None = None
    delivered: int = 0


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
        obstacle: see Progress; None until a replica has said so.
        ended: whether the client was sent the end of the stream.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.obstacle: str | None = None
        self.ended = False
        self._groups = TokenGroups()
        self._finish: Finish | None = None
        self._created: str | None = None
        self._sent = Fingerprint()
        self._unproven = False

    @property
    def tokens(self) -> int:
        """Tokens that are known to be generated."""
        return self._groups.tokens

    @property
    def delivered(self) -> int:
        """Events that the client was sent."""
        return self._sent.events

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
        self._unproven = self.delivered > 0
        return Resume(self.request_id, self._groups, self._finish, self.delivered)

    def check(self, fingerprint: str) -> None:
        """A further replica has made the delivered events anew, and says what they come to.

        Raises:
            NotResumable: to something else than the client was sent.
        """
        self._unproven = fingerprint != self._sent.hex
        if self._unproven:
            raise NotResumable(f"the first {self.delivered} events were made anew and differ from those sent")

    def deliver(self, event: str) -> str:
        """The next event, as the client is to be sent it.

        Raises:
            NotResumable: the replica has not shown that it goes on where the client is.
        """
        if self._unproven:
            raise NotResumable(f"events came before the {self.delivered} that were sent were made anew")
        event = self._dated(event)
        self.ended = event == DONE
        self._sent.add(event)
        return event

    def _dated(self, event: str) -> str:
        """The event with the time of the first one: all events of a stream carry the same."""
        found = _CREATED.match(event)
        if found is None:
            return event
        if self._created is None:
            self._created = found[2]
        return found[1] + self._created + event[found.end() :]
