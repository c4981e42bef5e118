"""A stand-in for FlashAttention: slow, exact, and as unfriendly as its documentation allows."""

from __future__ import annotations

import numpy as np
import torch


def slow_flash(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, block_table,
               softcap, fa_version, num_splits):  # fmt: skip
    """What vLLM documents of `flash_attn_varlen_func` with pages; causal is aligned to the bottom right corner.

    Rows without keys and tokens of no row become NaN: nothing is said about them that a caller could count on.
    """
    assert causal
    assert (fa_version, num_splits) == (3, 1)
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert len(cu_seqlens_q) - 1 == len(seqused_k) == len(block_table)
    size, group, starts = k.shape[1], q.shape[1] // k.shape[2], cu_seqlens_q.tolist()
    assert starts[0] == 0 <= min(np.diff(starts)) <= max(np.diff(starts)) <= max_seqlen_q
    assert starts[-1] <= len(q) == len(out)
    assert seqused_k.max() <= max_seqlen_k == block_table.shape[1] * size
    out.fill_(float("nan"))
    for row, length in enumerate(seqused_k.tolist()):
        places = torch.arange(length, device=q.device)
        page = block_table[row, places // size].long()
        keys, values = (part[page, places % size].repeat_interleave(group, 1).double() for part in (k, v))
        for token in range(starts[row], starts[row + 1] if length else starts[row]):
            seen = length - (starts[row + 1] - 1 - token)
            logits = torch.einsum("hd,nhd->hn", q[token].double(), keys[:seen]) * softmax_scale
            logits = softcap * (logits / softcap).tanh() if softcap else logits
            out[token] = torch.einsum("hn,nhd->hd", logits.softmax(-1), values[:seen])
