"""Grafana's API through grafana-api 1.0.3, with that library's faults fenced in.

- an empty 200 or 204 is decoded as JSON and fails: it is an answer here
- an error body that is a list makes it raise TypeError: it is a refusal here
- identifiers are put into paths as they are: only UID is let through
- it speaks plain http by default: a token leaves this machine over https only
- nothing is tried again: a push is, as a whole, because it writes only what differs

The token is in no message, log line or repr of this module.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from vtoken.core.checks import LOOPBACK
from vtoken.core.errors import ConfigError, VTokenError
from vtoken.observability.grafana_json import UID

TIMEOUT_S = 15.0
PROVENANCE = {"X-Disable-Provenance": "true"}
"""So that an alert rule stays editable in Grafana, and by the next push."""


class GrafanaError(VTokenError):
    """Grafana can't be reached or refuses.

    Attributes:
        status: HTTP status, or None where there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def check_uid(uid: str) -> str:
    """The identifier, if it can stand in a path.

    Raises:
        GrafanaError: it cannot.
    """
    if not UID.fullmatch(uid):
        raise GrafanaError(f"uid {uid[:60]!r} is not of the form {UID.pattern}")
    return uid


class Grafana:
    """A server and a token for it. Every method raises GrafanaError.

    Args:
        url: such as https://grafana.example.org/prefix.
        token: of a service account; Editor is enough but for the data source, which wants Admin.
    """

    def __init__(self, url: str, token: str) -> None:
        parts = _checked(url)
        self._shown = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        prefix = parts.path.strip("/")
        try:
            from grafana_api.grafana_face import GrafanaFace
        except ImportError:
            raise GrafanaError("the package grafana-api is not installed: pip install 'vtoken[dashboards]'") from None
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        self._api = GrafanaFace(
            auth=token, host=host, port=parts.port, protocol=parts.scheme,
            url_path_prefix=f"{prefix}/" if prefix else "", timeout=TIMEOUT_S,
        ).api  # fmt: skip

    def __repr__(self) -> str:
        return f"Grafana({self._shown})"

    def get(self, path: str) -> Any:
        """The JSON at a path; None where there is nothing (404)."""
        try:
            return self._ask("GET", path)
        except GrafanaError as error:
            if error.status == 404:
                return None
            raise

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """Change something: POST, PUT or DELETE; the answer's JSON, or None when it is empty."""
        return self._ask(method, path, body, headers)

    def _ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        answers: list[Any] = []
        self._api.s.hooks["response"] = [lambda response, *_, **__: answers.append(response)]
        try:
            return getattr(self._api, method)(path, json=body, headers=headers)
        except Exception as error:  # noqa: BLE001  # requests', grafana-api's own, and the TypeError of its fault
            refusal = self._judged(method, path, answers, error)
        if refusal is not None:
            # Outside of the handler: a chained exception would carry the request, and with it the token.
            raise refusal
        return None

    def _judged(self, method: str, path: str, answers: list[Any], error: Exception) -> GrafanaError | None:
        where = f"{method} {path} at {self._shown}"
        if not answers:
            return GrafanaError(f"{where}: no answer ({type(error).__name__})")
        answer = answers[-1]
        if answer.status_code < 300 and not answer.content.strip():
            return None
        if answer.status_code < 400:
            return GrafanaError(f"{where}: answered {answer.status_code}, and not in JSON", answer.status_code)
        return GrafanaError(f"{where}: refused with {answer.status_code} {_message(answer)}", answer.status_code)


def _checked(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
        raise ConfigError("--url", parts._replace(netloc=parts.hostname or "").geturl(), "https://HOST[:PORT][/PREFIX]")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ConfigError("--url", f"http://{parts.hostname}", "https: a token must not travel in the clear")
    return parts


def _message(answer: Any) -> str:
    """Grafana's own words, if it says any; never more than a line."""
    try:
        body = answer.json()
    except ValueError:
        return ""
    first = body[0] if isinstance(body, list) and body else body
    message = first.get("message") if isinstance(first, dict) else None
    return " ".join(str(message).split())[:200] if message else ""
