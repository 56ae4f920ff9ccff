"""What is taken from vLLM's configuration and what is refused: without vLLM, on objects with the same attributes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gdskv
from gdskv.engines.vllm_settings import cache_config, files_digest, namespace, refuse, retention_of


class FullAttentionSpec:
    block_size = 32


class SlidingWindowSpec:
    block_size = 32


def made(kv: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """A configuration; `changes` by path, such as ``cache__block_size=16``."""
    config = SimpleNamespace(
        model=SimpleNamespace(
            model="llama",
            dtype="torch.bfloat16",
            seed=0,
            quantization=None,
            revision="abc",
            hf_config=SimpleNamespace(
                to_dict=lambda: {"layers": 2, "_name_or_path": "/x", "rope_theta": 1e4}, _commit_hash=None
            ),
        ),
        cache=SimpleNamespace(
            block_size=32,
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
            enable_prefix_caching=True,
            calculate_kv_scales=False,
        ),
        parallel=SimpleNamespace(
            world_size=2,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=0,
        ),
        load=SimpleNamespace(load_format="auto"),
        device=SimpleNamespace(device_type="cpu"),
        kv_transfer=SimpleNamespace(kv_connector_extra_config=kv or {}),
        lora=None,
        speculative=None,
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(getattr(config, part) if name else config, name or part, value)
    names = {name + ("_transfer_config" if name == "kv" else "_config"): value for name, value in vars(config).items()}
    return SimpleNamespace(**names)


def groups(*specs: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


ONE = groups(FullAttentionSpec())


def test_a_plain_model_is_taken() -> None:
    assert refuse(made(), ONE) is None
    kinds = {"a": FullAttentionSpec(), "b": FullAttentionSpec()}
    uniform = groups(SimpleNamespace(block_size=32, kv_cache_specs=kinds))
    assert refuse(made(), uniform) is None
    kinds["b"] = SlidingWindowSpec()
    with pytest.raises(gdskv.ConfigError, match="of kind SlidingWindowSpec"):
        refuse(made(), uniform)


@pytest.mark.parametrize(
    ("changes", "kv_cache", "words"),
    [
        ({"cache__prefix_caching_hash_algo": "builtin"}, ONE, "Set --prefix-caching-hash-algo sha256"),
        ({"cache__enable_prefix_caching": False}, ONE, "Set --enable-prefix-caching"),
        ({}, groups(FullAttentionSpec(), SlidingWindowSpec()), "2 groups .* Set --disable-hybrid-kv-cache-manager"),
        ({}, groups(SlidingWindowSpec()), "of kind SlidingWindowSpec"),
        ({"cache__calculate_kv_scales": True}, ONE, "Use a checkpoint that has the scales"),
        ({"parallel__decode_context_parallel_size": 2}, ONE, "decode_context_parallel_size=2 is not supported"),
    ],
)
def test_what_is_refused_says_what_to_set(changes: dict[str, Any], kv_cache: Any, words: str) -> None:
    with pytest.raises(gdskv.ConfigError, match=words):
        refuse(made(**changes), kv_cache)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__model": "other"},
        {"model__revision": "def"},
        {"model__dtype": "torch.float16"},
        {"model__quantization": "fp8"},
        {"model__hf_config": SimpleNamespace(to_dict=lambda: {"layers": 2, "rope_theta": 2e4}, _commit_hash=None)},
        {"cache__block_size": 16},
        {"cache__cache_dtype": "fp8"},
        {"cache__prefix_caching_hash_algo": "sha256_cbor"},
        {"parallel__tensor_parallel_size": 1},
        {"parallel__pipeline_parallel_size": 2},
        {"load__load_format": "dummy"},
        {"speculative": SimpleNamespace(method="eagle", model="draft")},
        {"lora": SimpleNamespace(max_lora_rank=16)},
    ],
)
def test_whatever_kv_bytes_depend_on_changes_the_namespace(changes: dict[str, Any]) -> None:
    layout = gdskv.KVLayout.raw(4096)
    plain = namespace(made()).digest(layout)
    assert namespace(made(**changes)).digest(layout) != plain
    assert namespace(made()).digest(layout) == plain


def test_ranks_and_geometries_of_kv_tensors_do_not_meet() -> None:
    layout = gdskv.KVLayout.raw(4096)
    spaces = [namespace(made(), rank=r, shapes=shapes) for r in (0, 1) for shapes in (["a"], ["b"], ["a", "b"])]
    assert len({space.digest(layout) for space in spaces}) == 6


def test_a_hash_seed_is_part_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = gdskv.KVLayout.raw(4096)
    plain = namespace(made()).digest(layout)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert namespace(made()).digest(layout) != plain


def test_files_of_a_model_that_change_in_place_are_another_revision(tmp_path: Path) -> None:
    assert files_digest("meta-llama/Llama") == ""
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = files_digest(str(tmp_path))
    (tmp_path / "notes.md").write_text("not weights")
    assert files_digest(str(tmp_path)) == before != ""
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert files_digest(str(tmp_path)) != before


def test_each_rank_gets_its_share_in_a_folder_of_its_own(tmp_path: Path) -> None:
    given = {"host_bytes": "8MiB", "disk_bytes": "32MiB", "directories": [str(tmp_path)], "min_free": 0}
    whole = cache_config(made(given))
    assert (whole.host_bytes, whole.disk_bytes) == (8 << 20, 32 << 20)
    part = cache_config(made(given), rank=1)
    assert (part.host_bytes, part.disk_bytes, part.directories) == (4 << 20, 16 << 20, (tmp_path / "rank1",))
    assert part.directories[0].is_dir()
    other = cache_config(made(given, parallel__data_parallel_rank=1), rank=1)
    assert other.directories == (tmp_path / "replica1-rank1",)


def test_settings_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "kv.toml").write_text("host_bytes = '1GiB'\n")
    config = cache_config(made({"config": str(tmp_path / "kv.toml"), "host_clean": 0.5}))
    assert config.host_bytes == 1 << 30 and config.host_clean == 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device_bytes": "1GiB"}, "is vLLM's own pool"),
        ({"host_bites": "1GiB"}, "Did you mean host_bytes"),
        ({"disk_bytes": "1GiB", "directories": ["/nowhere"]}, "mkdir -p /nowhere"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(gdskv.ConfigError, match=words):
        cache_config(made(given), rank=0)


def test_a_requests_retention_is_read_from_its_parameters() -> None:
    assert retention_of(None) is None and retention_of({"other": 1}) is None
    wish = retention_of({"gdskv": {"ttl": 3600, "priority": 80, "tenant": "a"}})
    assert wish == gdskv.Retention(ttl=3600, priority=80, tenant="a")
    parts = retention_of({"gdskv": {"ranges": [{"start": 0, "end": 64, "ttl": 60}], "decode_priority": 10}})
    assert parts is not None and parts.ranges == (gdskv.TokenRange(0, 64, ttl=60),) and parts.decode_priority == 10
    for wrong in ({"ttl": -1}, {"tll": 1}, {"priority": 101}, {"ranges": [{"begin": 1}]}):
        with pytest.raises((gdskv.RetentionError, TypeError)):
            retention_of({"gdskv": wrong})
