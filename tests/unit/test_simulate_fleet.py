import argparse
import csv
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.core.errors import ConfigError
from vtoken.core.telemetry import Snapshot
from vtoken.simulate import command, traces
from vtoken.simulate.faults import Fault, Kind, reported
from vtoken.simulate.fleet import SERIES, WINDOW_S, Fleet, uniform
from vtoken.simulate.gates import GateShape
from vtoken.simulate.outcome import ServiceLevel, plot_series, summary, write_series
from vtoken.simulate.routers import ROUTERS, Scene, make
from vtoken.simulate.state import DONE, FAILED, REFUSED, EngineShape
from vtoken.simulate.steptime import StepTime
from vtoken.simulate.study import holds, verdicts
from vtoken.simulate.workload import workload

TIME = StepTime(
    np.array([[1.0, 2048.0], [8000.0, 90000.0]]), np.array([[1.0, 64.0], [50.0, 80.0]]),
    np.array([10.0, 20.0, 0.1]), np.array([20.0, 3.0, 0.001, 40.0, 0.3]), 100.0,
)  # fmt: skip
ENGINE = EngineShape(200, TIME, max_batched=512)


def traffic(count=60, rate=20.0, seed=0):
    return traces.generated(count, rate, seed, prompt_mean=200, output_mean=40, families=3, family_tokens=64)


def served(router, work=None, replicas=3, faults=(), seed=0, routers=1):
    return Fleet(traffic() if work is None else work, uniform(ENGINE, replicas, routers), router, faults, seed).run()


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_serves_every_request_and_does_it_the_same_way_again(router):
    one, again = served(router), served(router)
    assert (one.requests["status"] == DONE).all()
    assert (one.requests["generated"] == one.requests["output"]).all()
    assert (one.requests["first_s"] >= one.arrival_s).all()
    assert (one.requests == again.requests).all()
    assert (one.series == again.series).all()


@pytest.mark.parametrize("router", ROUTERS)
@settings(max_examples=20, deadline=None)
@given(living=st.sets(st.integers(0, 5), min_size=1), seed=st.integers(0, 9))
def test_a_router_chooses_among_those_that_live(router, living, seed):
    work = traffic(20, seed=seed)
    chooser, candidates = make(router, Scene(work, [200] * 6), seed), tuple(sorted(living))
    for request in range(20):
        assert chooser.choose(request, float(work.arrival_s[request]), candidates) in living


@pytest.mark.parametrize("router", ["least_outstanding", "oracle"])
def test_a_router_that_counts_spreads_equal_requests_evenly(router):
    work = workload("test", np.arange(12) * 0.001, np.full(12, 100), np.full(12, 50))
    chooser = make(router, Scene(work, [200] * 4), 0)
    chosen = [chooser.choose(request, 0.001 * request, (0, 1, 2, 3)) for request in range(12)]
    assert sorted(map(chosen.count, range(4))) == [3, 3, 3, 3]
    for request in (index for index, replica in enumerate(chosen) if replica == 2):
        chooser.ended(request, 2, 1.0)
    assert chooser.choose(0, 1.0, (0, 1, 2, 3)) == 2


def test_prefix_affinity_sends_equal_beginnings_to_one_replica_until_it_has_too_many():
    work = workload("test", np.arange(40) * 0.001, np.full(40, 100), np.full(40, 50), [[7, 8]] * 40)
    chooser = make("prefix_affinity", Scene(work, [200] * 4), 0)
    chosen = [chooser.choose(request, 0.0, (0, 1, 2, 3)) for request in range(40)]
    assert len(set(chosen[:2])) == 1
    assert len(set(chosen)) == 4


def test_the_oracle_gives_small_and_slow_replicas_less():
    work = workload("test", np.arange(30) * 0.001, np.full(30, 100), np.full(30, 50))
    chooser = make("oracle", Scene(work, [400, 200, 400], slowness=[1.0, 1.0, 2.0]), 0)
    chosen = [chooser.choose(request, 0.0, (0, 1, 2)) for request in range(30)]
    assert chosen.count(0) > max(chosen.count(1), chosen.count(2)) > 0


