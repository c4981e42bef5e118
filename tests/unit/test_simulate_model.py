import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.simulate import calibration, traces
from vtoken.simulate.agreement import engine_frontiers
from vtoken.simulate.forgetting import spread_at
from vtoken.simulate.frontier import SCENES, Scene, frontier, frontiers, holds
from vtoken.simulate.lockstep import LockStep
from vtoken.simulate.spread import spread_table
from vtoken.simulate.state import EngineShape, rules_of
from vtoken.simulate.steptime import StepTime, chunk_work, fit, step_seconds
from vtoken.simulate.workload import workload

HALF = {"policy": "random", "keep_ratio": 0.5, "interval_tokens": 8, "protect_sinks": 1, "protect_recent": 4}


# ---- workloads


def some(count=7):
    prefixes = [[n, n + 1][: n % 3] for n in range(count)]
    return workload("test", np.arange(count) * 2.0, np.arange(1, count + 1) * 10, np.full(count, 5), prefixes, 16)


def ids_of(work, n):
    return work.prefix_ids[work.prefix_at[n] : work.prefix_at[n + 1]].tolist()


def test_requests_come_in_order_and_failures_are_dropped():
    work = workload("test", [3.0, 1.0, 2.0], [30, 10, 20], [1, 1, 0], [[3], [1, 1], [2]])
    assert work.arrival_s.tolist() == [1.0, 3.0]
    assert work.prompt_tokens.tolist() == [10, 30]
    assert [ids_of(work, n) for n in range(2)] == [[1, 1], [3]]


@given(st.integers(1, 40))
def test_a_repeated_trace_repeats_requests_and_goes_on_in_time(count):
    one, many = some(), some().repeated(count)
    assert len(many) == count
    assert (np.diff(many.arrival_s) > 0).all()
    for n in range(count):
        assert many.prompt_tokens[n] == one.prompt_tokens[n % len(one)]
        assert ids_of(many, n) == ids_of(one, n % len(one))


def test_a_rate_stretches_time_only():
    fast = some().at_rate(10.0)
    assert (len(fast) - 1) / fast.seconds == pytest.approx(10.0)
    assert fast.prompt_tokens.tolist() == some().prompt_tokens.tolist()


def test_a_burst_presses_arrivals_and_keeps_the_gaps_of_the_others():
    burst = some(21).with_burst(at_s=10.0, length_s=4.0, factor=5.0)  # the arrivals of 10 .. 30 s within 10 .. 14 s
    assert np.diff(burst.arrival_s)[:5].tolist() == [2.0] * 5
    assert np.diff(burst.arrival_s)[5:15].tolist() == pytest.approx([0.4] * 10)
    assert np.diff(burst.arrival_s)[15:].tolist() == pytest.approx([2.0] * 5)


# ---- traces


def test_every_format_is_read(tmp_path):
    files = {
        "AzureLLMInferenceTrace_conv.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109",
        "BurstGPT_1_first400.csv": "Timestamp,Model,Request tokens,Response tokens\n5,A,472,18\n9,A,0,0\n45,A,87,23\n",
        "conversation_trace_first.jsonl": '{"timestamp": 500, "input_length": 600, "output_length": 9, '
        '"hash_ids": [0, 4]}',
        "sharegpt_llama31_300_blk16.jsonl": '{"timestamp": 5, "input_length": 40, "output_length": 3, '
        '"hash_ids": [7, 8]}',
        "workload_me2_01_mixed.jsonl": '{"input_toks": 20, "output_toks": 30, "arrival_time_ns": 2000000000}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    read = {name: traces.TRACES[name](tmp_path) for name in traces.TRACES}
    assert read["azure"].arrival_s.tolist() == pytest.approx([0.0, 4.314579])
    assert read["azure"].output_tokens.tolist() == [44, 109]
    assert read["burstgpt"].prompt_tokens.tolist() == [472, 87]
    assert (read["mooncake"].prefix_span, ids_of(read["mooncake"], 0)) == (512, [0, 4])
    assert (read["sharegpt"].arrival_s[0], ids_of(read["sharegpt"], 0)) == (0.005, [7, 8])
    assert (read["mixed"].arrival_s[0], int(read["mixed"].prompt_tokens[0])) == (2.0, 20)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"AzureLLMInferenceTrace_conv\.csv"):
        traces.azure(tmp_path)


def test_generated_traffic_depends_on_its_seed_and_shares_prompts():
    one, same, other = (traces.generated(500, 10.0, seed, families=4) for seed in (1, 1, 2))
    assert one.prompt_tokens.tolist() == same.prompt_tokens.tolist() != other.prompt_tokens.tolist()
    assert len(set(one.prefix_ids.tolist())) <= 4 * 16
    assert 500 / one.seconds == pytest.approx(10.0, rel=0.2)


# ---- step times


def grid(folder, attention):
    """A grid in which every layer's part takes 1 us and 0.1 us per token."""
    parts = [
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
        "act_fn",
        "layernorm",
        "rotary_emb",
        "embedding",
        "final_layernorm",
    ]
    dense = [f"{part},{tokens},{1 + 0.1 * tokens}" for part in parts for tokens in (1, 10, 100)]
    head = [f"{part},{count},{count}" for part in ("lm_head", "sampler") for count in (1, 8)]
    cells = [
        (c, k, n, d)
        for c in (0, 16, 512)
        for k in (0, 64)
        for n in (0, 1, 8)
        for d in (0, 64, 512)
        if (c or not k) and (c or n) and bool(n) == bool(d)
    ]
    rows = [f"{c},{k},{n},{d},{attention(c, k, n, d)}" for c, k, n, d in cells]
    for name, header, lines in (
        ("dense.csv", "layer,tokens,time_us", dense), ("per_sequence.csv", "layer,sequences,time_us", head),
        ("attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", rows),
    ):  # fmt: skip
        (folder / name).write_text("\n".join([header, *lines]) + "\n")


