"""How much fits: bytes of a model, blocks of a pool, requests in the blocks. Formulas only.

    K/V bytes of a token = 2 (K and V) x layers x KV heads x head size x bytes per element
    blocks of a pool     = floor((share x memory - weights - overhead) / (S x K/V bytes of a token))

Llama-3.1-8B in bfloat16: 2 x 32 x 8 x 128 x 2 = 128 KiB per token, 2 MiB per block of 16, 16.06 GB of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vtoken.core.checks import check_int, check_number
from vtoken.core.config import MAX_TOKENS, PolicyOptions, Relocation, Variant, VTokenConfig
from vtoken.core.errors import ConfigError, UnsupportedError

GIB = 1 << 30

GPU_MEMORY_BYTES = {"h100": int(79.33 * GIB)}
"""Memory of a card of "80 GB" as the engine counts it: what the two published counts of Llama-3.1-8B (5,427 blocks at
a share of 0.35, 11,519 at 0.50) leave per share, (11,519 - 5,427) x 2 MiB / 0.15. Not read from a card."""

OVERHEAD_BYTES = int(2.2 * GIB)
"""What the engine takes beside weights and K/V: activations of a step, CUDA graphs, the context. Not measured here:
what the same two counts leave beside the weights."""

AUTO_HEADROOM_BLOCKS = {Relocation.LAZY: 8, Relocation.EAGER: 2}
"""Reserve when `headroom_blocks` is not set and evacuation can happen. Hole filling needs it for sealed blocks only,
uses holes first, and leaves as many blocks as it has reserve for; each of them gives one back."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


# ---- one request, one pool -------------------------------------------------------------------------------------------


def headroom_target(config: VTokenConfig, prefix_caching: bool, spare_blocks: int) -> int:
    """Blocks to keep in reserve: as configured, else only where an evacuation can need them, and only
    out of the `spare_blocks` that one request of the longest length leaves.
    """
    if config.headroom_blocks is not None:
        return config.headroom_blocks
    if config.variant is not Variant.VTOKEN:
        return 0
    wanted = AUTO_HEADROOM_BLOCKS[config.relocation] if config.relocation is Relocation.LAZY or prefix_caching else 0
    return max(min(wanted, spare_blocks), 0)


def longest_blocks(
    config: VTokenConfig, block_size: int, tokens: int, chunk_tokens: int | None, options: PolicyOptions | None = None
) -> int:
    """Most blocks that a request of so many tokens holds at once; without `options`, under the engine's default."""
    options = config.policy if options is None else options
    if packs(config):
        tokens = options.peak_tokens(tokens, chunk_tokens)
    return blocks_for(tokens, block_size)


def packs(config: VTokenConfig) -> bool:
    """Whether a prompt's survivors are packed before its next chunk: only hole filling does."""
    return config.variant is Variant.VTOKEN and config.relocation is Relocation.EAGER


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens without a hole."""
    return -(-tokens // block_size)


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder of the Llama kind: what its weights and its K/V weigh.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary: as in `config.json`.
        tied: the output projection is the embedding.
        element_bytes: bytes of a weight and of a K/V element.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    element_bytes: int = 2

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> ModelShape:
        """From the fields of a Hugging Face `config.json`.

        Raises:
            ConfigError: a field is missing or no number.
            UnsupportedError: experts or latent attention, whose sizes follow other formulas.
        """
        for key in ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank"):
            if raw.get(key):
                raise UnsupportedError(
                    f"vtoken plan knows dense decoders only, and config.json sets {key} = {raw[key]!r}: "
                    "give --weights-gb for experts; latent attention (MLA) is not supported."
                )

        def size(key: str, default: object = None) -> int:
            return check_int(f"config.json: {key}", raw.get(key, default), 1, MAX_TOKENS)

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        dtype = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16")
        if dtype not in _BYTES:
            raise ConfigError("config.json: torch_dtype", dtype, "one of " + ", ".join(_BYTES))
        return cls(
            layers=size("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=check_int("config.json: head_dim", raw.get("head_dim") or hidden // heads, 1, MAX_TOKENS),
            intermediate=size("intermediate_size"),
            vocabulary=size("vocab_size"),
            tied=bool(raw.get("tie_word_embeddings", False)),
            element_bytes=_BYTES[dtype],
        )

    @property
    def weights_bytes(self) -> int:
        """Embeddings, and per layer four attention and three MLP matrices and two norms; biases are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return (self.layers * layer + embeddings + self.hidden) * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes


PRESETS = {
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152, tied=True),
}
"""Models that can be planned for without their `config.json`."""


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """What a replica may use.

    Attributes:
        memory_bytes: of the card, as CUDA shows it.
        share: of it that weights, overhead and K/V take together (vLLM's `gpu_memory_utilization`).
        overhead_bytes: beside weights and K/V.
    """

    memory_bytes: int
    share: float
    overhead_bytes: int = OVERHEAD_BYTES

    def __post_init__(self) -> None:
        check_number("memory_share", self.share, 0.0, 1.0)

    def blocks(self, weights_bytes: int, block_bytes: int) -> int:
        """Blocks of `block_bytes` that are left for K/V; 0 if the weights alone do not fit."""
        left = int(self.share * self.memory_bytes) - weights_bytes - self.overhead_bytes
        return max(left, 0) // block_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests, all alike: tokens of a prompt and of an answer, and the largest chunk of a prompt in one step."""

    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens of a finished request."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool of blocks holds.

    Attributes:
        blocks: of the pool, vLLM's null block included.
        headroom_blocks: kept in reserve for evacuation.
        whole_blocks: of a finished request that forgets nothing.
        requests_whole: such requests at once.
        prompt_blocks: most blocks of a request under the policy until its prompt is computed.
        held_blocks: most blocks of it afterwards.
        requests_reclaimed: requests at once under the policy: all decode at their most, but for one
            whose prompt is being computed.
    """

    blocks: int
    headroom_blocks: int
    whole_blocks: int
    requests_whole: int
    prompt_blocks: int
    held_blocks: int
    requests_reclaimed: int


def capacity(blocks: int, block_size: int, traffic: Traffic, config: VTokenConfig) -> Capacity:
    """Requests that a pool of `blocks` holds at once, with and without reclamation. Prefix caching is on.

    Holes are taken to be filled (`relocation: eager`): a lazy pool holds fewer, by F up to theta_f.
    """
    usable = max(blocks - 1, 0)
    options, total = config.policy, traffic.total_tokens
    whole = blocks_for(total, block_size)
    prompt = longest_blocks(config, block_size, traffic.prompt_tokens, traffic.chunk_tokens)
    held = blocks_for(_held_tokens(options, traffic), block_size)
    headroom = headroom_target(config, prefix_caching=True, spare_blocks=usable - max(prompt, held))
    free = usable - headroom - max(prompt - held, 0)
    return Capacity(blocks, headroom, whole, usable // whole, prompt, held, max(free, 0) // held)


def _held_tokens(options: PolicyOptions, traffic: Traffic) -> int:
    """Most tokens of a request after its first decision: its target, and what it grows by until the next."""
    total = traffic.total_tokens
    if not options.evicts_from(traffic.prompt_tokens):
        return total
    return min(total, options.target_tokens(total) + options.interval_tokens + 1)
