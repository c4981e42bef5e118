"""Which kernel reads rows strictly: by what the layers' backend is and can, once; and what is tried on a card first."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from tests.device.slow_flash import slow_flash
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.event_model import SimulatedStreams, compute_first
from vtoken.engine import strict_readers
from vtoken.engine.strict_readers import FlashReader, TritonReader, choose_reader, trial

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def spec(dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    return SimpleNamespace(block_size=16, num_kv_heads=2, head_size=16, dtype=dtype)


def choose(version: int | None, layout: str | None, dtype: torch.dtype = torch.bfloat16, device=CPU):
    streams = SimulatedStreams(compute_first)
    lists = HeldLists(streams, 4, 16)
    streams.device = device
    return choose_reader(streams, lists, 4, 16, spec(dtype), 4, version, layout)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's is only there where CUDA is, and a reader for a card is made here on the CPU."""
    monkeypatch.setattr(strict_readers, "_flash", lambda: slow_flash)
    monkeypatch.setattr(strict_readers, "FlashReader", lambda streams, *given: FlashReader(
        SimulatedStreams(compute_first), *given))  # fmt: skip
    monkeypatch.setattr(strict_readers, "TritonReader", lambda streams, *given: TritonReader(
        SimulatedStreams(compute_first), *given))  # fmt: skip


@pytest.mark.parametrize(("version", "layout", "dtype", "reason"), [
    (3, "LBNHC", torch.bfloat16, ""), (3, "LHBNC", torch.float16, ""),
    (3, "LBNHC", torch.float32, "does not read torch.float32"),
    (2, "LBNHC", torch.float16, "FlashAttention 2 takes no pages"),
    (4, "LBNHC", torch.float16, "FlashAttention 4 takes no pages"),
    (None, "LBNHC", torch.float16, "backend is not FlashAttention"),
    (3, "BLNHC", torch.float16, "it is BLNHC"), (3, None, torch.float16, "it is None"),
])  # fmt: skip
def test_flash_attention_reads_where_it_takes_pages_of_one_token_and_the_log_says_why_not(
    version, layout, dtype, reason, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.vtoken"):
        reader = choose(version, layout, dtype)
    assert type(reader) is (TritonReader if reason else FlashReader)
    assert (reason or "by FlashAttention 3, with pages of one token") in caplog.text


@pytest.mark.parametrize("wrong", ["", "it fails: no such kernel"])
def test_on_a_card_it_is_tried_first(wrong, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(strict_readers, "trial", lambda *given: wrong)
    with caplog.at_level(logging.WARNING, "vllm.vtoken"):
        reader = choose(3, "LBNHC", device=CARD)
    assert type(reader) is (TritonReader if wrong else FlashReader)
    assert wrong in caplog.text
    assert bool(wrong) == ("is not used" in caplog.text)


def slow_triton(query, cache, rows, scale, out, soft_cap, count) -> None:
    """What the Triton kernel does for so many query tokens, one by one."""
    for token, begin, visible in zip(*(part[:count].tolist() for part in (rows.tokens, rows.begin, rows.visible)),
                                     strict=True):  # fmt: skip
        slots = rows.lists.table.view(-1)[begin : begin + visible].long()
        keys, values = cache[slots // 16, :, slots % 16].double().repeat_interleave(2, 1).split(16, -1)
        share = (torch.einsum("hd,nhd->hn", query[token].double(), keys) * scale).softmax(-1)
        out[token] = torch.einsum("hn,nhd->hd", share, values)


def refusing(**given) -> None:
    raise RuntimeError("pages of 16 tokens only")


def of_the_next_row(**given) -> None:
    slow_flash(**{**given, "block_table": given["block_table"].roll(1, 0)})


def of_few_keys(**given) -> None:
    slow_flash(**{**given, "seqused_k": (given["seqused_k"] - 40).clamp(min=0)})


@pytest.mark.parametrize(("kernel", "problem"), [
    (slow_flash, ""), (refusing, "it fails: pages of 16 tokens only"), (of_the_next_row, "it differs from the Triton"),
    (of_few_keys, "it differs from the Triton"), (lambda **given: given["out"].fill_(float("nan")), "by nan"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_trial_says_what_is_wrong_with_a_kernel(kernel, problem, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_readers.triton_reader, "attend", slow_triton)
    found = trial(SimulatedStreams(compute_first), spec(dtype), 4, 3, kernel)
    assert problem in found
    assert bool(problem) == bool(found)
