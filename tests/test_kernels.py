"""The gather and scatter kernels, compiled for the CPU, against torch's indexing and the library's checksums."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import crc32c
import numpy as np
import pytest
import torch
from hostdriver import TESTS, missing
from hostkernels import HostKernels
from hypothesis import given, settings
from hypothesis import strategies as st

from gdskv import ConfigError, KVLayout, LayoutError
from gdskv.io import kernels
from gdskv.pools.pages import DevicePages

ARCHITECTURES = ("80", "90", "100")
ORDERS = [
    ("kv page token head dim", "per layer, as FlashAttention has it"),
    ("page kv head token dim", "per layer, as FlashInfer has it"),
    ("page token head dim", "keys and values apart"),
    ("page layer kv head token dim", "fused, a block's bytes in one piece"),
    ("layer kv page token head dim", "fused, layers outside"),
    ("page head dim token", "numbers apart"),
]
MLA_ORDERS = [
    ("page token dim", "per layer"),
    ("page layer token dim", "fused"),
    ("layer page token dim", "layers outside"),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("hostkernels"))


def paged(layout: KVLayout, axes: str, count: int, tokens: int, padding: int, odd: int, seed: int) -> DevicePages:
    """Pages full of random bytes, each axis `padding` numbers longer in memory than it shows, `odd` numbers off."""
    sizes = {"layer": layout.layers, "kv": 2, "head": layout.kv_heads, "dim": layout.head_dim} | {
        "page": count,
        "token": tokens,
    }
    order = axes.split()
    shape = [sizes[name] for name in order]
    apart = [
        n
        for name, n in sizes.items()
        if name not in order and name in ("layer", "kv") and (layout.kind, name) != ("mla", "kv")
    ]
    rng = np.random.default_rng(seed)
    tensors = []
    for _ in range(int(np.prod(apart))):
        large = [size + padding for size in shape]
        data = rng.integers(0, 256, (int(np.prod(large)) + odd) * layout.itemsize, dtype=np.uint8)
        tensor = torch.from_numpy(data).view(layout.torch_dtype)[odd:].view(large)
        tensors.append(tensor[tuple(slice(size) for size in shape)])
    return DevicePages(layout, tensors, axes)


def indexed(pages: DevicePages, axes: str, row: np.ndarray) -> torch.Tensor:
    """A block by torch's indexing: (layers, 2, kv_heads, tokens, head_dim), or MLA's (layers, tokens, head_dim)."""
    order = axes.split()
    each = []
    for tensor in pages.tensors:
        canonical = [n for n in ("layer", "kv", "head", "page", "token", "dim") if n in order]
        block = tensor.permute([order.index(n) for n in canonical])
        at = canonical.index("page")
        block = block.index_select(at, torch.from_numpy(row.astype(np.int64)))
        each.append(block.flatten(at, at + 1))
    return torch.stack(each).reshape(pages.layout.shape)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVLayout, str, int, int, int, int, int, int]:
    mla = draw(st.booleans())
    tokens, several = draw(st.sampled_from([1, 3, 4, 16])), draw(st.integers(1, 3))
    layout = KVLayout(
        layers=draw(st.integers(1, 4)),
        kv_heads=1 if mla else draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=draw(st.sampled_from([1, 3, 8, 16, 36, 64, 576])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "uint8"])),
        tokens_per_block=tokens * several,
        kind="mla" if mla else "mha",
    )
    axes = draw(st.sampled_from(MLA_ORDERS if mla else ORDERS))[0]
    padding, odd = draw(st.sampled_from([0, 0, 1, 8])), draw(st.sampled_from([0, 0, 1, 4]))
    return layout, axes, tokens, several, padding, odd, draw(st.integers(1, 5)), draw(st.integers(0, 1000))


@settings(max_examples=250, deadline=None)
@given(cases(), st.booleans())
def test_every_layout_gathers_and_scatters_as_torch_indexes(host: HostKernels, case: tuple, backwards: bool) -> None:
    layout, axes, tokens, several, padding, odd, blocks, seed = case
    host.backwards(backwards)
    pages = paged(layout, axes, blocks * several + 2, tokens, padding, odd, seed)
    rows = np.random.default_rng(seed).permutation(pages.count)[: blocks * several].reshape(blocks, several)
    extents = np.full((blocks, layout.slot_bytes), 0x55, np.uint8)
    crc = host.run("gather", pages, rows, extents)
    for block in range(blocks):
        assert np.array_equal(extents[block, : layout.block_bytes], raw(indexed(pages, axes, rows[block])))
        assert not extents[block, layout.block_bytes :].any()
        assert crc[block] == crc32c.crc32c(extents[block].tobytes())

    target = paged(layout, axes, pages.count, tokens, padding, odd, seed + 1)
    before = [tensor.clone() for tensor in target.tensors]
    scattered = host.run("scatter", target, rows, extents)
    assert np.array_equal(scattered, crc)
    for block in range(blocks):
        assert np.array_equal(raw(indexed(target, axes, rows[block])), extents[block, : layout.block_bytes])
    at = axes.split().index("page")
    others = torch.from_numpy(np.setdiff1d(np.arange(pages.count), rows))
    for now, then in zip(target.tensors, before, strict=True):
        assert torch.equal(
            now.index_select(at, others).contiguous().view(torch.uint8),
            then.index_select(at, others).contiguous().view(torch.uint8),
        ), "another page was touched"


def test_padding_between_pages_is_left_alone(host: HostKernels) -> None:
    layout = KVLayout(layers=2, kv_heads=3, head_dim=5, dtype="uint8", tokens_per_block=7)
    axes = "kv page token head dim"
    pages = paged(layout, axes, 3, 7, 2, 1, 0)
    memory = [t.untyped_storage() for t in pages.tensors]
    before = [bytes(m) for m in memory]
    extents = np.zeros((2, 4096), np.uint8)
    host.run("gather", pages, [[2], [0]], extents)
    host.run("scatter", pages, [[2], [0]], extents)
    assert [bytes(m) for m in memory] == before


@pytest.mark.parametrize("extent", [4096, 8192, 65536, 69632, 1 << 20, (1 << 20) + 4096, 3 << 20])
def test_checksums_of_every_size_are_the_librarys(host: HostKernels, extent: int) -> None:
    for short in (0, 1, 15, 4095):
        layout = KVLayout.raw(extent - short)
        pages = paged(layout, "page token dim", 3, 1, 0, 0, extent)
        extents = np.full((2, extent), 7, np.uint8)
        crc = host.run("gather", pages, [[1], [2]], extents)
        assert crc.tolist() == [crc32c.crc32c(e.tobytes()) for e in extents]
        extents[1, extent // 2] ^= 1
        assert (host.run("scatter", pages, [[1], [2]], extents) == crc).tolist() == [True, False]


def test_without_checksums_bytes_move_all_the_same(host: HostKernels) -> None:
    layout = KVLayout.raw(5000)
    pages = paged(layout, "page token dim", 2, 1, 0, 0, 0)
    extents = np.zeros((1, 8192), np.uint8)
    assert host.run("gather", pages, [[1]], extents, checksums=False).tolist() == [0]
    assert np.array_equal(extents[0, :5000], raw(pages.tensors[0][1]))


@pytest.mark.parametrize(
    ("axes", "tensors", "message"),
    [
        ("page token dim", 1, "does not name the axes of kind='mha'"),
        ("page page head token dim", 1, "does not name the axes"),
        ("page head token dim", 1, "1 tensors for axes='page head token dim'. Give 4"),
        ("page token head dim", 4, "does not fit"),
    ],
)
def test_what_does_not_fit_is_refused(axes: str, tensors: int, message: str) -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, dtype="float16", tokens_per_block=4)
    with pytest.raises(LayoutError, match=message):
        DevicePages(layout, [torch.zeros(5, 2, 4, 8, dtype=torch.float16)] * tensors, axes)


def test_page_numbers_are_checked() -> None:
    pages = paged(KVLayout.raw(64), "page token dim", 3, 1, 0, 0, 0)
    for bad in ([0, 3], [-1, 0]):
        with pytest.raises(LayoutError, match=r"is not among 3\. Use 0 to 2"):
            pages.name(np.array(bad), 2)
    with pytest.raises(LayoutError, match="for 2 blocks"):
        pages.name(np.array([0]), 2)
    names = pages.name(np.array([2, 1]), 2)
    assert pages.rows(names).tolist() == [[2], [1]] and pages.named(names).all()
    pages.forget(names)
    assert not pages.named(np.array([pages.end, 0], np.uint64)).any()


# ---- compiled for GPUs


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="need CuPy"):
        kernels.load(0)


def test_nvrtc_compiles_every_kernel_for_three_architectures(summary: list[str]) -> None:
    if importlib.util.find_spec("cupy") is None:
        if sys.version_info < (3, 11):
            pytest.skip("tools/setup installs CuPy for Python 3.11 and newer")
        missing("CuPy is not installed: tools/setup installs it, with NVRTC, from PyPI where it can")
    from cupy.cuda import nvrtc

    sizes = []
    for architecture in ARCHITECTURES:
        program = nvrtc.createProgram(kernels.source(), "kernels.cu", (), ())
        nvrtc.compileProgram(program, (*kernels.OPTIONS, f"-arch=sm_{architecture}"))
        cubin = nvrtc.getCUBIN(program)
        assert cubin.startswith(b"\x7fELF") and not nvrtc.getProgramLog(program).strip("\0\n")
        assert all(f".text.{name}\0".encode() in cubin for name in kernels.NAMES)
        sizes.append(len(cubin))
        nvrtc.destroyProgram(program)
    major, minor = nvrtc.getVersion()
    which = f"sm_{', sm_'.join(ARCHITECTURES)}"
    summary.append(f"kernels: NVRTC {major}.{minor} compiles {len(kernels.NAMES)} for {which}: {sizes} bytes")


def test_no_kernel_spills_registers(tmp_path: Path, summary: list[str]) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc, whose ptxas says how many registers a kernel takes")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    code = tmp_path / "kernels.cu"
    code.write_text(kernels.source())
    for architecture in [a for a in ARCHITECTURES if f"sm_{a}" in known]:
        command = [
            nvcc,
            "-std=c++17",
            f"-arch=sm_{architecture}",
            "-Xptxas",
            "-v",
            "-cubin",
            "-o",
            str(tmp_path / "out"),
            str(code),
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        names = re.findall(r"entry function '(\w+)'", told)
        registers = dict(zip(names, map(int, re.findall(r"Used (\d+) registers", told)), strict=True))
        assert set(registers) == set(kernels.NAMES)
        assert set(re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", told)) == {
            ("0", "0", "0")
        }
        assert max(registers.values()) <= 64, "more than 1,024 threads must fit a multiprocessor"
        summary.append(f"kernels: sm_{architecture}: no spills, {max(registers.values())} registers at most")


def test_a_wheel_brings_the_source(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("__pycache__", "*.nb[ic]")
    shutil.copytree(TESTS.parent / "gdskv", copy / "gdskv", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TESTS.parent / name, copy)
    subprocess.run(command, check=True, cwd=copy)
    (wheel,) = tmp_path.glob("*.whl")
    assert zipfile.ZipFile(wheel).read("gdskv/io/kernels.cu").decode() == kernels.source()
