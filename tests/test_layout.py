"""KVLayout and Namespace: sizes, digests, wrong values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdskv import KVLayout, LayoutError, Namespace

MHA = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "tokens_per_block": 64}


def test_a_block_of_grouped_query_attention():
    layout = KVLayout(**MHA)
    assert layout.shape == (32, 2, 8, 64, 128)
    assert layout.block_bytes == 32 * 2 * 8 * 64 * 128 * 2
    assert layout.slot_bytes == layout.block_bytes


def test_a_block_of_latent_attention():
    layout = KVLayout(layers=61, kv_heads=1, head_dim=576, dtype="float8_e4m3fn", tokens_per_block=3, kind="mla")
    assert layout.shape == (61, 3, 576)
    assert layout.block_bytes == 61 * 3 * 576
    assert layout.slot_bytes == 106496


def test_a_raw_block_has_the_bytes_asked_for():
    layout = KVLayout.raw(64 << 10, tokens_per_block=512)
    assert layout.block_bytes == 64 << 10
    assert layout.tokens_per_block == 512


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_every_dtype_is_torchs(dtype):
    torch = pytest.importorskip("torch")
    layout = KVLayout(**{**MHA, "dtype": dtype})
    assert layout.torch_dtype == getattr(torch, dtype)
    assert layout.itemsize == layout.torch_dtype.itemsize
    assert KVLayout(**{**MHA, "dtype": layout.torch_dtype}) == layout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens_per_block": 0}, "tokens_per_block=0 is below 1"),
        ({"layers": -1}, "layers=-1"),
        ({"kv_heads": 1.5}, "kv_heads=1.5"),
        ({"head_dim": True}, "head_dim=True"),
        ({"head_dim": None}, "head_dim=None"),
        ({"dtype": "float12"}, "dtype='float12'.*float32"),
        ({"dtype": None}, "dtype='None'"),
        ({"kind": "gqa"}, "kind='gqa'"),
        ({"kind": "mla"}, "kv_heads=8 does not fit"),
        ({"fused": "no"}, "fused='no'"),
        ({"tokens_per_block": 1 << 20}, "limit is 1GiB"),
    ],
)
def test_an_impossible_layout_is_one_line_that_names_it(change, named):
    with pytest.raises(LayoutError, match=named) as error:
        KVLayout(**{**MHA, **change})
    assert "\n" not in str(error.value)


def test_a_raw_block_must_divide_into_its_tokens():
    with pytest.raises(LayoutError, match="block_bytes=1000 is no multiple of tokens_per_block=512"):
        KVLayout.raw(1000, tokens_per_block=512)


LAYOUT = KVLayout(**MHA)
BASE = {"model": "llama", "revision": "a1", "tp": 2, "rank": 1}
CHANGES = [
    {"model": "llama2"},
    {"revision": "a2"},
    {"dtype": "float16"},
    {"tp": 4},
    {"tp": 1, "pp": 2},
    {"tp": 1, "cp": 2},
    {"rank": 0},
    {"rope": "yarn"},
    {"rope": {"rope_type": "yarn", "factor": 4.0}},
    {"adapter": "x"},
    {"kv_scales": "x"},
    {"extra": (("x", "y"),)},
    {"extra": (("xy", ""),)},
    {"extra": (("x", ""), ("y", ""))},
]
LAYOUTS = [
    {"dtype": "float16"},
    {"layers": 16, "kv_heads": 16},
    {"kv_heads": 4, "head_dim": 256},
    {"tokens_per_block": 32, "layers": 64},
    {"fused": True},
    {"kind": "mla", "kv_heads": 1},
]


def test_whatever_shapes_bytes_changes_the_digest():
    digests = {Namespace(**{**BASE, **change}).digest(LAYOUT) for change in [{}, *CHANGES]}
    digests |= {Namespace(**BASE).digest(KVLayout(**{**MHA, **change})) for change in LAYOUTS}
    assert len(digests) == 1 + len(CHANGES) + len(LAYOUTS)
    assert {len(digest) for digest in digests} == {16}


def test_what_means_the_same_has_the_same_digest():
    digest = Namespace(**BASE).digest(LAYOUT)
    assert Namespace(**BASE, dtype="bfloat16").digest(LAYOUT) == digest
    ropes = [{"a": 1, "b": [2, 3]}, {"b": (2, 3), "a": 1}]
    assert Namespace("m", rope=ropes[0]).digest(LAYOUT) == Namespace("m", rope=ropes[1]).digest(LAYOUT)
    extra = (("a", "1"), ("b", "2"))
    assert Namespace("m", extra=extra).digest(LAYOUT) == Namespace("m", extra=extra[::-1]).digest(LAYOUT)


@given(st.tuples(*[st.text(max_size=4)] * 3), st.tuples(*[st.text(max_size=4)] * 3))
def test_no_two_namings_share_an_encoding(first, second):
    digests = [Namespace("m", revision=a, adapter=b, kv_scales=c).digest(LAYOUT) for a, b, c in (first, second)]
    assert (digests[0] == digests[1]) == (first == second)


def test_the_digest_is_the_same_in_every_process():
    known = "877b0fd055a5a742edca9dd26aa32db6"
    code = "import gdskv; l = gdskv.KVLayout(2, 2, 32, 'float32', 16);"
    code += "print(gdskv.Namespace('m', 'r', rope={'b': 1, 'a': 2.5}, extra=(('é', 'x'),)).digest(l).hex())"
    for seed in ("0", "1"):
        run = [sys.executable, "-c", code]
        out = subprocess.run(
            run, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == known


def test_the_fields_are_readable():
    fields = Namespace("m", extra=(("kernel", "v2"),)).fields(LAYOUT)
    assert fields["dtype"] == "bfloat16"
    assert fields["layout.tokens_per_block"] == "64"
    assert fields["extra.kernel"] == "v2"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": ""}, "model=''"),
        ({"model": "  "}, "model='  '"),
        ({"model": None}, "model=None"),
        ({"revision": 3}, "revision=3"),
        ({"dtype": "auto"}, "dtype='auto'"),
        ({"tp": 0}, "tp=0"),
        ({"tp": 2, "pp": 2, "rank": 4}, "rank=4 does not exist among 4"),
        ({"rank": -1}, "rank=-1"),
        ({"rope": 3}, "rope=3"),
        ({"rope": {"a": object()}}, "JSON"),
        ({"rope": {"a": float("nan")}}, "JSON"),
        ({"extra": ("ab",)}, "extra="),
        ({"extra": (("a", 1),)}, "extra="),
        ({"extra": (("a", "1"), ("a", "2"))}, "'a' twice"),
        ({"extra": 3}, "extra=3"),
    ],
)
def test_a_wrong_namespace_is_one_line_that_names_it(values, named):
    with pytest.raises(LayoutError, match=named) as error:
        Namespace(**{"model": "m", **values})
    assert "\n" not in str(error.value)