def test_an_unknown_router_is_refused():
    with pytest.raises(ConfigError, match="round_robin"):
        make("nobody", Scene(traffic(2), [200]), 0)


def test_a_request_that_fits_nowhere_fails_and_is_off_the_books():
    work = workload("test", [0.0, 0.1], [5000, 50], [10, 10])
    fleet = Fleet(work, uniform(ENGINE, 2), "ours")
    assert fleet.run().requests["status"].tolist() == [FAILED, DONE]
    chooser = make("oracle", Scene(work, [200] * 2), 0)
    home = chooser.choose(0, 0.0, (0, 1))
    chooser.ended(0, home, 1.0)
    assert chooser.choose(0, 1.0, (0, 1)) == home


def test_several_ingresses_share_the_fleet():
    assert (served("ours", routers=3).requests["status"] == DONE).all()


@pytest.mark.parametrize("router", ["ours", "round_robin", "prefix_affinity"])
def test_a_death_loses_no_request_and_no_token(router):
    work = traffic(80)
    outcome = served(router, work, faults=[Fault(Kind.DEATH, (0,), 0.5, 2.0)])
    assert (outcome.requests["status"] == DONE).all()
    assert (outcome.requests["generated"] == work.output_tokens).all()
    assert outcome.series[:, SERIES.index("living")].min() == 2
    assert outcome.series[-1, SERIES.index("living")] == 3


def test_a_fleet_that_is_dead_for_a_while_serves_later():
    outcome = served("ours", traffic(20), replicas=1, faults=[Fault(Kind.DEATH, (0,), 0.1, 3.0)])
    assert (outcome.requests["status"] == DONE).all()
    assert outcome.requests["end_s"].max() > 3.0


def test_a_slow_replica_is_slow_only_while_it_is():
    quick, slow = served("round_robin"), served("round_robin", faults=[Fault(Kind.SLOW, (0, 1, 2), 0.0, 1.0, 8.0)])
    assert (slow.requests["first_s"] - quick.requests["first_s"])[:10].mean() > 0.2
    assert slow.requests["end_s"][-1] == pytest.approx(quick.requests["end_s"][-1], abs=0.05)
    assert (served("round_robin", faults=[Fault(Kind.SLOW, (0,), 0.0, 0.0)]).requests == quick.requests).all()


def test_what_faulty_replicas_say():
    true = Snapshot(capacity_blocks=100, free_blocks=10, private_blocks=90, running_requests=5, steps_total=7)
    faults = [Fault(Kind.SILENT, (1,), 0.0, 5.0), Fault(Kind.LYING, (2,), 0.0, 5.0)]
    assert reported(true, 0, faults, 1.0) is true
    assert reported(true, 1, faults, 1.0) is None
    assert reported(true, 1, faults, 6.0) is true
    lie = reported(true, 2, faults, 1.0)
    assert (lie.free_blocks, lie.running_requests, lie.steps_total) == (100, 0, 7)


def test_goodput_counts_requests_that_kept_both_promises():
    outcome = served("ours")
    everything = summary(outcome, ServiceLevel(1e9, 1e9))
    nothing = summary(outcome, ServiceLevel(1e-9, 1e9))
    assert everything["good_share"] == 1.0
    assert nothing["goodput_tokens_per_s"] == 0.0
    first = float(np.median(outcome.requests["first_s"] - outcome.arrival_s))
    assert summary(outcome, ServiceLevel(first, 1e9))["good_share"] == pytest.approx(0.5, abs=0.05)


def test_a_time_series_is_written_as_csv(tmp_path):
    outcome = served("ours")
    write_series(tmp_path / "series.csv", outcome)
    rows = list(csv.DictReader((tmp_path / "series.csv").read_text().splitlines()))
    assert list(rows[0]) == list(SERIES)
    assert len(rows) == len(outcome.series)
    assert float(rows[-1]["output_tokens"]) == outcome.series[-1, SERIES.index("output_tokens")]


