"""The worker process's one Substrate: where vLLM's separately built parts find it.

vLLM constructs worker, connector and attention backend independently of each other; this module is
the one place where they meet. Owned by the worker, which attaches and detaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken.core.errors import UnsupportedError

if TYPE_CHECKING:
    from vtoken.engine.substrate import Substrate


@dataclass(slots=True)
class _Session:
    substrate: Substrate | None = None


_session = _Session()


def attach(substrate: Substrate) -> None:
    """Make `substrate` the process's own (replacing an earlier engine's)."""
    _session.substrate = substrate


def detach(substrate: Substrate) -> None:
    """Forget `substrate` if it is the attached one."""
    if _session.substrate is substrate:
        _session.substrate = None


def current() -> Substrate:
    """The attached substrate.

    Raises:
        UnsupportedError: no vToken worker runs in this process: the engine was half configured.
    """
    if _session.substrate is None:
        raise UnsupportedError(
            "vToken did not engage: the connector is configured but the worker class is not ours. "
            "Set worker_cls as vtoken.engine.args does (vllm serve: --worker-cls)."
        )
    return _session.substrate
