"""transformers' model with keys hidden by layer and KV head: what an engine with one table for all heads can't try."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

ATTENTION = "vtoken-masked"
"""Its name among transformers' attention functions."""


class MaskedModel:
    """A model in float32, one request at a time.

    Owns what the attention function of the pass under way hides and sees.
    """

    def __init__(self, model: str) -> None:
        """Load a model directory: its size in float32 of memory."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self._attend)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=ATTENTION)
        self._model = loaded.eval()
        self._kept: Any = None
        self._mass: list[Any] = []

    def read(self, tokens: Sequence[int]) -> Read:
        """Read a text."""
        answer, mass = self.run(tokens, None, None)
        return Read(self, answer.past_key_values, mass)

    def run(self, tokens: Sequence[int], cache: Any, kept: np.ndarray[Any, Any] | None) -> tuple[Any, Any]:
        """One pass behind `cache`.

        Args:
            tokens: to be read.
            cache: of the text before, or None; it is not changed.
            kept: bool [layers, KV heads, n], whether each of the first n keys may be seen; None: all.

        Returns:
            The model's answer, and the mass that each key received, float32 [layers, KV heads, keys], averaged over
            the query heads of a KV head and added up over the queries.
        """
        import torch

        self._kept, self._mass = None if kept is None else torch.from_numpy(kept), []
        with torch.inference_mode():
            answer = self._model(torch.tensor([tokens]), past_key_values=copy.deepcopy(cache), use_cache=True)
        return answer, torch.stack(self._mass).numpy()

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_more: Any
    ) -> tuple[Any, None]:
        """transformers' interface: query [1, heads, q, D], key and value [1, KV heads, k, D] -> [1, q, heads, D]."""
        import torch

        _, heads, length, dim = query.shape
        kv_heads, keys = key.shape[1:3]
        grouped = query.view(kv_heads, heads // kv_heads, length, dim)
        scores = scaling * torch.einsum("hgqd,hkd->hgqk", grouped, key[0])
        scores.masked_fill_(torch.ones(length, keys, dtype=torch.bool).triu(keys - length + 1), float("-inf"))
        if self._kept is not None:
            hidden = ~self._kept[module.layer_idx]
            scores[..., : hidden.shape[-1]].masked_fill_(hidden[:, None, None, :], float("-inf"))
        weights = scores.softmax(dim=-1)
        self._mass.append(weights.mean(dim=1).sum(dim=1))
        result = torch.einsum("hgqk,hkd->qhgd", weights, value[0])
        return result.reshape(1, length, heads, dim), None


class Read:
    """A text that has been read.

    Attributes:
        mass: see MaskedModel.run.
    """

    def __init__(self, model: MaskedModel, cache: Any, mass: Any) -> None:
        self._model, self._cache, self.mass = model, cache, mass

    def ask(self, suffix: Sequence[int], tokens: int, kept: np.ndarray[Any, Any] | None) -> tuple[list[int], Any]:
        """The likeliest token at each of the last `tokens` places of a suffix, given those before it; and the mass
        that the suffix before them gave to the text.
        """
        before = len(suffix) - tokens
        answer, _ = self._model.run(suffix, self._cache, kept)
        likeliest = answer.logits[0, before - 1 : -1].argmax(dim=-1).tolist()
        _, mass = self._model.run(suffix[:before], self._cache, kept)
        return likeliest, mass[..., : self.mass.shape[-1]]
