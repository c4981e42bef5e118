"""The kernels compile for an H100 on a machine that has none, and move and multiply as wide as they should.

The interpreter says that a kernel computes the right thing; only the compiler says whether it is a legal kernel, and
its PTX whether what the layout promises (16 bytes per thread, tensor cores) has reached the hardware's instructions.
"""

from __future__ import annotations

import re

import pytest

from vtoken.device import triton_lang

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(triton_lang.interpreted(), reason="the interpreter compiles nothing")

SHARED_BYTES = 227 * 1024
"""Shared memory of a block on an H100."""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def compiled(kernel, types, **constants):
    """PTX and shared bytes of a kernel whose pointers are 16-byte aligned, for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    found = triton.compile(ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32))
    return found.asm["ptx"], found.metadata.shared


def accesses(ptx, width):
    return len(re.findall(rf"(?:ld|st)\.global\.{width} ", ptx))


@pytest.mark.parametrize(
    ("word", "vector", "width"), [("int32", 4, r"v4\.b32"), ("int64", 1, "b64"), ("int16", 1, "b16")]
)
def test_moves_are_as_wide_as_rows_and_strides_allow(word, vector, width):
    from vtoken.device.triton_copy import _move

    types = {"layers": "*i64", "moves": "*i64", "count": "i32", "block_size": "i32"}
    ptx, _ = compiled(_move, types, word=getattr(triton_lang.tl, word), vector=vector, alignment=16, heads_tile=8,
                      words_tile=128)  # fmt: skip
    assert accesses(ptx, width) >= 2
    if vector > 1:
        assert not accesses(ptx, "b32"), "some elements move one by one"


READER = {
    "slots": "*i32", "tokens": "*i64", "begins": "*i64", "visibles": "*i64", "scale": "fp32", "soft_cap": "fp32",
    **dict.fromkeys(("query_stride", "out_stride", "block_stride", "head_stride", "token_stride"), "i32"),
    **dict.fromkeys(("block_size", "group", "dim"), "i32"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dim", "capped", "ones"),
    [
        ("bf16", 128, False, {}), ("bf16", 128, True, {}), ("fp16", 64, False, {}), ("fp32", 64, False, {}),
        ("bf16", 128, False, {"group": 1}),
    ],
)  # fmt: skip
def test_the_reader_fits_and_uses_tensor_cores(kind, dim, capped, ones):
    from vtoken.device.triton_reader import TILE, _attend

    compute = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[kind]
    types = {**READER, "query": f"*{kind}", "cache": f"*{kind}", "out": f"*{kind}"}
    ptx, shared = compiled(_attend, types, **ones, group_tile=16, dim_tile=dim, tile=TILE, capped=capped,
                           compute=getattr(triton_lang.tl, compute))  # fmt: skip
    assert shared <= SHARED_BYTES
    if kind != "fp32":
        assert re.search(r"(?:w?g?mma)\S*\.(?:m16n8k16|m64n)", ptx), "no tensor cores"


SCORER = {
    "numbers": "*i64", **dict.fromkeys(("sums", "answers"), "*fp32"),
    **dict.fromkeys(("query", "cache"), "*bf16"), **dict.fromkeys(("scale", "weight"), "fp32"),
}  # fmt: skip


@pytest.mark.parametrize(
    "ones", [{}, {"group": 1, "kv_heads": 1}], ids=["grouped heads", "an argument of 1 is a constant"]
)
@pytest.mark.parametrize("kernel", ["_sums", "_mass"])
def test_the_scorer_fits_and_uses_tensor_cores(kernel, ones):
    from vtoken.device import triton_mass

    function = getattr(triton_mass, kernel)
    types = {name: SCORER.get(name, "i32") for name in function.arg_names}
    constants = {name: value for name, value in ones.items() if name in types}
    ptx, shared = compiled(function, types, **constants, dim_tile=128, rows=triton_mass.ROWS, tile=triton_mass.KEYS,
                           aligned=triton_mass.ALIGNED, compute=triton_lang.tl.bfloat16)  # fmt: skip
    assert shared <= SHARED_BYTES
    assert re.search(r"(?:w?g?mma)\S*\.(?:m16n8k16|m64n)", ptx), "no tensor cores"
