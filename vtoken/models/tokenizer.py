"""From the vocabulary in a GGUF file to Hugging Face's tokenizer files."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from vtoken.models.errors import ModelError
from vtoken.models.gguf_file import GgufFile

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
END_OF_TEXT = "<|endoftext|>"


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The byte-level BPE tokenizer whose tokens, merges and special tokens the GGUF file lists.

    The file names its pre-tokenizer `smollm`: digits one by one, then GPT-2's word pattern.

    Raises:
        ModelError: the file's tokenizer is of another kind.
    """
    kind = (gguf.value("tokenizer.ggml.model"), gguf.value("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"GGUF file {gguf.path.name} has tokenizer {kind}, only ('gpt2', 'smollm') is supported")
    tokens: list[str] = gguf.value("tokenizer.ggml.tokens")
    types: list[int] = gguf.value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def special_tokens(gguf: GgufFile) -> dict[str, str]:
    """Role -> token text for the four roles that Hugging Face names."""
    tokens: list[str] = gguf.value("tokenizer.ggml.tokens")
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {role: tokens[gguf.value(f"tokenizer.ggml.{key}_token_id")] for role, key in roles.items()}


def tokenizer_config_json(gguf: GgufFile, context_tokens: int) -> dict[str, Any]:
    """Content of `tokenizer_config.json`, chat template included."""
    return {
        "add_prefix_space": False,
        "chat_template": gguf.value("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens(gguf),
    }


def generation_config_json(gguf: GgufFile) -> dict[str, Any]:
    """Content of `generation_config.json`.

    A chat turn ends with the end-of-sequence token, a plain document with `<|endoftext|>`: either one stops.
    """
    eos: int = gguf.value("tokenizer.ggml.eos_token_id")
    tokens: list[str] = gguf.value("tokenizer.ggml.tokens")
    return {
        "bos_token_id": gguf.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [eos, tokens.index(END_OF_TEXT)],
        "pad_token_id": gguf.value("tokenizer.ggml.padding_token_id"),
    }
