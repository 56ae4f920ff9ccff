"""CacheConfig: sources, wrong values, sizing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdskv import CacheConfig, ConfigError, GdskvError, KVLayout

MIB = 1 << 20


def test_import_is_lazy_and_needs_no_torch():
    code = "import sys, gdskv; gdskv.CacheConfig; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_sizes_are_read_from_text():
    config = CacheConfig(device_bytes="8GiB", host_bytes=4096, disk_bytes="1.5 TiB", directories=["/a", "/b"])
    assert (config.device_bytes, config.host_bytes, config.disk_bytes) == (8 << 30, 4096, 3 << 39)
    assert config.directories == (Path("/a"), Path("/b"))


def test_one_directory_needs_no_list():
    assert CacheConfig(directories="/a").directories == (Path("/a"),)
    assert CacheConfig(directories=Path("/a")).directories == (Path("/a"),)


def test_keywords_win_over_variables_and_those_over_the_file(tmp_path, monkeypatch):
    file = tmp_path / "kv.toml"
    file.write_text('host_bytes = "1MiB"\nqueue_depth = 32\nspill = "reused"\ndirectories = ["/a"]\n')
    monkeypatch.setenv("GDSKV_QUEUE_DEPTH", "64")
    monkeypatch.setenv("gdskv_spill", "retained")
    monkeypatch.setenv("GDSKV_DIRECTORIES", "/x:/y")
    config = CacheConfig.from_toml(file, spill="all")
    assert (config.host_bytes, config.queue_depth, config.spill) == (MIB, 64, "all")
    assert config.directories == (Path("/x"), Path("/y"))
    sources = config.sources()
    assert sources["host_bytes"] == f"file {file}"
    assert sources["queue_depth"] == "variable GDSKV_QUEUE_DEPTH"
    assert sources["spill"] == "keyword"
    assert sources["device"] == "default"


@pytest.mark.parametrize(("given", "free"), [(0.1, 0.1), ("0.25", 0.25), (0, 0.0), ("10GiB", 10 << 30), (5000, 5000)])
def test_min_free_is_a_share_or_a_size(given, free):
    assert CacheConfig(min_free=given).min_free == free


WRONG = [
    ({"disk_bytes": -1}, "disk_bytes=-1"),
    ({"disk_bytes": "lots"}, "disk_bytes='lots'"),
    ({"host_bytes": True}, "host_bytes=True"),
    ({"host_bytes": None}, "host_bytes=None"),
    ({"disk_bytes": "1TiB"}, "disk_bytes=1TiB has no place"),
    ({"directories": ["/a", "/a/../a"]}, "twice"),
    ({"directories": [""]}, "directories="),
    ({"directories": 3}, "directories=3"),
    ({"min_free": -0.1}, "min_free=-0.1"),
    ({"min_free": float("nan")}, "min_free=nan"),
    ({"min_free": "some"}, "min_free='some'"),
    ({"device": "GPU 0"}, "device='GPU 0'"),
    ({"device": 0}, "device=0"),
    ({"host_clean": 1.5}, "host_clean=1.5"),
    ({"host_clean": float("nan")}, "host_clean=nan"),
    ({"policy": "fifo"}, "policy='fifo'"),
    ({"spill": "none"}, "spill='none'"),
    ({"on_expiry": "keep"}, "on_expiry='keep'"),
    ({"retained_fraction": -1}, "retained_fraction=-1"),
    ({"tenant_fraction": 2}, "tenant_fraction=2"),
    ({"protect_unexpired": "perhaps"}, "protect_unexpired='perhaps'"),
    ({"checksums": 3}, "checksums=3"),
    ({"durability": "never"}, "durability='never'"),
    ({"read_threads": -1}, "read_threads=-1"),
    ({"write_threads": 1.5}, "write_threads=1.5"),
    ({"queue_depth": 15}, "queue_depth=15"),
    ({"queue_depth": 65537}, "queue_depth=65537"),
    ({"write_queue": 0}, "write_queue=0"),
    ({"max_extent": 5000}, "max_extent=5000"),
    ({"max_extent": "2GiB"}, "max_extent=2147483648"),
    ({"stripe_width": 0}, "stripe_width=0"),
    ({"disk_byte": 1}, "Did you mean disk_bytes?"),
]


@pytest.mark.parametrize(("settings", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_value_is_one_line_that_names_it(settings, named):
    with pytest.raises(ConfigError) as error:
        CacheConfig(**settings)
    message = str(error.value)
    assert named in message
    assert "\n" not in message
    assert message.count(". ") + message.endswith((".", "?")) >= 2, "a problem and a remedy"


def test_two_wrong_values_are_two_lines():
    with pytest.raises(ConfigError) as error:
        CacheConfig(spill="x", policy="y")
    assert len(str(error.value).splitlines()) == 2


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("GDSKV_HOST_BYTES", "64GB!")
    with pytest.raises(ConfigError, match=r"64GB!.*variable GDSKV_HOST_BYTES"):
        CacheConfig()


def test_variables_that_are_no_settings_are_left_alone(monkeypatch):
    monkeypatch.setenv("GDSKV_TRACES", "/somewhere")
    assert CacheConfig().host_bytes == 0


@pytest.mark.parametrize("content", [None, b"host_bytes = ", b"\xff\xfe", b"host_byte = 3\n", b"[disk]\nbytes = 3\n"])
def test_a_wrong_file_is_refused(tmp_path, content):
    file = tmp_path / "kv.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"kv\.toml"):
        CacheConfig.from_toml(file)


def test_a_config_cannot_be_changed():
    config = CacheConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.host_bytes = 3


def test_sizing_counts_whole_blocks_and_shows_what_was_rounded_off():
    layout = KVLayout.raw(5000)
    config = CacheConfig(device_bytes=3 * 8192 + 5, host_bytes="1MiB", disk_bytes="4MiB", directories=["/a", "/b"])
    sizing = config.sizing(layout)
    assert (sizing.device_blocks, sizing.host_blocks, sizing.disk_blocks) == (3, 128, 512)
    assert (sizing.device_bytes_asked, sizing.device_bytes_used) == (3 * 8192 + 5, 3 * 8192)
    lines = str(sizing).splitlines()
    assert lines[1].split() == ["device", "3", "24.00KiB", "24KiB", "5B"]
    assert "8KiB" in lines[-1]


def test_an_absent_tier_has_no_blocks():
    sizing = CacheConfig(host_bytes=4096).sizing(KVLayout.raw(4096))
    assert (sizing.device_blocks, sizing.host_blocks, sizing.disk_blocks) == (0, 1, 0)


@pytest.mark.parametrize(
    ("settings", "block", "named"),
    [
        ({"host_bytes": 4095}, 4096, "host_bytes=3.99KiB is less than one block, 4KiB"),
        ({"device_bytes": 5000}, 5000, "device_bytes=4.88KiB is less than one block, 8KiB"),
        ({"disk_bytes": 8192, "directories": ["/a", "/b", "/c"]}, 4096, "each of 3 directories, 12KiB"),
        ({"host_bytes": 1 << 43}, 4096, "limit is 2147483647"),
    ],
)
def test_a_tier_that_cannot_hold_its_blocks_is_refused(settings, block, named):
    with pytest.raises(ConfigError, match=named):
        CacheConfig(**settings).sizing(KVLayout.raw(block))


def test_public_names_exist():
    import gdskv

    assert issubclass(gdskv.DirectoryBusy, GdskvError)
    assert issubclass(gdskv.DirectoryError, OSError)
    assert set(gdskv.__all__) <= set(dir(gdskv))
    for name in gdskv.__all__:
        assert getattr(gdskv, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        gdskv.nothing  # noqa: B018


def test_code_compiles_where_no_cache_folder_can_be_written(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text(
        "from gdskv._jit import jit\n\n@jit(nogil=True)\ndef double(x):\n    return 2 * x\n\nprint(double(21))\n"
    )
    # A cache folder below a file cannot be made, also not by root.
    impossible = {"NUMBA_CACHE_DIR": "", "HOME": str(source), "XDG_CACHE_HOME": str(source)}
    code = f"import numba.core.caching as c; c.CacheImpl._locator_classes = []; exec(open({str(source)!r}).read())"
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, env={**os.environ, **impossible}, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "42"
