"""vToken: reclaim and reuse the KV cache memory of forgotten tokens, inside vLLM, while decoding.

Importing this package is cheap and has no side effect: no torch, no vLLM, no Ray.  The parts are reached by name
(``vtoken.core``, ``vtoken.engine``, ``vtoken.serving``, ...); ``docs/architecture.md`` draws how they hang together.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
