"""One call to every replica of a deployment, each answer as it comes.

Of Ray Serve 2.60's own broadcast, two things are not enough:

- at a replica that has `max_ongoing_requests`, the call waits until a request ends;
- `results_async` gives no answer while one is missing, so a full or hung replica would cost all the others.

Hence a time limit for each replica, and the one private method that gives the results one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any


async def broadcast(handle: Any, method: str, *arguments: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
    """Yields each replica's value, or the exception that it came to; a single exception if none can be asked.

    Closing it early cancels the calls that are still under way.
    """
    try:
        call = handle.broadcast(method, *arguments)
        results = await asyncio.wait_for(call._fetch_replica_results_async(), timeout_s)
    except Exception as error:  # noqa: BLE001  # whatever Serve raises is the answer
        yield error
        return
    answers = [asyncio.create_task(_answer(result, timeout_s)) for result in results]
    try:
        for answer in asyncio.as_completed(answers):
            yield await answer
    finally:
        for task in answers:
            task.cancel()


async def _answer(result: Any, timeout_s: float) -> Any:
    answered = False
    try:
        value = await asyncio.wait_for(result.get_async(), timeout_s)
        answered = True
    except Exception as error:  # noqa: BLE001  # whatever the replica or Serve raises is the answer
        return error
    finally:
        if not answered:
            result.cancel()  # it may still wait for its turn
    return value
