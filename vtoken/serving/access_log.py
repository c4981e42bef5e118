"""The access log: one JSON object per request, on the logger `vtoken.access`. Never a prompt, a key or a body.

What a client may write freely gets in at one place only, the request id, and only if it looks like one. The route is
the template that matched, not the path; the key is its name; `code` is a word or an HTTP status.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from dataclasses import asdict, dataclass
from logging.handlers import WatchedFileHandler

from vtoken.core.errors import ConfigError
from vtoken.serving.limits import REQUEST_ID

logger = logging.getLogger("vtoken.access")

WORD = re.compile(r"[A-Za-z0-9_]{1,64}")


@dataclass(frozen=True, slots=True)
class AccessLogSettings:
    """Where the access log goes (`access_log` of a deployment).

    Attributes:
        enabled: off writes nothing.
        file: to append to, on the machine of each ingress; it may be rotated by renaming. None: standard output of the
            ingress process, which Ray keeps with its other logs.
    """

    enabled: bool = True
    file: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError("enabled", self.enabled, "true or false")
        if self.file is not None and (not isinstance(self.file, str) or not self.file):
            raise ConfigError("file", self.file, "a path")


@dataclass(slots=True)
class AccessRecord:
    """One line.

    Attributes:
        time: of the request's arrival, UTC.
        request_id: `x-request-id` of the answer.
        key: name of the API key; empty if there was none that is valid.
        method, route: of the request; the route as a template.
        status: of the answer; 499 if the client left before there was one.
        code: of the error object, of an error event in a stream, or None. The engine's own errors
            have an HTTP status there.
        stream: whether server-sent events were sent.
        prompt_tokens: estimated from the length of the text, exact for token ids; 0 if the request was not read.
        completion_tokens: as the engine counted them; in a stream without `usage`, the events with content.
        wait_ms: in the gate's line.
        ttft_ms: from arrival to the first byte of the answer's body; None without one.
        total_ms: from arrival to the end.
        replica: that served the request (the last one), or None.
    """

    time: str
    request_id: str | None = None
    key: str = ""
    method: str = ""
    route: str = ""
    status: int = 499
    code: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    wait_ms: float = 0.0
    ttft_ms: float | None = None
    total_ms: float = 0.0
    replica: str | None = None

    def to_line(self) -> str:
        """The JSON text of it."""
        return json.dumps(asdict(self), separators=(",", ":"))


def utc_now() -> str:
    """The time as a log line has it.

    >>> len(utc_now())
    24
    """
    now_s = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s % 1 * 1000):03d}Z"


def safe_request_id(raw: str | None) -> str | None:
    """The id if it looks like one, else None."""
    return raw if raw is not None and REQUEST_ID.fullmatch(raw) else None


def safe_code(raw: object) -> str | None:
    """An error object's code if it is a word or, as the engine's own, an HTTP status; else None.

    >>> safe_code("engine"), safe_code(500), safe_code("a b")
    ('engine', '500', None)
    """
    text = str(raw) if type(raw) is int and 100 <= raw < 600 else raw
    return text if isinstance(text, str) and WORD.fullmatch(text) else None


def open_log(settings: AccessLogSettings) -> None:
    """Direct the logger; once in each ingress process. Calling it again redirects.

    Raises:
        ConfigError: the file can't be written.
    """
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    logger.setLevel(logging.INFO if settings.enabled else logging.CRITICAL)
    if not settings.enabled:
        return
    logger.addHandler(_handler(settings.file))


def _handler(file: str | None) -> logging.Handler:
    if file is None:
        handler: logging.Handler = logging.StreamHandler(sys.stdout)
    else:
        try:
            handler = WatchedFileHandler(file, encoding="utf-8")
        except OSError as error:
            raise ConfigError("access_log.file", file, "a file that can be written", f"{error.strerror}.") from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
