"""One request's vToken options, read the same way in scheduler and worker.

They arrive in `SamplingParams.extra_args["vtoken"]` as JSON text or mapping. The HTTP layer has
validated them; a request that comes another way (plain `vllm serve`) can't be refused from here,
so bad options fall back to the engine's default and are counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vtoken.core.config import OPTIONS_KEY, PolicyOptions, VTokenConfig, parse_request_options
from vtoken.core.errors import ConfigError
from vtoken.core.policies import load_policy

if TYPE_CHECKING:
    from vllm import SamplingParams


def options_of(params: SamplingParams | None, config: VTokenConfig) -> tuple[PolicyOptions, ConfigError | None]:
    """The effective options, and what was wrong with the request's own (then the default holds)."""
    if params is None:
        return PolicyOptions(), None  # pooling models: nothing to evict
    raw = (params.extra_args or {}).get(OPTIONS_KEY)
    try:
        options = parse_request_options(raw, config.policy)
        if options.evicts:
            load_policy(options.policy)
    except ConfigError as error:
        return config.policy, error
    return options, None


def prompt_seed(token_ids: Sequence[int] | None) -> int:
    """A stable hash of the prompt: the part of a policy's seed that distinguishes requests."""
    return zlib.crc32(np.asarray(token_ids or (), dtype=np.int64).tobytes())
