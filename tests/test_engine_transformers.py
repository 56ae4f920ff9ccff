"""The embedded engine gives the tokens, and the logits, that it would give without a cache, whatever the tiers do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gdskv import BlockManager, CacheConfig, ConfigError, ModelError
from gdskv.engines import models
from gdskv.engines.transformers import Engine, Generation

transformers = pytest.importorskip("transformers")

BLOCK = 8
CHUNK = 16


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama small enough for a test, whose answers depend on the whole prompt."""
    import torch

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        eos_token_id=None,
        initializer_range=0.15,
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


def prompt(seed: int, tokens: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(512) for _ in range(tokens)]


class Tiers:
    """A manager with so many blocks per tier, and an engine on it that remembers its logits."""

    def __init__(self, model: Any, directory: Path, device: int, host: int = 0, disk: int = 0, io: Any = None) -> None:
        layout = models.layout_of(model, BLOCK)
        slot = layout.slot_bytes
        config = CacheConfig(
            device_bytes=device * slot,
            host_bytes=host * slot,
            disk_bytes=disk * slot,
            directories=(directory,) if disk else (),
        )
        self.time = 0.0
        self.directory = directory
        self.kv = BlockManager(config, layout, models.namespace_of(model), io=io)
        self.engine = Engine(model, self.kv, chunk_tokens=CHUNK, clock=self.clock)

    def clock(self) -> float:
        self.time += 0.001
        return self.time

    def ask(self, *prompts: list[int], tokens: int = 4) -> list[Generation]:
        generations = self.engine.generate(prompts, tokens)
        self.kv.check()
        return generations

    def push_out(self, blocks: int) -> None:
        """Run other prompts until everything before them has left the device pool."""
        for seed in range(1000, 1000 + blocks // 4 + 1):
            self.ask(prompt(seed, 4 * BLOCK), tokens=1)


@pytest.fixture
def close() -> Iterator[list[Tiers]]:
    opened: list[Tiers] = []
    yield opened
    for tiers in opened:
        tiers.kv.close()


def logits_of(model: Any, run: Any) -> list[Any]:
    """Return what ``run`` gave and the last logits of each pass of the model."""
    seen: list[Any] = []
    hook = model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits[0, -1].clone()))
    try:
        return [run(), seen]
    finally:
        hook.remove()


@pytest.mark.parametrize(("device", "host", "disk"), [(64, 0, 0), (16, 64, 0), (16, 0, 128), (16, 8, 128)])
def test_the_logits_of_a_restored_prefix_are_bit_exact(
    model: Any, tmp_path: Path, close: list[Tiers], device: int, host: int, disk: int
) -> None:
    tiers = Tiers(model, tmp_path, device, host, disk)
    close.append(tiers)
    document = prompt(0, 64)
    plain = Engine(model, None, chunk_tokens=CHUNK)
    (cold,) = tiers.ask(document + prompt(1, 5))
    if host or disk:
        tiers.push_out(device + host if disk else device)  # to the lowest tier
    again = document + prompt(2, 5)
    (without,), expected = logits_of(model, lambda: plain.generate([again], 20))
    (warm,), got = logits_of(model, lambda: tiers.ask(again, tokens=20))
    assert cold.reused == (0, 0, 0)
    assert sum(warm.reused) == 64
    assert (warm.reused[1] > 0, warm.reused[2] > 0) == (host > 8, disk > 0)
    assert warm.recomputed == 5
    assert warm.tokens == without.tokens
    assert len(got) == len(expected) - 64 // CHUNK
    assert all(a.equal(b) for a, b in zip(got[::-1], expected[::-1], strict=False))


def test_a_flipped_byte_in_the_slab_becomes_a_recompute_with_the_right_tokens(
    model: Any, tmp_path: Path, close: list[Tiers]
) -> None:
    tiers = Tiers(model, tmp_path, 16, 0, 128)
    close.append(tiers)
    asked = prompt(0, 64) + prompt(1, 5)
    contents: list[bytes] = []

    def remember(generation: Generation) -> None:
        assert generation.request is not None
        contents.extend(tiers.kv.device_pool.view(slot).tobytes() for slot in generation.request.blocks[:8].tolist())

    tiers.engine = Engine(model, tiers.kv, chunk_tokens=CHUNK, clock=tiers.clock, before_release=remember)
    (cold,) = tiers.ask(asked)
    tiers.push_out(32)
    flip(tmp_path, contents[5])
    (warm,) = tiers.ask(asked)
    assert warm.tokens == cold.tokens
    assert warm.reused == (0, 0, 4 * BLOCK)  # five good blocks, cut back to a chunk's end
    assert warm.request is not None
    assert warm.request.failed.tolist() == [5]
    (healed,) = tiers.ask(asked)
    assert healed.tokens == cold.tokens
    assert sum(healed.reused) == 64


def flip(directory: Path, content: bytes) -> None:
    """Flip one byte in the one place under ``directory`` that holds ``content``."""
    for path in directory.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(content)) >= 0:
            with open(path, "r+b") as file:
                file.seek(at + 17)
                byte = file.read(1)[0]
                file.seek(at + 17)
                file.write(bytes([byte ^ 4]))
            return
    raise AssertionError("the block is not on disk")


def test_several_requests_in_flight_get_the_answers_that_they_get_alone(
    model: Any, tmp_path: Path, close: list[Tiers]
) -> None:
    tiers = Tiers(model, tmp_path, 40, 16, 128)
    close.append(tiers)
    shared = prompt(0, 40)
    asked = [shared + prompt(seed, 3 + seed) for seed in range(1, 9)]
    alone = [Engine(model, None, chunk_tokens=CHUNK).generate([p], 12)[0].tokens for p in asked]
    assert [g.tokens for g in tiers.ask(*asked, tokens=12)] == alone
    again = tiers.ask(*asked[::-1], tokens=12)
    assert [g.tokens for g in again] == alone[::-1]
    assert all(sum(g.reused) >= 32 for g in again)


