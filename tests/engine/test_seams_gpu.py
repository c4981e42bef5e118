"""The surface of vLLM that the GPU path stands on, pinned in its sources; a renamed seam in a copy is found."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.device.paged import make_paged
from tests.engine.gpu_seams import CONNECTOR, SEAMS, Seam, broken
from vtoken.device.cuda_layout import LAYOUTS, check_layers
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.event_model import SimulatedStreams, compute_first
from vtoken.engine.strict_readers import FlashReader

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="session")
def vllm_sources() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_every_seam_holds_in_the_installed_release(vllm_sources: Path) -> None:
    assert broken(vllm_sources) == []


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_renamed_seam_is_found(vllm_sources: Path, tmp_path: Path, seam: Seam) -> None:
    """The function, each parameter and each piece of its source in turn, in a copy of its file."""
    copy = tmp_path / seam.file
    copy.parent.mkdir(parents=True)
    shutil.copy(vllm_sources / seam.file, copy)
    source = copy.read_text(encoding="utf-8")
    pieces = [
        rf"(?<=def ){seam.name.rpartition('.')[2]}(?=\()",
        *(rf"\b{name}\b" for name in seam.takes if name != "self"),
    ]
    changed = [re.sub(piece, "renamed", source) for piece in pieces]
    changed += [source.replace(piece, renamed(piece)) for piece in seam.says]
    for text in changed:
        copy.write_text(text, encoding="utf-8")
        assert len(broken(tmp_path, (seam,))) == 1


def renamed(piece: str) -> str:
    """The piece with its longest name changed."""
    longest = max(re.findall(r"\w+", piece), key=len)
    return piece.replace(longest, f"{longest}_renamed")


def test_calls_in_another_order_are_found(tmp_path: Path) -> None:
    seam = Seam("a.py", "f", says=("first()", "second()"))
    for body, problems in (("first()\n second()", 0), ("second()\n first()", 1)):
        (tmp_path / "a.py").write_text(f"def f():\n {body}\n", encoding="utf-8")
        assert len(broken(tmp_path, (seam,))) == problems


def test_the_connector_has_every_method_that_runner_v2_calls(vllm_sources: Path) -> None:
    from vtoken.engine.connector import VTokenConnector

    source = (vllm_sources / CONNECTOR).read_text(encoding="utf-8")
    called = set(re.findall(r"self\.kv_connector\.(\w+)\(", source))
    assert {"register_kv_caches", "wait_for_save", "build_connector_worker_meta", "reset_capture_state"} <= called
    assert [name for name in sorted(called) if not callable(getattr(VTokenConnector, name, None))] == []


def test_our_layouts_are_vllms_all_of_them_and_stride_for_stride() -> None:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheLayout,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )

    assert {layout.name for layout in KVCacheLayout} == set(LAYOUTS)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=8, dtype=torch.bfloat16)
    for layout in KVCacheLayout:
        strides = compute_layout_strides(spec, 6, 2, layout)
        tensor = KVCacheTensor(size=2 * 6 * spec.page_size_bytes, layers=["layers.0", "layers.1"], offset=0,
                               layer_stride=strides[0], block_stride=strides[1])  # fmt: skip
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        theirs = create_kv_cache_views(raw, spec, 6, layout, tensor)
        ours = make_paged(layout.name, heads=3, dim=8, device=torch.device("cpu"))
        for one, other in zip(theirs, ours.values(), strict=True):
            assert (one.shape, one.stride(), one.storage_offset()) == (
                other.shape, other.stride(), other.storage_offset(),
            )  # fmt: skip
        assert len(check_layers(dict(enumerate(theirs)))) == 2


def test_what_the_strict_reader_passes_is_what_the_seam_pins() -> None:
    passed: dict = {}
    streams = SimulatedStreams(compute_first)
    cache = make_paged(dim=16, device=torch.device("cpu"))["layers.0"]
    reader = FlashReader(streams, HeldLists(streams, 3, 7), 5, 8, 3, lambda **given: passed.update(given))
    query = torch.zeros(8, 4, 16, dtype=cache.dtype)
    reader.attend(query, cache, 0.25, query.clone(), 0.0, 8)
    (seam,) = (one for one in SEAMS if one.name == "flash_attn_varlen_func")
    assert set(passed) == set(seam.takes)
    assert (passed["num_splits"], passed["fa_version"]) == (1, 3)
