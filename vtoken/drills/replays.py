"""Whether a resumed transcript is the delivered prefix and what the engine generates from prompt and prefix."""

from __future__ import annotations

import re
from pathlib import Path

from vtoken.drills.traffic import Recording
from vtoken.drills.world import World

LOST = re.compile(r"request ([0-9a-f]{32}) lost \S+ after (\d+) tokens")
"""What the ingress writes into its log at every loss of a replica that had accepted the request."""


def losses(logs: Path) -> dict[str, list[int]]:
    """Request -> tokens that were known at each loss of a replica, in order, as the ingress logged them."""
    found: dict[str, list[int]] = {}
    for path in sorted(logs.glob("serve/*ingress*")):
        for match in LOST.finditer(path.read_text(encoding="utf-8", errors="replace")):
            found.setdefault(match[1], []).append(int(match[2]))
    return found


def digits_of(recording: Recording) -> str:
    """The digits of the id that the chunks of a stream carry."""
    chunks = recording.chunks
    return chunks[0]["id"].partition("-")[2] if chunks else ""


def differences(world: World, recording: Recording, cuts: list[int]) -> list[str]:
    """Where the tokens of a stream are not what the engine generates from its prompt and the tokens before.

    Args:
        world: an undisturbed fleet.
        recording: of a stream with `return_token_ids`.
        cuts: tokens that were known when its replicas were lost.
    """
    prompt, ids = recording.chunks[0]["prompt_token_ids"], recording.token_ids
    wrong = []
    for begin, end in zip(cuts, [*cuts[1:], len(ids)], strict=True):
        if begin < end:
            again = _generated(world, [*prompt, *ids[:begin]], end - begin)
            if again != ids[begin:end]:
                wrong.append(f"{digits_of(recording)}: tokens {begin} to {end}")
    return wrong


def _generated(world: World, prompt: list[int], tokens: int) -> list[int]:
    body = {"model": world.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    answer = world.http.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids
