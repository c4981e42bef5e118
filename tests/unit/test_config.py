import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vtoken.core.config import PolicyOptions, Reader, Relocation, Variant, VTokenConfig, parse_request_options
from vtoken.core.errors import ConfigError, RequestOptionError

DEFAULT = PolicyOptions("streaming_llm", budget_tokens=256)


@pytest.mark.parametrize(
    ("raw", "key", "found", "allowed"),
    [
        ({"variant": "vtokn"}, "vtoken.variant", "vtokn", "native, naive, vtoken"),
        ({"theta_f": 1.5}, "vtoken.theta_f", "1.5", "0.0 to 1.0"),
        ({"headroom_blocks": -1}, "vtoken.headroom_blocks", "-1", "0 to"),
        ({"headrom_blocks": 1}, "vtoken.headrom_blocks", "1", "headroom_blocks"),
        ({"check_moves": "yes"}, "vtoken.check_moves", "yes", "a number from 0.0 to 1.0"),
        ({"policy": {"policy": "random"}}, "vtoken.policy.budget_tokens", "None", "exactly one"),
        ({"policy": {"policy": "random", "budget_tokens": 3}}, "vtoken.policy.budget_tokens", "3", "at least"),
        ({"policy": {"budget": 3}}, "vtoken.policy.budget", "3", "budget_tokens"),
        ({"policy": 7}, "vtoken.policy", "7", "a mapping"),
        ({"batch_blocks": True}, "vtoken.batch_blocks", "True", "an integer"),
    ],
)
def test_a_wrong_setting_is_named_with_key_value_and_range(raw: dict, key: str, found: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VTokenConfig.from_mapping(raw)
    assert key in str(caught.value)
    assert found in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    ["not json", "[1]", 7, {"budget": 3}, {"budget_tokens": 0}, {"budget_tokens": 2.5}, {"keep_ratio": "half"},
     {"budget_tokens": 100, "keep_ratio": 0.5}, {"policy": ""}, {"interval_tokens": 0}, {"seed": -1}],
)  # fmt: skip
def test_wrong_request_options_are_the_callers_fault(raw: object) -> None:
    with pytest.raises(RequestOptionError, match="vtoken"):
        parse_request_options(raw, DEFAULT)


def test_a_request_replaces_one_kind_of_budget_by_the_other() -> None:
    assert parse_request_options({"keep_ratio": 0.5}, DEFAULT).target_tokens(1000) == 500
    assert parse_request_options(json.dumps({"budget_tokens": 64}), DEFAULT).target_tokens(1000) == 64
    assert parse_request_options({"policy": "none"}, DEFAULT).evicts is False
    assert parse_request_options(None, DEFAULT) is DEFAULT


@given(
    st.builds(
        VTokenConfig,
        variant=st.sampled_from(Variant),
        relocation=st.sampled_from(Relocation),
        reader=st.sampled_from(Reader),
        policy=st.just(DEFAULT),
        headroom_blocks=st.none() | st.integers(0, 100),
        theta_f=st.floats(0, 1),
        check_moves=st.floats(0.0, 1.0),
    )
)
def test_settings_survive_the_way_through_the_engines_json(config: VTokenConfig) -> None:
    assert VTokenConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@given(total=st.integers(1, 5000), ratio=st.floats(0.01, 1), sinks=st.integers(0, 8), recent=st.integers(1, 64))
def test_a_target_keeps_the_protected_and_never_exceeds_what_there_is(
    total: int, ratio: float, sinks: int, recent: int
) -> None:
    options = PolicyOptions("random", keep_ratio=ratio, protect_sinks=sinks, protect_recent=recent)
    target = options.target_tokens(total)
    assert min(total, sinks + recent) <= target <= total
    assert target >= min(ratio * total, total)


BETWEEN = PolicyOptions("streaming_llm", 256, interval_tokens=32, between_chunks=True)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "none"},
        {"budget_tokens": 257},
        {"keep_ratio": 0.5},
        {"interval_tokens": 33},
        {"between_chunks": False},
        {"min_prompt_tokens": 1000},
    ],
    ids=str,
)
def test_where_memory_is_planned_for_eviction_a_request_may_not_keep_more(options: dict[str, Any]) -> None:
    with pytest.raises(RequestOptionError, match="keep no more tokens than the engine's default"):
        BETWEEN.override(options)


@pytest.mark.parametrize("options", [{"budget_tokens": 64}, {"interval_tokens": 8}, {"policy": "random"}, {}], ids=str)
def test_it_may_forget_more(options: dict[str, Any]) -> None:
    changed = BETWEEN.override(options)
    assert all(getattr(changed, key) == value for key, value in options.items())


@given(
    total=st.integers(1, 5000), chunk=st.integers(2, 600), budget=st.integers(40, 400), interval=st.integers(1, 64),
)  # fmt: skip
def test_the_peak_is_what_a_walk_through_the_chunks_needs(total: int, chunk: int, budget: int, interval: int) -> None:
    """Evict after each chunk, then decode with a decision every `interval` tokens: never more at once than the peak."""
    options = PolicyOptions("streaming_llm", budget, interval_tokens=interval, between_chunks=True)
    live, seen = 0, 0
    while seen < total:
        step = min(chunk, total - seen)
        live, seen = live + step, seen + step
        assert live <= options.peak_tokens(total, chunk)
        live = min(live, options.target_tokens(seen))
    assert options.peak_tokens(total, None) == total
    assert replace(options, between_chunks=False).peak_tokens(total, chunk) == total
    assert live + interval + 1 <= options.peak_tokens(total + 10**6, chunk)
