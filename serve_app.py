"""Composition root: what `serve run` and Serve config files import as `serve_app:build_app`."""

from __future__ import annotations

from typing import Any

from vtoken.environment import check_environment
from vtoken.serving.application import Application, build_application
from vtoken.serving.settings import DeploymentSettings


def build_app(args: dict[str, Any]) -> Application:
    """The application for the `args` of a Serve config file (or `key=value` of `serve run`).

    Raises:
        ConfigError: a setting is wrong; nothing has been started.
        UnsupportedError: this Python environment holds a package that breaks the stack.
    """
    check_environment()
    return build_application(DeploymentSettings.from_args(args))