def test_a_picture_is_drawn_only_where_matplotlib_is(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_series(tmp_path / "series.png", served("ours")) is False


def test_a_verdict_compares_with_the_best_of_the_others_but_not_with_the_oracle():
    goodput = dict.fromkeys(ROUTERS, 10.0) | {
        "ours": 103.0, "ours_ungated": 80.0, "round_robin": 50.0, "least_kv": 100.0, "oracle": 200.0,
        "power_of_two_gated": 101.0, "least_kv_gated": 90.0,
    }  # fmt: skip
    rows = [
        {
            "case": "a", "replicas": 2, "router": k, "goodput_tokens_per_s": v, "preemptions": v / 10,
            "good_share": v / 200, "refused": 7,
        }
        for k, v in goodput.items()
    ]  # fmt: skip
    (found,) = verdicts(rows)
    assert (found["goodput"], found["best_goodput"]) == (103.0, 100.0)
    assert (found["preemptions"], found["best_preemptions"]) == (10.3, 10.0)
    assert (found["verdict"], found["best"], found["over_best"]) == ("wins", "least_kv", pytest.approx(1.03))
    assert (found["over_round_robin"], found["of_oracle"]) == (pytest.approx(2.06), pytest.approx(0.4))
    assert found["over_best_gated"] == pytest.approx(103 / 101)
    assert found["ungated_over_best"] == pytest.approx(0.8)


@pytest.mark.parametrize("router", ["ours", "power_of_two_gated"])
@pytest.mark.parametrize("ingresses", [1, 3])
def test_a_gate_refuses_who_would_wait_for_too_long_and_serves_the_others_whole(router, ingresses):
    work = traffic(200, rate=200.0)
    shape = replace(uniform(ENGINE, 2, ingresses), gate=GateShape(max_wait_s=0.5))
    outcome = Fleet(work, shape, router).run()
    status = outcome.requests["status"]
    assert set(status.tolist()) == {DONE, REFUSED}
    served_ones = status == DONE
    assert (outcome.requests["generated"] == np.where(served_ones, work.output_tokens, 0)).all()
    waited_s = (outcome.requests["ready_s"] - outcome.arrival_s)[served_ones]
    assert 0.0 < waited_s.max() <= 0.5 + WINDOW_S
    assert outcome.requests["preempted"].sum() <= served("ours_ungated", work, 2).requests["preempted"].sum()


def test_a_gate_without_replicas_refuses_everybody():
    outcome = served("ours", traffic(20), replicas=1, faults=[Fault(Kind.DEATH, (0,), 0.1, 60.0)])
    assert (outcome.requests["status"] == REFUSED).sum() > 10


def test_a_request_larger_than_every_pool_does_not_block_the_gate():
    work = workload("test", [0.0, 0.1, 0.2], [5000, 50, 50], [10, 10, 10])
    assert Fleet(work, uniform(ENGINE, 2), "ours").run().requests["status"].tolist() == [FAILED, DONE, DONE]


def test_the_command_refuses_to_run_without_data(monkeypatch):
    monkeypatch.delenv("VTOKEN_DATA", raising=False)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ConfigError, match="data"):
        command.run(parser.parse_args(["--check"]))


@pytest.mark.parametrize(
    ("case", "over_best", "over_round_robin", "passes"),
    [
        ("azure, ample", 0.98, 1.0, True),
        ("azure, ample", 0.97, 2.0, False),
        ("azure, pressure", 1.1, 1.3, True),
        ("azure, pressure", 1.09, 1.3, False),
        ("azure, pressure", 1.1, 1.29, False),
    ],
)
def test_the_bars_of_the_study(case, over_best, over_round_robin, passes):
    fine = {"case": "mooncake, pressure", "over_best": 2.0, "over_round_robin": 2.0}
    verdict = {"case": case, "over_best": over_best, "over_round_robin": over_round_robin}
    assert holds([fine, verdict]) is passes
    assert not holds([])
