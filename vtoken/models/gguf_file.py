"""Typed, validated access to a GGUF file (the llama.cpp model format)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize

from vtoken.models.errors import ModelError

FloatArray = npt.NDArray[np.float32]


class GgufFile:
    """Metadata and tensors of one GGUF file. The file stays memory-mapped as long as this object lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = GGUFReader(str(path))

    @property
    def tensor_count(self) -> int:
        """How many tensors the file holds."""
        return len(self._reader.tensors)

    def value(self, key: str) -> Any:
        """The metadata value under `key`: int, float, str, bool or a list of them.

        Raises:
            ModelError: the file has no such key.
        """
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(f"GGUF file {self.path.name} has no metadata key {key!r}: it is not a model of this kind")
        return field.contents()

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        """Yield (GGUF name, float32 array [rows, columns] or [columns]) in file order, dequantized one at a time."""
        for tensor in self._reader.tensors:
            # A copy even of float32 data: the reader's arrays are read-only views of the mapped file.
            yield tensor.name, np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32, order="C")
