"""`vtoken bench identity` in small: a request does not feel its neighbours, and attention reads exactly what is kept.

The other parts of that benchmark are covered in small by `test_engine.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vtoken.bench.identity import LAZY, STRICT, Proof, Scale, engine
from vtoken.bench.parts import Part
from vtoken.core.policies import policy_names

pytestmark = pytest.mark.integration

SMALL = Scale(requests=16, longest_tokens=90, tokens=40, probes=2, controls=4, per_policy=1)


@pytest.fixture
def proof(model_dir: Path) -> Proof:
    return Proof(str(model_dir), SMALL, print)


def assert_passed(part: Part, compared: int) -> None:
    assert part.faults == []
    assert (part.compared, part.identical) == (compared, compared), part.notes


@pytest.mark.parametrize(
    ("name", "dtype", "settings"),
    [("eager", "float32", {}), ("lazy", "float32", LAZY), ("bfloat16", "bfloat16", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_step_computes_what_a_dense_pass_over_the_kept_tokens_computes(
    proof: Proof, name: str, dtype: str, settings: dict[str, Any]
) -> None:
    """Also: the probes say the same alone as in the batch (in float32, under `reader: auto`)."""
    proof.reference(name, dtype, settings)
    assert_passed(proof.parts["reference"], 16 + 4)
    assert_passed(proof.parts["company"], 2 if dtype == "float32" else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_policy_attends_to_what_it_keeps_and_keeps_what_its_scores_say(proof: Proof, dtype: str) -> None:
    proof.policies(dtype)
    assert_passed(proof.parts["policies"], len(policy_names()) - 1)


def test_under_the_strict_reader_a_request_says_the_same_alone_and_in_a_batch(proof: Proof, model_dir: Path) -> None:
    with engine(str(model_dir), STRICT) as eager:
        together = [completion.token_ids for completion in eager.complete(proof._requests)]
        proof.company("strict", eager, together)
        assert eager.snapshots.snapshot().moves_total > 0
    assert_passed(proof.parts["company"], 2)
