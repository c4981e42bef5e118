"""From the GGUF form of a Llama model to the Hugging Face form: names, row order, config.

llama.cpp rotates neighbouring pairs of a head's rows, Hugging Face rotates row i with row i + d/2.  The converter
therefore stored the rows of every query and key head interleaved, and we put them back (head dimension d = 4):

    Hugging Face rows   0 1 2 3      first half 0 1, second half 2 3
    GGUF rows           0 2 1 3      pairs (0, 2), (1, 3)

A wrong head count here still gives a model that runs, and speaks nonsense; the tests therefore measure perplexity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vtoken.models.errors import ModelError
from vtoken.models.gguf_file import FloatArray, GgufFile

_TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSORS_PER_LAYER = len(_PER_LAYER)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama model, as its GGUF metadata states them."""

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_tokens: int
    rope_theta: float
    rms_eps: float

    @classmethod
    def from_gguf(cls, gguf: GgufFile) -> LlamaShape:
        """Read the sizes; raises ModelError for another architecture or a missing key."""
        architecture = gguf.value("general.architecture")
        if architecture != "llama":
            raise ModelError(
                f"GGUF file {gguf.path.name} holds architecture {architecture!r}, only 'llama' is supported"
            )
        return cls(
            layers=gguf.value("llama.block_count"),
            hidden=gguf.value("llama.embedding_length"),
            intermediate=gguf.value("llama.feed_forward_length"),
            query_heads=gguf.value("llama.attention.head_count"),
            kv_heads=gguf.value("llama.attention.head_count_kv"),
            head_dim=gguf.value("llama.rope.dimension_count"),
            vocab=gguf.value("llama.vocab_size"),
            context_tokens=gguf.value("llama.context_length"),
            rope_theta=gguf.value("llama.rope.freq_base"),
            # Stored as float32; six significant digits give back the number that was meant (1e-05).
            rms_eps=float(f"{gguf.value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        )

    @property
    def tensor_count(self) -> int:
        """Tensors of the whole model with tied embeddings (no separate output matrix)."""
        return len(_TOP_LEVEL) + self.layers * _TENSORS_PER_LAYER


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; raises ModelError for an unknown name."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _PER_LAYER:
            return f"model.layers.{layer}.{_PER_LAYER[kind]}.weight"
    raise ModelError(f"GGUF tensor {gguf_name!r} has no place in a Llama model with tied embeddings")


def deinterleave_rotary_rows(weight: FloatArray, heads: int) -> FloatArray:
    """Undo llama.cpp's interleaving of the rows of each head.

    Args:
        weight: [heads * d, columns], rows of each head in pair order.
        heads: number of heads the rows belong to (KV heads for the key matrix).

    Returns:
        A new array of the same shape, rows of each head in first-half, second-half order.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hugging_face_weight(gguf_name: str, weight: FloatArray, shape: LlamaShape) -> FloatArray:
    """The tensor as Hugging Face's Llama wants it: only query and key matrices differ."""
    if gguf_name.endswith(".attn_q.weight"):
        return deinterleave_rotary_rows(weight, shape.query_heads)
    if gguf_name.endswith(".attn_k.weight"):
        return deinterleave_rotary_rows(weight, shape.kv_heads)
    return weight


def config_json(shape: LlamaShape, dtype: str, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """Content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "dtype": dtype,
        "eos_token_id": eos,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context_tokens,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.query_heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": pad,
        "rms_norm_eps": shape.rms_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
