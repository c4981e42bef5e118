"""Errors of the device layer.

VTokenError
+-- UnsupportedError         (core) a cache layout, dtype or machine that we refuse to guess about
+-- DeviceError              base of everything below
    +-- BadSlots             slots or row tables that cannot be right; nothing has been read or written (fault: us)
    +-- CopyCancelled        the ticket was cancelled before its copy began; nothing has been written
    +-- CopyFailed           the copy broke half way; destinations are undefined, sources are intact
    +-- EngineStateError     a verb out of order: copy before bind, submit before start
"""

from __future__ import annotations

from vtoken.core.errors import VTokenError


class DeviceError(VTokenError):
    """Base of the errors that the device layer raises on purpose."""


class BadSlots(DeviceError):
    """Slots or row tables contradict the cache or each other. Nothing has been read or written."""


class CopyCancelled(DeviceError):
    """The ticket was cancelled before its copy began. Nothing has been written."""


class CopyFailed(DeviceError):
    """The copy broke while running: its destinations are undefined, its sources are intact."""


class EngineStateError(DeviceError):
    """A verb was called out of order, for example `copy` before `bind`."""
