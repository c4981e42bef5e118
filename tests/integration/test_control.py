"""What a request's own options do to its memory and its text, on the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_chunks import long_prompts
from tests.integration.test_engine import Watch, engine, prompts
from vtoken.engine.offline import Completion, OfflineEngine

pytestmark = pytest.mark.integration

SIZE, CHUNK, PROMPT = 16, 64, 200
CHUNKED = {"max_num_batched_tokens": CHUNK, "enable_chunked_prefill": True, "max_num_seqs": 4}
LONG = {"dtype": "bfloat16", "num_gpu_blocks_override": 1 + 15, "max_model_len": 2048, **CHUNKED}
OPTIONS = {"policy": "streaming_llm", "interval_tokens": 16, "protect_recent": 16}


def test_generation_goes_on_for_ever_in_memory_that_does_not_grow(model_dir: Path) -> None:
    """1,500 tokens in a pool of 15 blocks: the request lies in nine or ten from its first decision to its end."""
    policy = {**OPTIONS, "budget_tokens": 128, "between_chunks": True}
    watch = Watch()
    with engine(model_dir, {"policy": policy}, **LONG) as one:
        (done,) = one.run(long_prompts(1, PROMPT), watch, max_tokens=1500, ignore_eos=True)
    assert len(done.token_ids) == 1500
    held = [shot.capacity_blocks - shot.free_blocks for shot in watch.seen if shot.running_requests]
    assert len(held) > 1500
    early, late = set(held[10:750]), set(held[750:])
    assert early == late
    assert early <= {blocks(128 + 1), blocks(128 + 16 + 1)}
    assert max(held) <= 15
    assert watch.seen[-1].preemptions_total == 0


def blocks(tokens: int) -> int:
    """That hold so many tokens; a decision comes when the block of one more has been given."""
    return -(-tokens // SIZE)


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[OfflineEngine]:
    with engine(model_dir, {"score_layers": 1}, num_gpu_blocks_override=200, **CHUNKED) as one:
        yield one


def lived(running: OfflineEngine, prompt: str, **options: Any) -> tuple[Completion, int, int]:
    """What a prompt becomes under some options; most live tokens and most blocks that it then had while decoding."""
    watch, before = Watch(), running.settle()
    extra = {"vtoken": {**OPTIONS, **options}} if options else {}
    (done,) = running.run([prompt], watch, max_tokens=160, ignore_eos=True, extra_args=extra)
    decided = [shot for shot in watch.seen if shot.tokens_evicted_total > before.tokens_evicted_total or not options]
    busy = [shot for shot in decided if shot.running_requests] or [before]
    return done, max(s.live_tokens for s in busy), max(s.capacity_blocks - s.free_blocks for s in busy)


def test_a_budget_shows_in_live_tokens_blocks_and_text(running: OfflineEngine) -> None:
    (prompt,) = prompts(1)
    texts = set()
    for budget in (40, 80):
        done, live, held = lived(running, prompt, budget_tokens=budget)
        texts.add(done.text)
        assert budget < live <= budget + 16
        assert blocks(budget) <= held <= blocks(budget + 16 + 1)
    done, live, held = lived(running, prompt)
    assert live > 160
    assert held > 10
    assert len({*texts, done.text}) == 3


def test_what_fits_in_its_budget_is_untouched(running: OfflineEngine) -> None:
    before = running.settle()
    (prompt,) = prompts(1)
    assert lived(running, prompt, budget_tokens=300)[0] == lived(running, prompt)[0]
    after = running.settle()
    assert (after.tokens_evicted_total, after.moves_total) == (before.tokens_evicted_total, before.moves_total)


def first_steps(running: OfflineEngine, **options: Any) -> list[tuple[int, int, int]]:
    """Tokens, live tokens and blocks after each of five steps: four chunks of a prompt, and one token more."""
    extra = {"vtoken": {**OPTIONS, "budget_tokens": 64, **options}}
    name = running.add(long_prompts(1, PROMPT)[0], max_tokens=4, ignore_eos=True, extra_args=extra)
    found = []
    for _ in range(5):
        running.advance()
        (row,) = running.worker("vtoken_rows").values()
        found.append((row["total"], len(row["live"]), len(row["blocks"])))
    running.abort([name])
    running.settle()
    return found


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "key_norm"])
def test_a_prompt_is_evicted_right_behind_it(running: OfflineEngine, policy: str) -> None:
    """Whole while it is computed and for its first answered token; in the step of the second, down to its budget."""
    whole, evicted = [(64, 64, 4), (128, 128, 8), (192, 192, 12), (200, 200, 13)], (201, 65, 5)
    assert first_steps(running, policy=policy) == [*whole, evicted]


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "key_norm"])
def test_between_chunks_a_prompt_is_evicted_after_each_of_them(running: OfflineEngine, policy: str) -> None:
    found = first_steps(running, policy=policy, between_chunks=True)
    assert found == [(64, 64, 4), (128, 64, 4), (192, 64, 4), (200, 64, 4), (201, 65, 5)]
