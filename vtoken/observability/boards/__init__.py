"""The four boards, in the order of their links."""

from __future__ import annotations

from vtoken.observability.boards import admission, fleet, gpu, reclamation

BOARDS = (fleet.BOARD, reclamation.BOARD, admission.BOARD, gpu.BOARD)
