"""The experiment on needles: its choices, its counts, and its masked model beside transformers' own attention."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.bench.masked_model import MaskedModel
from vtoken.bench.needles import FULL, QUESTION_ALL, RECENT, SINKS, Found, choices, kept_by, outcome, place_of

SIZE, LAYERS, HEADS = 96, 3, 2


@pytest.fixture
def mass() -> np.ndarray:
    return np.random.default_rng(0).random((LAYERS, HEADS, SIZE), np.float32)


def test_every_choice_keeps_its_share_the_sinks_and_the_newest(mass):
    for name, kept in choices(mass, mass, SIZE):
        assert kept.shape == mass.shape
        assert set(kept.sum(axis=-1).ravel()) == {round(float(name.split(", ")[-1]) * SIZE)}
        assert kept[..., :SINKS].all()
        assert kept[..., -RECENT:].all()


def test_what_is_shared_is_the_same_and_what_is_not_differs(mass):
    found = dict(choices(mass, mass, SIZE))
    assert all((kept == kept[:1, :1]).all() for name, kept in found.items() if ", all," in name)
    by_layer, by_head = found["h2o, layer, 0.5"], found["h2o, head, 0.5"]
    assert (by_layer == by_layer[:, :1]).all()
    assert (by_layer != by_layer[:1]).any()
    assert (by_head != by_head[:, :1]).any()


def test_the_best_are_kept():
    scores = np.zeros((1, 1, SIZE), np.float32)
    scores[0, 0, [20, 40, 50]] = (1.0, 3.0, 2.0)
    kept = kept_by(scores, SINKS + RECENT + 2)[0, 0]
    assert np.flatnonzero(kept)[SINKS:-RECENT].tolist() == [40, 50]


def test_a_place_is_where_the_tokens_stand():
    assert place_of([2, 3], [1, 2, 2, 3, 2, 3]) == slice(2, 4)


@pytest.mark.parametrize(("full", "asked", "holds"), [(9, 8, True), (6, 6, False), (9, 5, False)])
def test_the_experiment_must_be_able_to_find_needles(full, asked, holds):
    found = {
        name: [Found(index < count, 0.5) for index in range(10)]
        for name, count in ((FULL, full), (QUESTION_ALL, asked), ("h2o, all, 0.5", 0))
    }
    result = outcome(found)
    assert result.passed == holds
    assert result.values["found"] == {FULL: full, QUESTION_ALL: asked, "h2o, all, 0.5": 0}
    assert result.values["needle_kept"]["h2o, all, 0.5"] == 0.5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two layers, four heads, two KV heads, random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    directory = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape)).save_pretrained(directory)
    return str(directory)


def test_the_masked_model_is_the_model_and_hides_what_it_is_told_to(tiny):
    import torch
    from transformers import AutoModelForCausalLM

    eager = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager").eval()
    text, suffix = list(range(20)), [5, 9, 11, 3]
    model = MaskedModel(tiny)
    read = model.read(text)
    with torch.inference_mode():
        whole = eager(torch.tensor([[*text, *suffix]]), output_attentions=True)
        first = eager(torch.tensor([text]), output_attentions=True)
    expected = torch.stack([a[0].view(2, 2, 20, 20).mean(1).sum(1) for a in first.attentions]).numpy()
    np.testing.assert_allclose(read.mass, expected, rtol=1e-4, atol=1e-5)
    likeliest, _ = read.ask(suffix, 2, None)
    assert likeliest == whole.logits[0, -3:-1].argmax(-1).tolist()
    kept = np.ones((2, 2, 20), bool)
    kept[..., 4:9] = False
    answer, mass = model.run(suffix, model.run(text, None, None)[0].past_key_values, kept)
    assert (mass[..., 4:9] == 0).all()
    assert (mass[..., :4] > 0).all()
    bias = torch.zeros(1, 1, 24, 24).masked_fill_(torch.ones(24, 24, dtype=torch.bool).triu(1), float("-inf"))
    bias[..., 20:, 4:9] = float("-inf")
    with torch.inference_mode():
        masked = eager(torch.tensor([[*text, *suffix]]), attention_mask=bias).logits[0, -4:]
    torch.testing.assert_close(answer.logits[0], masked, rtol=1e-4, atol=1e-4)
