"""StreamingLLM: attention sinks and a recent window (Xiao et al., ICLR 2024, section 3.2)."""

from __future__ import annotations

from vtoken.core.policies.base import Ints, RequestView


class StreamingLLM:
    """Forgets the oldest tokens that are not protected sinks."""

    def select(self, view: RequestView) -> Ints:
        """The `excess` oldest candidates."""
        return view.candidates[: view.excess]
