"""Causal language models for the embedded engine: a folder's model or a built-in random one, and what gdskv must know
of either. Knows Hugging Face transformers, which it imports only when called, and must not know a cache.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from gdskv.errors import ModelError
from gdskv.layout import KVLayout, Namespace

__all__ = ["layout_of", "load_model", "namespace_of", "random_llama", "with_dtype"]

_DTYPES = ("float32", "bfloat16", "float16")


def random_llama(seed: int = 0) -> Any:
    """Build a Llama of 28 M random float32 parameters, the same for the same ``seed``.

    Returns
    -------
    transformers.LlamaForCausalLM
        In evaluation mode; 8 layers, 8 heads and 4 KV heads of 64, 8,192 tokens.
    """
    transformers = _transformers()
    import torch

    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,  # nothing was learned, so no token means the end
        initializer_range=0.15,  # with the usual 0.02 attention sees nothing, and any prompt gives the same answer
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()


def load_model(path: Path) -> Any:
    """Load a causal language model from a local folder; nothing is downloaded.

    Raises
    ------
    ModelError
        ``path`` is not a folder with a model that transformers can load.
    """
    transformers = _transformers()
    remedy = "Give a folder with config.json and weights, as save_pretrained writes it."
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model: it has no config.json. {remedy}")
    transformers.utils.logging.disable_progress_bar()  # it would write to standard error even where nobody looks
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True).eval()
    except Exception as error:  # whatever its many parts raise on a broken folder
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(". ")
        raise ModelError(f"{path} is not a model that transformers can load: {reason}. {remedy}") from None


def with_dtype(model: Any, dtype: str) -> Any:
    """Return ``model`` with its parameters in ``dtype``.

    Raises
    ------
    ModelError
        No model computes in ``dtype``.
    """
    import torch

    if dtype not in _DTYPES:
        raise ModelError(f"dtype={dtype!r} is not one that a model computes in. Choose one of {', '.join(_DTYPES)}.")
    return model.to(getattr(torch, dtype))


def on_device(model: Any, device: str) -> Any:
    """Return ``model`` with its parameters on a torch device.

    Raises
    ------
    ModelError
        There is no such device, or it has not that much memory.
    """
    if device == "cpu":
        return model
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch says no more than that
        why = str(error).splitlines()[0]
        raise ModelError(f"device={device!r} cannot be used: {why}. Use cpu, or a device that exists.") from None


def layout_of(model: Any, tokens_per_block: int) -> KVLayout:
    """Return the layout of one block of ``model``'s KV.

    Raises
    ------
    ModelError
        Not every layer keeps the keys and values of all tokens (a sliding window, a state-space layer).
    """
    config = model.config.get_text_config()
    cache = _transformers().DynamicCache(config=model.config)
    odd = sorted({type(layer).__name__ for layer in cache.layers} - {"DynamicLayer"})
    if odd:
        raise ModelError(f"{type(model).__name__} has layers of {', '.join(odd)}: only full attention can be cached.")
    heads = config.num_attention_heads
    return KVLayout(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(model.dtype).removeprefix("torch."),
        tokens_per_block=tokens_per_block,
    )


def namespace_of(model: Any) -> Namespace:
    """Return the namespace of ``model``'s KV.

    The revision is a digest of the parameters themselves: two models of one name and shape never share a block.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or ""
    return Namespace(
        model=model.config.name_or_path or type(model).__name__,
        revision=_revision(model),
        rope={str(name): str(value) for name, value in rope.items()} if isinstance(rope, dict) else str(rope),
    )


def _revision(model: Any) -> str:
    """Digest names, shapes and a sample of every parameter: cheap for any size, and a fine-tuned copy differs."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError("transformers is not installed: pip install 'gdskv[demo]'.") from None
    return transformers
