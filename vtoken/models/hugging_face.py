"""What counts as a usable Hugging Face model directory, checked without loading any weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vtoken.models.errors import ModelError

TOKENIZER_FORMS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
# Weights, configuration and tokenizer; no Python files: code that comes with a model is not run.
TAKEN_SUFFIXES = {".json", ".jinja", ".model", ".safetensors", ".txt"}
TAKEN_NAMES = {"LICENSE", "NOTICE"}
_HEADER_LENGTH_BYTES = 8


def model_files(directory: Path) -> list[Path]:
    """The files of a model directory that belong to the model, sorted by name."""
    files = (path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    return sorted(path for path in files if path.suffix in TAKEN_SUFFIXES or path.name in TAKEN_NAMES)


def validate_model_directory(directory: Path) -> None:
    """Check that `directory` holds a config, a tokenizer and complete safetensors weights. Changes nothing.

    Raises:
        ModelError: says which part is missing or damaged.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory: --from expects a local Hugging Face model directory")
    config = _read_json(directory / "config.json")
    if not config.get("architectures"):
        raise ModelError(f"{directory / 'config.json'} names no 'architectures': it is not a model's config")
    if not any(all((directory / name).is_file() for name in form) for form in TOKENIZER_FORMS):
        expected = ", ".join(" + ".join(form) for form in TOKENIZER_FORMS)
        raise ModelError(f"{directory} has no tokenizer: expected one of {expected}")
    for weights in _weight_files(directory):
        _check_complete(weights)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weights = [directory / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    else:
        weights = sorted(directory.glob("*.safetensors"))
    missing = [path.name for path in weights if not path.is_file()]
    if missing:
        raise ModelError(f"{directory} lacks {len(missing)} of {len(weights)} weight files: {', '.join(missing[:3])}")
    if not weights:
        raise ModelError(f"{directory} has no *.safetensors weights: convert the model to safetensors first")
    return weights


def _check_complete(weights: Path) -> None:
    """A safetensors file says in its header where its data ends: compare with the file's size."""
    size_bytes = weights.stat().st_size
    with weights.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if header_bytes > size_bytes:
            raise ModelError(f"{weights} is truncated or not a safetensors file ({size_bytes} bytes)")
        try:
            header = json.loads(file.read(header_bytes))
            data_bytes = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{weights} is not a safetensors file: its header cannot be read ({error})") from error
    expected_bytes = _HEADER_LENGTH_BYTES + header_bytes + data_bytes
    if size_bytes != expected_bytes:
        raise ModelError(f"{weights} has {size_bytes} bytes, its header promises {expected_bytes}: fetch it again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a Hugging Face model directory") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content
