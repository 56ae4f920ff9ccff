"""Block keys: 128 bits that name a block's content, chained over its tokens and everything before them.

Knows bytes only and must not know what is cached. The same tokens give the same keys on every machine and Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdskv.errors import KeyFormatError

if TYPE_CHECKING:
    import torch

__all__ = ["Content", "Keys", "TokenIds", "as_keys", "block_keys", "extend_keys", "keys_from_hashes", "root_key"]

Keys = npt.NDArray[np.uint64]
if TYPE_CHECKING:
    TokenIds = Sequence[int] | npt.NDArray[Any] | torch.Tensor
    Content = Sequence[tuple[int, bytes]]
else:
    TokenIds = Content = Any

_BYTES = 16
_NONE = bytes(_BYTES)  # the table's word for "empty"
_INSTEAD = b"\1" + bytes(_BYTES - 1)  # what stands for a digest that happens to be _NONE
_SHORTEST_HASH = 16  # bytes; anything shorter is a Python hash() or a truncated digest


def block_keys(
    token_ids: TokenIds,
    tokens_per_block: int,
    *,
    namespace: bytes = b"",
    salt: bytes = b"",
    adapter: bytes = b"",
    content: Content = (),
) -> Keys:
    """Return the keys of the full blocks of a sequence.

    Each key is BLAKE2b, cut to 128 bits, over the key before it, the block's tokens as uint32 and the content ids that
    stand in the block. The first one's predecessor is `root_key`. A collision takes about 2**64 hashes to find, also
    for somebody who chooses the prompts.

    Parameters
    ----------
    token_ids
        A list, tuple, 1-D integer array or 1-D tensor of ``n`` ids, each from 0 to 2**32 - 1.
    tokens_per_block
        Tokens in one block, 1 or more.
    namespace
        ``Namespace.digest(layout)``.
    salt
        What keeps users apart that must not share a cache.
    adapter
        The adapter (LoRA) of this request.
    content
        ``(position, id)`` pairs, such as the position of an image's first placeholder token and the image's hash. The
        id enters the key of the block that holds the position, and so all later ones.

    Returns
    -------
    numpy.ndarray
        uint64, shape ``(n // tokens_per_block, 2)``. No key is ``(0, 0)``.

    Raises
    ------
    KeyFormatError
        An id is out of range or no integer, or a content position lies outside the sequence.
    """
    root = root_key(tokens_per_block, namespace=namespace, salt=salt, adapter=adapter)
    return extend_keys(root, token_ids, tokens_per_block, content=content)


def root_key(tokens_per_block: int, *, namespace: bytes = b"", salt: bytes = b"", adapter: bytes = b"") -> Keys:
    """Return the predecessor of a sequence's first key: uint64, shape ``(2,)``. It names no block."""
    state = blake2b(digest_size=_BYTES, person=b"gdskv-root")
    state.update(_block_size(tokens_per_block).to_bytes(4, "little"))
    for name, value in (("namespace", namespace), ("salt", salt), ("adapter", adapter)):
        data = _bytes(name, value)
        state.update(len(data).to_bytes(4, "little") + data)
    return _to_keys(state.digest()).reshape(2)


def extend_keys(
    last_key: npt.ArrayLike,
    token_ids: TokenIds,
    tokens_per_block: int,
    *,
    first_token: int = 0,
    content: Content = (),
) -> Keys:
    """Continue a chain behind `last_key`, as decoding does, without hashing again what came before.

    Parameters
    ----------
    last_key
        uint64, shape ``(2,)``: the key of the block before `token_ids`, or `root_key`.
    token_ids
        The tokens behind that block; see `block_keys`.
    tokens_per_block
        The same as for `last_key`.
    first_token
        The position in the sequence of ``token_ids[0]``, a multiple of `tokens_per_block`.
    content
        ``(position, id)`` pairs of the whole sequence. Those before `first_token` are in `last_key` already.

    Returns
    -------
    numpy.ndarray
        uint64, shape ``(len(token_ids) // tokens_per_block, 2)``.
    """
    size = _block_size(tokens_per_block)
    tokens = _tokens(token_ids)
    blocks = len(tokens) // size
    extra = _content_by_block(content, size, first_token, len(tokens))
    key = np.asarray(last_key, dtype="<u8").tobytes()
    if len(key) != _BYTES:
        raise KeyFormatError(f"last_key has {len(key)} bytes; a key has {_BYTES}. Pass one row of an earlier result.")
    data = tokens.tobytes()
    step = 4 * size
    chain = []
    for index, begin in enumerate(range(0, blocks * step, step)):
        message = key + data[begin : begin + step]
        if index in extra:
            message += extra[index]
        key = blake2b(message, digest_size=_BYTES, person=b"gdskv-block").digest()
        if key == _NONE:
            key = _INSTEAD
        chain.append(key)
    return _to_keys(b"".join(chain))


def keys_from_hashes(hashes: Sequence[bytes], *, namespace: bytes = b"") -> Keys:
    """Return keys for an engine's own block hashes: BLAKE2b, cut to 128 bits, over the namespace and the hash.

    Parameters
    ----------
    hashes
        ``n`` digests of at least 16 bytes each, that are chained over the prompt already (SHA-256 in vLLM and SGLang).
    namespace
        ``Namespace.digest(layout)``.

    Returns
    -------
    numpy.ndarray
        uint64, shape ``(n, 2)``.

    Raises
    ------
    KeyFormatError
        A hash is not bytes, or so short that it may be one of Python's ``hash()``, which differs between processes.
    """
    data = _bytes("namespace", namespace)
    base = blake2b(len(data).to_bytes(4, "little") + data, digest_size=_BYTES, person=b"gdskv-foreign")
    keys = []
    for index, value in enumerate(hashes):
        if not isinstance(value, bytes) or len(value) < _SHORTEST_HASH:
            what = f"{len(value)} bytes long" if isinstance(value, bytes) else f"of type {type(value).__name__}"
            raise KeyFormatError(
                f"hash {index} ({value!r}) is {what}; at least {_SHORTEST_HASH} bytes are needed, the same in every "
                "process. Make the engine use SHA-256 block hashes (vLLM: --prefix-caching-hash-algo sha256)."
            )
        state = base.copy()
        state.update(value)
        key = state.digest()
        keys.append(key if key != _NONE else _INSTEAD)
    return _to_keys(b"".join(keys))


def _to_keys(data: bytes) -> Keys:
    return np.frombuffer(data, dtype="<u8").astype(np.uint64).reshape(-1, 2)


def _block_size(tokens_per_block: int) -> int:
    if isinstance(tokens_per_block, bool) or not isinstance(tokens_per_block, (int, np.integer)):
        raise KeyFormatError(f"tokens_per_block={tokens_per_block!r} is not a whole number. Give 1 or more.")
    if not 1 <= tokens_per_block < 1 << 32:
        raise KeyFormatError(f"tokens_per_block={tokens_per_block} is out of range. Give 1 or more.")
    return int(tokens_per_block)


def _bytes(name: str, value: object) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise KeyFormatError(f"{name}={value!r} is not bytes. Encode it, such as {name}=text.encode().")
    return bytes(value)


def _tokens(token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    source: Any = token_ids
    if hasattr(source, "detach"):  # a tensor, perhaps on another device; torch itself is not needed here
        source = source.detach().cpu().numpy()
    try:
        ids = np.asarray(source)
    except (OverflowError, ValueError):  # nested lists of unequal length
        ids = np.asarray(None)
    if ids.ndim != 1:
        raise KeyFormatError(f"token_ids has shape {ids.shape}; one sequence is needed. Pass a list or one row of ids.")
    if ids.size and not (ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < 1 << 32):
        for index, value in enumerate(source):
            if not _is_id(value):
                raise KeyFormatError(
                    f"token_ids[{index}]={value!r} is not a token id. Pass whole numbers from 0 to {2**32 - 1}."
                )
    return ids.astype("<u4", copy=False)


def _is_id(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= int(value) < 1 << 32


def _content_by_block(content: Content, size: int, first_token: int, tokens: int) -> dict[int, bytes]:
    if first_token < 0 or first_token % size:
        raise KeyFormatError(f"first_token={first_token} begins no block of {size} tokens. Pass a multiple of it.")
    by_block: dict[int, bytes] = {}
    for position, value in sorted(content):
        data = _bytes("a content id", value)
        if not 0 <= position < first_token + tokens:
            raise KeyFormatError(
                f"content position {position} lies outside the {first_token + tokens} tokens. Pass one inside them."
            )
        if position < first_token:
            continue
        block, offset = divmod(position - first_token, size)
        entry = offset.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data
        by_block[block] = by_block.get(block, b"") + entry
    return by_block


def as_keys(keys: object) -> Keys:
    """Return keys that a caller hands in as the array that compiled code is made for: another kind would compile anew.

    Raises
    ------
    KeyFormatError
        They are no array of uint64 with shape ``(n, 2)``.
    """
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64 or keys.ndim != 2 or keys.shape[1] != 2:
        what = f"{keys.dtype} of shape {keys.shape}" if isinstance(keys, np.ndarray) else f"a {type(keys).__name__}"
        raise KeyFormatError(
            f"keys are {what}, not uint64 of shape (n, 2). Make them with block_keys, or keys_from_hashes."
        )
    return np.require(keys, requirements=["C", "W"])
