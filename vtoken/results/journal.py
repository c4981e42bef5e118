"""What a long run has done so far, on disk: interrupted, it goes on where it was when the same command is given again.

One line of JSON per piece of work, behind a first line that says which command, versions and machine they are of.
Pieces of any others are of no use, and are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")
E = TypeVar("E")


@contextmanager
def lazily(start: Callable[[], AbstractContextManager[E]]) -> Iterator[Callable[[], E]]:
    """What `start` gives, entered when first asked for, left whatever happens; pieces that are kept never ask."""
    with ExitStack() as stack:
        yield cache(lambda: stack.enter_context(start()))


def on(started: Callable[[], E], work: Callable[..., T], *arguments: Any) -> Callable[[], T]:
    """A piece of work: `work(started(), *arguments)`."""
    return lambda: work(started(), *arguments)


class Journal:
    """Pieces of work by key, and a progress bar over them.

    Args:
        path: of the file; None keeps nothing.
        header: what must be the same for kept pieces to count, JSON-ready.
        console: where progress is shown.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any], console: Console) -> None:
        self._path, self._console = path, console
        self._header = json.dumps(header, sort_keys=True)
        self._done = self._read()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=None)

    def begin(self, pieces: int) -> None:
        """So many pieces there will be; those of an interrupted run are among them. Progress is shown from now on."""
        self._progress.update(self._task, total=pieces)
        self._progress.start()
        if self._done:
            self._console.log(f"{len(self._done)} of {pieces} pieces are kept from an interrupted run")

    def __contains__(self, key: str) -> bool:
        """Whether a piece is done."""
        return key in self._done

    def of(self, key: str, work: Callable[[], T], encode: Callable[[T], Any], decode: Callable[[Any], T]) -> T:
        """What `work` returns, or has returned under this key; kept as JSON, by `encode` and `decode`."""
        self._progress.update(self._task, description=key)
        if key not in self._done:
            line = json.dumps({"key": key, "piece": encode(work())})
            self._append(line)
            self._done[key] = json.loads(line)["piece"]  # as it will be read, should it be needed again
        self._progress.advance(self._task)
        return decode(self._done[key])

    def forget(self) -> None:
        """The run is complete: its pieces are in its result."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.is_file():
            return {}
        first, *rest = self._path.read_text(encoding="utf-8").splitlines() or [""]
        if first != self._header:
            self._path.unlink()
            self._console.log(f"{self._path.name} is of another command, version or machine, and is dropped")
            return {}
        found: dict[str, Any] = {}
        for line in rest:
            try:
                entry = json.loads(line)
            except ValueError:  # its end was lost with the process that wrote it
                self._path.write_text("\n".join([first, *rest[: len(found)], ""]), encoding="utf-8")
                break
            found[entry["key"]] = entry["piece"]
        return found

    def _append(self, line: str) -> None:
        if self._path is None:
            return
        if not self._path.is_file():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self._header + "\n", encoding="utf-8")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
