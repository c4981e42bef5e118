"""The one error of this package."""

from __future__ import annotations

from vtoken.core.errors import VTokenError


class ModelError(VTokenError):
    """A model could not be prepared; the target directory is as it was before."""