def test_generated_blocks_are_found_by_the_next_turn(model: Any, tmp_path: Path, close: list[Tiers]) -> None:
    tiers = Tiers(model, tmp_path, 64)
    close.append(tiers)
    (first,) = tiers.ask(prompt(0, 20), tokens=30)
    turn = first.prompt + first.tokens + prompt(1, 4)
    (second,) = tiers.ask(turn)
    # 49 tokens have keys and values (the last one was never fed), so 6 blocks, which are 3 chunks
    assert sum(second.reused) == 48
    assert second.tokens == Engine(model, None, chunk_tokens=CHUNK).generate([turn], 4)[0].tokens


def test_a_prompt_that_is_cached_whole_still_computes_its_last_chunk(
    model: Any, tmp_path: Path, close: list[Tiers]
) -> None:
    tiers = Tiers(model, tmp_path, 64)
    close.append(tiers)
    (first,) = tiers.ask(prompt(0, 64))
    (second,) = tiers.ask(prompt(0, 64))
    assert sum(second.reused) == 48
    assert second.tokens == first.tokens


def test_another_salt_shares_nothing(model: Any, tmp_path: Path, close: list[Tiers]) -> None:
    tiers = Tiers(model, tmp_path, 64)
    close.append(tiers)
    tiers.ask(prompt(0, 64))
    generation = tiers.engine.submit(prompt(0, 64), 1, salt=b"somebody else")
    while generation.state != "finished":
        tiers.engine.step()
    assert generation.reused == (0, 0, 0)


def test_a_prompt_larger_than_the_device_pool_runs_without_the_cache(
    model: Any, tmp_path: Path, close: list[Tiers]
) -> None:
    tiers = Tiers(model, tmp_path, 8)
    close.append(tiers)
    large, small = prompt(0, 100), prompt(1, 20)
    got = tiers.ask(large, small)
    assert got[0].request is None
    plain = Engine(model, None, chunk_tokens=CHUNK)
    assert [g.tokens for g in got] == [g.tokens for g in plain.generate([large, small], 4)]


def test_an_answer_goes_on_when_there_is_no_slot_for_its_blocks(model: Any, tmp_path: Path, close: list[Tiers]) -> None:
    tiers = Tiers(model, tmp_path, 3)
    close.append(tiers)
    asked = prompt(0, 20)
    (got,) = tiers.ask(asked, tokens=30)
    assert got.tokens == Engine(model, None, chunk_tokens=CHUNK).generate([asked], 30)[0].tokens
    assert got.saved == 3


def test_a_cancelled_request_gives_its_slots_back(model: Any, tmp_path: Path, close: list[Tiers]) -> None:
    tiers = Tiers(model, tmp_path, 8)
    close.append(tiers)
    engine = tiers.engine
    running = engine.submit(prompt(0, 60), 4)
    waiting = engine.submit(prompt(1, 60), 4)
    engine.step()
    assert (running.state, waiting.state) == ("running", "waiting")
    engine.cancel(running)
    engine.cancel(running)
    engine.step()
    assert (running.state, waiting.state) == ("cancelled", "running")
    engine.cancel(waiting)
    assert tiers.ask(prompt(2, 60))[0].request is not None


def test_a_failing_model_gives_everything_back(model: Any, tmp_path: Path, close: list[Tiers]) -> None:
    tiers = Tiers(model, tmp_path, 8)
    close.append(tiers)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of order"):
        tiers.ask(prompt(0, 60))
    hook.remove()
    assert tiers.ask(prompt(1, 60))[0].request is not None


def test_what_cannot_work_is_refused(model: Any, tmp_path: Path, close: list[Tiers]) -> None:
    tiers = Tiers(model, tmp_path, 8)
    close.append(tiers)
    with pytest.raises(ConfigError, match="chunk_tokens=12 is not a multiple"):
        Engine(model, tiers.kv, chunk_tokens=12)
    with pytest.raises(ConfigError, match="0 tokens"):
        tiers.engine.submit([])
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        tiers.engine.submit([1], 0)


def test_a_model_with_sliding_windows_is_refused() -> None:
    config = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
    )
    with pytest.raises(ModelError, match="full attention"):
        models.layout_of(transformers.MistralForCausalLM(config), 8)


def test_a_folder_without_a_model_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config"):
        models.load_model(tmp_path)
    with pytest.raises(ModelError, match="no config"):
        models.load_model(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="not a model that transformers can load") as error:
        models.load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_saved_model_loads_with_its_own_namespace(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = models.load_model(tmp_path)
    assert models.layout_of(loaded, BLOCK) == models.layout_of(model, BLOCK)
    revision = models.namespace_of(loaded).revision
    assert revision == models.namespace_of(model).revision
    next(loaded.parameters()).data[0, 0] += 1
    assert models.namespace_of(loaded).revision != revision


def test_only_dtypes_that_a_model_computes_in_are_taken(model: Any) -> None:
    with pytest.raises(ModelError, match="dtype='float7'"):
        models.with_dtype(model, "float7")


def test_the_random_llama_is_the_same_for_the_same_seed() -> None:
    one, same = models.random_llama(0), models.random_llama(0)
    assert models.namespace_of(one) == models.namespace_of(same)
    assert 25e6 < sum(p.numel() for p in one.parameters()) < 35e6
