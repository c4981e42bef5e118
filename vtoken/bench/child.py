"""An object in a process of its own, whose methods are called through a pipe.

Several children can be asked at once, or in turn; one that is not asked sleeps and costs nothing. A child ends
with its parent.

Children are forked from one server process that has imported what they share. So siblings have their modules at
the same addresses and hash strings alike, which otherwise makes two runs of one Python program differ by per cents;
and they start in seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from vtoken.core.errors import VTokenError

END_TIMEOUT_S = 10.0
"""How long a child may take to end by itself."""


class ChildDied(VTokenError):
    """A child process ended where an answer was expected."""


class Child:
    """One process that builds `factory(*arguments)` and then answers calls, in order.

    Args:
        factory, arguments: picklable; the process starts at once, the object is built meanwhile.
        preload: modules that the server imports. It starts with the first child of a program, and then with the
            environment of that moment.
    """

    def __init__(self, factory: Callable[..., Any], *arguments: Any, preload: Sequence[str] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call; `answer` must follow."""
        with contextlib.suppress(BrokenPipeError):  # `answer` says what happened
            self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """The result of the call that was begun.

        Raises:
            ChildDied: the call failed; its traceback stands on standard error.
        """
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(END_TIMEOUT_S)
            raise ChildDied(
                f"process {self._process.pid} ended with status {self._process.exitcode} in the middle of a "
                "measurement; its own message stands above."
            ) from None

    def call(self, method: str, *arguments: Any) -> Any:
        """`ask`, then `answer`."""
        self.ask(method, *arguments)
        return self.answer()

    def close(self) -> None:
        """End the process; also in the middle of a call."""
        self._pipe.close()
        self._process.join(END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(pipe: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer calls until the parent closes its end, or is gone."""
    served = factory(*arguments)
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            method, given = pipe.recv()
            pipe.send(getattr(served, method)(*given))
