"""``gdskv demo``: a model's KV goes through all tiers and comes back to the same answers, sooner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import Command

from gdskv.cli import demo

transformers = pytest.importorskip("transformers")


@pytest.fixture
def gdskv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command line, with short documents and an empty working directory."""
    monkeypatch.setattr(demo, "_DOCUMENT_TOKENS", 256)
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    import torch

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        eos_token_id=None,
        initializer_range=0.15,
    )
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_answers_are_equal_and_blocks_come_from_every_tier(gdskv: Command, folder: Path, tmp_path: Path) -> None:
    answer = gdskv("demo", "--model", folder, "--dir", tmp_path, "--tokens-per-block", 32, "--json")
    result = answer.json
    assert answer.code == 0
    assert result["tokens_equal"] is True
    assert result["requests"] == len(result["rows"]) == 14
    assert result["blocks_recovered"] >= 6 * 8, "the first process was killed, and its blocks are still there"
    assert result["wrong_blocks"] == 0
    assert min(result[f"blocks_from_{tier}"] for tier in ("device", "host", "disk")) > 0
    assert result["ttft_cold_ms"] > 0 < result["ttft_warm_ms"]
    second = [row for row in result["rows"] if row["round"] > 1]
    assert all(row["device"] + row["host"] + row["disk"] == 256 for row in second)


def test_a_table_and_one_sentence_for_people(gdskv: Command, folder: Path) -> None:
    code, out, err = gdskv("demo", "--model", folder, "--dtype", "float32")
    assert code == 0
    assert "every answer is the same as without a cache." in " ".join(out.split())
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no-such-model"], "no-such-model is not a model"),
        (["--model", "MODEL", "--dir", "no-such-directory"], "no-such-directory"),
        (["--model", "MODEL", "--tokens-per-block", 0], "tokens_per_block=0"),
        (["--model", "MODEL", "--dtype", "float7"], "dtype='float7'"),
        (["--dtype"], "--dtype"),
    ],
)
def test_wrong_input_is_one_clear_error_with_nothing_left_behind(
    gdskv: Command, folder: Path, arguments: list[object], words: str
) -> None:
    code, out, err = gdskv("demo", "--json", *(folder if a == "MODEL" else a for a in arguments))
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert "Traceback" not in err
    assert os.listdir() == []
