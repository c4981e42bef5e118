"""`vtoken bench routing` measures a fleet in mid-work, and its bars can fail."""

from rich.console import Console

from vtoken.bench import routing


def test_every_size_is_measured_and_the_bars_decide(monkeypatch):
    monkeypatch.setattr(routing, "SIZES", (3, 5))
    quiet = Console(quiet=True)
    for bar_us, passed in ((1e9, True), (0.0, False)):
        monkeypatch.setattr(routing, "BARS_US", {5: bar_us})
        outcome = routing.run("", quiet, quick=True)
        assert outcome.passed is passed
        assert {key for key in outcome.values if key.startswith("replicas_")} == {"replicas_3", "replicas_5"}
        assert all(value > 0 for value in outcome.values["replicas_5"].values())
        medians = {row["replicas"]: row["decide_us"] for row in outcome.samples if row["percentile"] == 50}
        assert medians == {count: outcome.values[f"replicas_{count}"]["decide_p50_us"] for count in (3, 5)}
