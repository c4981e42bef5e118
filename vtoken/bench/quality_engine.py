"""An engine that is asked for quality: one request at a time, in chunks, under a policy of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtoken.bench.quality_scores import Surprises
from vtoken.bench.quality_texts import CHUNK_TOKENS, Needle
from vtoken.core.config import VTokenConfig
from vtoken.engine.offline import Completion, OfflineEngine

ANSWER_TOKENS = 12
"""Generated after a needle's question: a space, the digits and some room."""

ENGINE: dict[str, Any] = {
    "dtype": "float32", "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": CHUNK_TOKENS,
    "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 29, "seed": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A policy and the share of tokens that it keeps."""

    policy: str
    ratio: float = 1.0

    def prefill(self) -> dict[str, Any]:
        """Options under which a prompt is evicted after every chunk."""
        return self._options(between_chunks=True)

    def decode(self) -> dict[str, Any]:
        """Options under which a short prompt's answer is evicted, often and close to its end."""
        return self._options(interval_tokens=16, protect_recent=16)

    def _options(self, **options: Any) -> dict[str, Any]:
        return {"policy": self.policy, **({} if self == FULL_CACHE else {"keep_ratio": self.ratio, **options})}

    def __str__(self) -> str:
        return self.policy if self == FULL_CACHE else f"{self.policy} at {self.ratio}"


FULL_CACHE = Case("none")


class QualityEngine(OfflineEngine):
    """An OfflineEngine that answers with log-probabilities and texts.

    Attributes:
        kept: share of the tokens of the last prompt, or of prompts answered together, and of their answers, that
            was not evicted: more than asked for where tokens are protected or a policy forgets less.
        live: token ids that were live at the end of it; of one of the prompts answered together.
    """

    kept = 1.0
    live: tuple[int, ...] = ()

    def surprises(self, texts: Sequence[list[int]], case: Case) -> Surprises:
        """Of every token behind the first chunk's and its successor, which the full cache predicts in every case."""
        return [self.read(text, case, 1)[0] for text in texts]

    def read(self, text: list[int], case: Case, tokens: int) -> tuple[Any, tuple[int, ...]]:
        """Surprises of one text, and `tokens` tokens that the model adds."""
        output = self._ask([text], case.prefill(), max_tokens=tokens, prompt_logprobs=0)[0]
        places = range(CHUNK_TOKENS + 1, len(text))
        surprises = [-output.prompt_logprobs[place][text[place]].logprob for place in places]
        return np.array(surprises, np.float64), tuple(output.outputs[0].token_ids)

    def recall(self, needles: Sequence[Needle], case: Case) -> list[bool]:
        """Which needles are found."""
        return [needle.found_in(self.answer(needle, case).text) for needle in needles]

    def answer(self, needle: Needle, case: Case) -> Completion:
        """What the model says to a needle's question."""
        output = self._ask([needle.prompt], case.prefill(), max_tokens=ANSWER_TOKENS)[0]
        return Completion(output.outputs[0].text, tuple(output.outputs[0].token_ids))

    def chat(self, prompts: Sequence[list[int]], case: Case, tokens: int) -> list[str]:
        """Answers to chat prompts, `tokens` tokens each, all generated together."""
        outputs = self._ask(prompts, case.decode(), max_tokens=tokens, ignore_eos=True)
        return [output.outputs[0].text for output in outputs]

    def _ask(self, prompts: Sequence[list[int]], options: Mapping[str, Any], **sampling: Any) -> list[Any]:
        """vLLM's RequestOutputs."""
        names = [self.add(prompt, extra_args={"vtoken": dict(options)}, **sampling) for prompt in prompts]
        evicted, done = self.snapshots.snapshot().tokens_evicted_total, dict[str, Any]()
        while self.busy:
            done |= {output.request_id: output for output in self.advance()}
        self.live = tuple(next(iter(self.worker("vtoken_rows").values()))["live"])
        evicted = self.settle().tokens_evicted_total - evicted
        tokens = sum(len(one.prompt_token_ids) + len(one.outputs[0].token_ids) for one in done.values())
        self.kept = 1 - evicted / tokens
        return [done[name] for name in names]


@contextmanager
def quality_engine(model: str, config: Mapping[str, Any], longest_tokens: int) -> Iterator[QualityEngine]:
    """An engine for texts of up to `longest_tokens`, closed whatever happens."""
    room = longest_tokens + 2 * CHUNK_TOKENS
    blocks = max(room, 4096) // ENGINE["block_size"] + 64
    settings = VTokenConfig.from_mapping(config)
    running = QualityEngine(model, settings, **ENGINE, max_model_len=room, num_gpu_blocks_override=blocks)
    try:
        yield running
    finally:
        running.close()