def test_a_grid_that_follows_the_formula_is_found_exactly(tmp_path):
    def attention(chunk, before, n, context):
        if not chunk:
            return 5 + 2 * n + 0.01 * n * context
        return 7 + 0.5 * chunk + 0.001 * max(chunk, 256) * (before + chunk / 2) + 3 * n + 0.02 * n * context

    grid(tmp_path, attention)
    found = fit(tmp_path, layers=2)
    assert found.errors["decode"]["p90"] == found.errors["mixed"]["p90"] == 0.0
    assert found.model.decode_us.tolist() == pytest.approx([10, 4, 0.02])
    assert found.model.mixed_us.tolist() == pytest.approx([14, 1.0, 0.002, 6, 0.04])
    dense = 2 * 8 * (1 + 0.1 * 55) + 2 * (1 + 0.1 * 55)
    assert step_seconds(found.model, 55, 100.0, 0, 0.0, 4) * 1e6 == pytest.approx(dense + 8 + 10 + 4 * 55 + 2)
    mixed = dense + 2 + 14 + 54 + 0.002 * chunk_work(64, 54) + 6 + 0.04 * 64
    assert step_seconds(found.model, 1, 64.0, 54, chunk_work(64, 54), 1) * 1e6 == pytest.approx(mixed)


def test_no_coefficient_is_negative(tmp_path):
    grid(tmp_path, lambda chunk, before, n, context: 100 + max(0, 50 - n) + 0.01 * (chunk + before + n * context))
    model = fit(tmp_path).model
    assert min(*model.decode_us, *model.mixed_us) >= 0


# ---- block counts of the pure core


def config(**settings):
    return VTokenConfig.from_mapping({"policy": HALF, **settings})


def test_packed_rows_hold_half_and_rows_with_holes_more():
    held = {}
    for name, settings in {
        "eager": {},
        "lazy": {"relocation": "lazy", "headroom_blocks": 4},
        "naive": {"variant": "naive"},
    }.items():
        engine = LockStep(config(**settings), 400, 2, 64, block_size=8)
        assert engine.run(640)
        engine.shard.check_invariants()
        held[name] = max(len(row.table.blocks) for row in engine.shard.rows.values())
    assert held["eager"] <= 640 / 2 / 8 + 3
    assert held["eager"] < held["lazy"] < held["naive"] <= 640 / 8


def test_a_pool_that_is_too_small_is_noticed():
    assert not LockStep(config(), 40, 2, 64, block_size=8).run(640)


def test_the_frontier_is_the_largest_number_that_fits_wherever_the_search_begins():
    options = PolicyOptions(**HALF)
    for begin in (1, 4):
        scene = Scene("test", 24, 32, 128, options, {"eager": begin}, {"eager": 3})
        count = frontier(scene, "eager")
        assert LockStep(config(), 24, count, 32).run(128)
        assert not LockStep(config(), 24, count + 1, 32).run(128)
        assert holds(scene, {"eager": count})
    assert not holds(scene, {"eager": 2})


def test_the_real_engines_frontier_is_found():
    """`vtoken bench frontier` measured naive 5, lazy 8, eager 10 (docs/results.md)."""
    assert frontiers(SCENES[0]) == {"naive": 5, "lazy": 8, "eager": 10}


def test_the_fleets_engine_has_the_same_frontier_as_the_token_tables():
    assert engine_frontiers(SCENES[0], TIME) == frontiers(SCENES[0])


def test_rows_with_holes_spread_as_the_cores_own_rows_do():
    naive = config(variant="naive")
    table = spread_table(naive, prompts=3, intervals=12)
    assert table.shape == (3, 12)
    rules = rules_of(EngineShape(10, TIME, config=naive, spread=table), 16)
    alone = LockStep(naive, 100, 1, 64)
    alone.step(64)
    for interval in range(12):
        alone.interval(64 + 96)
        row = alone.shard.row("r0")
        since = alone.length - row.forgetting.decided_at
        spread = (row.table.tail - since) / (row.table.live - since)
        assert spread_at(rules, 64, 64 + interval * 8) == pytest.approx(spread)
    assert table[2, -1] > 1.5


LINE = np.array([[1.0, 64.0], [10.0, 20.0]])
TIME = StepTime(LINE, LINE, np.ones(3), np.ones(5), 0.0)


# ---- the measured run


def test_a_run_of_a_simulated_engine_is_described_as_the_real_one_is(tmp_path):
    run = tmp_path / calibration.RUN
    run.mkdir()
    requests = [
        {"queued_ts": 10.0, "first_token_ts": 11.0, "last_token_ts": 14.0, "output_toks": 4},
        {"queued_ts": 12.0, "first_token_ts": 15.0, "last_token_ts": 20.0, "output_toks": 6},
    ]
    (run / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))
    (run / "timeseries.csv").write_text("t,running,kv_cache_pct\n1,1,50\n2,2,70\n")
    seen = calibration.measured(tmp_path)
    assert (seen.makespan_s, seen.kv_use, seen.peak_running, seen.output_tokens_per_s) == (
        10.0,
        pytest.approx(0.6),
        2,
        1.0,
    )
    assert (seen.first_token_s, seen.token_s, seen.latency_s) == (2.0, 1.0, 6.0)
