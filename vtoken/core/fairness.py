"""Who is next among the keys of one class: start-time fair queueing by weight. Pure.

Every key has a tag, the tokens that it has been served divided by its weight; the waiting key with the smallest tag
is next, and within a key it is first come, first served. A key that comes after a pause starts where the others
are, so that nobody saves up turns by staying away. While two keys both wait, what they are served differs,
per weight, by at most one request of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Key:
    tag: float
    weight: float
    waiting: dict[int, int] = field(default_factory=dict)  # item -> tokens, in order of arrival


class FairQueue:
    """Owner of the order among the waiting items of one class."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._left: dict[str, float] = {}  # tags of keys that wait no more, while they are ahead of `_now`
        self._now = 0.0

    def enter(self, item: int, name: str, tokens: int, weight: float) -> None:
        """An item of key `name` that will cost `tokens` waits; a new `weight` (above 0) of the key holds at once."""
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key(max(self._now, self._left.pop(name, self._now)), weight)
        key.weight = weight
        key.waiting[item] = max(1, tokens)

    def head(self) -> int | None:
        """The item whose turn it is; equal tags go by who waits longer (items are numbered in order of arrival)."""
        if not self._keys:
            return None
        key = min(self._keys.values(), key=lambda key: (key.tag, next(iter(key.waiting))))
        return next(iter(key.waiting))

    def serve(self, item: int, name: str) -> None:
        """An item is served, in its turn or out of it: its key pays for it."""
        key = self._keys[name]
        if item == self.head():
            self._now = max(self._now, key.tag)
        key.tag += key.waiting[item] / key.weight
        self.drop(item, name)

    def drop(self, item: int, name: str) -> None:
        """An item waits no more; its key pays nothing."""
        key = self._keys[name]
        del key.waiting[item]
        if key.waiting:
            return
        del self._keys[name]
        self._left[name] = key.tag
        self._forget()

    def _forget(self) -> None:
        """Tags that say nothing any more: those behind the others, and all once nobody waits."""
        if not self._keys:
            self._left.clear()
            self._now = 0.0
            return
        self._left = {name: tag for name, tag in self._left.items() if tag > self._now}
