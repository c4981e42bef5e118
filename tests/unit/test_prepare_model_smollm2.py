"""The prepared SmolLM2-135M-Instruct speaks English, and its tokenizer is the one the model was trained with."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex

from vtoken.models import prepare_smollm2
from vtoken.models.wheel import sha256_of

# Made on one machine, expected on every other: the conversion is exact arithmetic in a fixed order.
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
TOKENIZER_SHA256 = "7d27c493c729a66ecefc837280b05d948b1ed50d130eebdbf911b1b36cf38ed7"

PARAGRAPH = (
    "The old lighthouse stood at the edge of the cliff, and every evening the keeper climbed the stairs to light the "
    "lamp. Ships passing in the dark could see it from many miles away. When the storm came, he stayed awake all night "
    "to make sure that the light never went out, because he knew that the lives of the sailors depended on it."
)
TEXTS = [
    PARAGRAPH,
    "x = 3.14159 * 1024  # two  spaces,\ttab\r\nand a new line\n\n\n  indented",
    "Grüße aus Köln, naïve café, 東京, Привет, 🙂👩‍👩‍👧, \u00a0no-break, \x00 zero byte",
    "don't they're I'LL we've '  trailing   ",
    "",
]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def test_bytes_are_the_same_on_every_machine(model_dir: Path) -> None:
    assert sha256_of(model_dir / "model.safetensors") == WEIGHTS_SHA256
    assert sha256_of(model_dir / "tokenizer.json") == TOKENIZER_SHA256


def test_preparing_again_finds_nothing_to_do(model_dir: Path) -> None:
    before = (model_dir / "model.safetensors").stat().st_mtime_ns
    assert not prepare_smollm2(model_dir)
    assert (model_dir / "model.safetensors").stat().st_mtime_ns == before


# ---- The model ------------------------------------------------------------------------------------------------------


def test_logits_are_finite_and_english_is_likely(model: Any, tokenizer: Any) -> None:
    """With the rotary rows in the wrong order the perplexity is in the thousands; as it should be, about 15."""
    import torch

    ids = tokenizer(PARAGRAPH, return_tensors="pt").input_ids
    with torch.no_grad():
        output = model(ids, labels=ids)
    assert torch.isfinite(output.logits).all()
    assert output.loss.exp().item() < 40


def test_the_capital_of_france(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(ids[0, -1:]) == " Paris"


def test_a_chat_turn_ends_by_itself(model: Any, tokenizer: Any) -> None:
    """The end-of-turn token is among the stop tokens of the generation config."""
    messages = [{"role": "user", "content": "What is the capital of Italy? Answer with one word."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert "Rome" in tokenizer.decode(ids)
    assert tokenizer.decode(ids[-1:]) == "<|im_end|>"


# ---- The tokenizer --------------------------------------------------------------------------------------------------


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    assert tokenizer("<|im_start|>user\nHi<|im_end|><|endoftext|>").input_ids[0] == 1
    assert tokenizer("<|im_start|>user\nHi<|im_end|><|endoftext|>").input_ids[-2:] == [2, 0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_a_textbook_encoder(tokenizer: Any, model_dir: Path, text: str) -> None:
    vocab, ranks = _vocabulary(model_dir)
    words = [word for part in regex.findall(r"\p{N}|[^\p{N}]+", text) for word in regex.findall(GPT2_WORD, part)]
    expected = [vocab[token] for word in words for token in _merge(word, ranks)]
    assert tokenizer(text).input_ids == expected


GPT2_WORD = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@functools.cache
def _vocabulary(model_dir: Path) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    model = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return model["vocab"], {tuple(pair): rank for rank, pair in enumerate(model["merges"])}


def _merge(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE as in the GPT-2 paper: join the best-ranked neighbours until no pair has a rank."""
    tokens = [_byte_letter(byte) for byte in word.encode()]
    while len(tokens) > 1:
        rank, i = min((ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(itertools.pairwise(tokens)))
        if rank == len(ranks):
            break
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
    return tokens


@functools.cache
def _byte_letter(byte: int) -> str:
    """GPT-2's printable stand-in for a byte: itself if printable, else the next free letter from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))
