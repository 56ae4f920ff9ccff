"""Block keys: known answers, the chain, domains, wrong input."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdskv import KeyFormatError, block_keys, extend_keys, keys_from_hashes
from gdskv.keys import root_key

NAMESPACE = bytes(range(16))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def hexes(keys):
    return [np.asarray(key, dtype="<u8").tobytes().hex() for key in keys]


def twin(token_ids, size, namespace=b"", salt=b"", adapter=b""):
    """The definition, written out."""
    root = size.to_bytes(4, "little")
    for part in (namespace, salt, adapter):
        root += len(part).to_bytes(4, "little") + part
    key = blake2b(root, digest_size=16, person=b"gdskv-root").digest()
    keys = []
    for first in range(0, len(token_ids) - size + 1, size):
        words = b"".join(token.to_bytes(4, "little") for token in token_ids[first : first + size])
        key = blake2b(key + words, digest_size=16, person=b"gdskv-block").digest()
        keys.append(key.hex())
    return keys


@given(tokens, st.integers(1, 9), st.binary(max_size=4), st.binary(max_size=4), st.binary(max_size=4))
def test_keys_are_what_their_definition_says(token_ids, size, namespace, salt, adapter):
    keys = block_keys(token_ids, size, namespace=namespace, salt=salt, adapter=adapter)
    assert keys.dtype == np.uint64
    assert keys.shape == (len(token_ids) // size, 2)
    assert hexes(keys) == twin(token_ids, size, namespace, salt, adapter)


KNOWN = "8038261405009423237.4983588945764619845.1709324012158996768.15696085875655702873"


def test_keys_are_the_same_in_every_process():
    code = "import gdskv, numpy; print(*gdskv.block_keys(range(40), 16, namespace=bytes(range(16)), salt=b's',"
    code += "adapter=b'a', content=[(20, b'image')]).view('u8').ravel().tolist(), sep='.')"
    for seed in ("0", "1"):
        run = [sys.executable, "-c", code]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        assert subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout.strip() == KNOWN


def test_every_kind_of_sequence_gives_the_same_keys():
    torch = pytest.importorskip("torch")
    ids = [5, 7, 2**31 + 1, 9]
    keys = hexes(block_keys(ids, 2))
    for same in (tuple(ids), np.array(ids), np.array(ids, dtype=np.uint32), np.array(ids, dtype=object)):
        assert hexes(block_keys(same, 2)) == keys
    assert hexes(block_keys(torch.tensor(ids), 2)) == keys
    assert hexes(block_keys(np.array([ids, ids]).T[:, 0], 2)) == keys, "strided"


def test_only_full_blocks_have_keys():
    for empty in ([], (), np.empty(0, np.int64), [1, 2, 3]):
        assert block_keys(empty, 4).shape == (0, 2)


@given(tokens, tokens, st.integers(1, 5))
def test_sequences_share_keys_exactly_as_far_as_they_share_full_blocks(first, second, size):
    a, b = hexes(block_keys(first, size)), hexes(block_keys(second, size))
    shared = 0
    while shared < min(len(a), len(b)) and first[: (shared + 1) * size] == second[: (shared + 1) * size]:
        shared += 1
    assert a[:shared] == b[:shared]
    assert not set(a[shared:]) & set(b[shared:])


@given(tokens, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_can_be_continued(token_ids, size, blocks):
    content = [(i, bytes([i])) for i in range(0, len(token_ids), 3)]
    keys = block_keys(token_ids, size, namespace=NAMESPACE, content=content)
    blocks = min(blocks, len(keys))
    last = keys[blocks - 1] if blocks else root_key(size, namespace=NAMESPACE)
    first = blocks * size
    rest = extend_keys(last, token_ids[first:], size, first_token=first, content=content)
    assert hexes(rest) == hexes(keys[blocks:])


def test_namespace_salt_adapter_content_and_block_size_are_domains_of_their_own():
    ids = [1] * 8
    variants = [
        {},
        {"namespace": b"x"},
        {"salt": b"x"},
        {"adapter": b"x"},
        {"salt": b"xy"},
        {"salt": b"x", "adapter": b"y"},
        {"content": [(0, b"x")]},
        {"content": [(1, b"x")]},
        {"content": [(0, b"x"), (1, b"")]},
        {"content": [(0, b"x"), (0, b"y")]},
        {"content": [(0, b"xy")]},
    ]
    keys = [hexes(block_keys(ids, 4, **variant)) for variant in variants]
    keys += [hexes(block_keys(ids, 2)), hexes(block_keys(ids, 1))]
    every = [key for one in keys for key in one]
    assert len(set(every)) == len(every)


def test_a_content_id_enters_its_block_and_all_later_ones():
    ids = list(range(16))
    plain = hexes(block_keys(ids, 4))
    image = hexes(block_keys(ids, 4, content=[(5, b"image")]))
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False]
    order = [(9, b"b"), (5, b"a")]
    assert hexes(block_keys(ids, 4, content=order)) == hexes(block_keys(ids, 4, content=order[::-1]))


WRONG_IDS = [
    [1, -1],
    [2**32],
    [2**64],
    [1, 2.0],
    [1, None],
    [True, False],
    ["1"],
    "12",
    [[1, 2]],
    [[1], [2, 3]],
    np.array([[1, 2]]),
    np.array([1.0]),
    np.array(3),
    None,
    7,
]


@pytest.mark.parametrize("wrong", WRONG_IDS, ids=repr)
def test_what_are_no_token_ids_is_refused(wrong):
    with pytest.raises(KeyFormatError) as error:
        block_keys(wrong, 1)
    assert "\n" not in str(error.value)


def test_the_wrong_token_is_named():
    with pytest.raises(KeyFormatError, match=r"token_ids\[2\]=-5 .* 0 to 4294967295"):
        block_keys([1, 2, -5], 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tokens_per_block": 0}, "tokens_per_block=0"),
        ({"tokens_per_block": 1.5}, "tokens_per_block=1.5"),
        ({"salt": "x"}, "salt='x' is not bytes"),
        ({"namespace": None}, "namespace=None"),
        ({"content": [(3, b"x")]}, "content position 3 lies outside the 3 tokens"),
        ({"content": [(-1, b"x")]}, "content position -1"),
        ({"content": [(0, "x")]}, "'x' is not bytes"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(KeyFormatError, match=named):
        block_keys([1, 2, 3], **{"tokens_per_block": 2, **arguments})


def test_a_chain_continues_at_a_block():
    with pytest.raises(KeyFormatError, match="first_token=3"):
        extend_keys(root_key(2), [1, 2], 2, first_token=3)
    with pytest.raises(KeyFormatError, match="last_key has 8 bytes"):
        extend_keys(np.zeros(1, np.uint64), [1, 2], 2)


def test_an_engines_hashes_become_keys():
    hashes = [bytes([i]) * 32 for i in range(3)]
    keys = keys_from_hashes(hashes, namespace=NAMESPACE)
    assert keys.shape == (3, 2)
    assert keys.dtype == np.uint64
    assert len(set(hexes(keys) + hexes(keys_from_hashes(hashes)))) == 6
    assert keys_from_hashes([]).shape == (0, 2)


@pytest.mark.parametrize("wrong", [hash("x"), b"12345678", "ab" * 16, None])
def test_hashes_that_look_process_local_are_refused_with_the_setting_that_fixes_it(wrong):
    with pytest.raises(KeyFormatError, match=r"hash 1 .*--prefix-caching-hash-algo sha256"):
        keys_from_hashes([bytes(32), wrong])
