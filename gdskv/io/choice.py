"""Which I/O engine moves the bytes of a cache, opened for its slabs.

Knows settings and engines; must not know what moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdskv.config import CacheConfig
from gdskv.errors import ConfigError
from gdskv.io import cuda, kernels
from gdskv.io.base import IOEngine, Slab
from gdskv.io.buffers import LAUNCHES, Staging
from gdskv.io.modes import Mode, missing, probe

if TYPE_CHECKING:
    from gdskv.pools.device import DevicePool
    from gdskv.pools.pages import DevicePages

__all__ = ["open_engine", "unreachable"]

log = logging.getLogger(__name__)


def unreachable(config: CacheConfig) -> str | None:
    """Why the engine of these settings cannot reach memory of a GPU, or None."""
    return 'io="posix" moves host memory only' if config.io == "posix" else missing()


def open_engine(
    config: CacheConfig,
    slabs: Sequence[Slab],
    records: Sequence[Slab],
    directories: Sequence[Path],
    device_pool: DevicePool | None,
    threads: Callable[[], Sequence[tuple[int, int]]],
    device_pages: DevicePages | None = None,
) -> tuple[IOEngine, list[Mode]]:
    """Open the engine that the settings ask for.

    Parameters
    ----------
    slabs, records
        Files of blocks and of their records; the engine numbers the second after the first.
    directories
        Where each of `slabs` lies: there the way of the bytes is probed, if KvikIO is to move them.
    device_pool
        The memory that is on a GPU.
    threads
        Tells threads to read and to write with per directory, 0 where that is not known. Asked only if our own calls
        are to move the bytes, and the settings do not say.
    device_pages
        Or the pages there that an engine keeps itself: blocks of them go through staging buffers.

    Returns
    -------
    engine, modes
        And for each directory how its bytes move.

    Raises
    ------
    ConfigError
        ``io="kvikio"`` cannot be had here, or ``require_gds`` is set and a directory is not direct.
        Of `device_pages` also: they are not on a GPU, or the kernels or the staging buffers cannot be had.
    """
    gpu = config.device.startswith("cuda") or device_pages is not None
    number = int(config.device.partition(":")[2] or 0)
    if device_pages is not None:
        number = device_pages.device
    lacking = missing() if config.io == "kvikio" or (config.io == "auto" and gpu) else None
    kvikio = lacking is None and (config.io == "kvikio" or (config.io == "auto" and gpu))
    if config.io == "kvikio" and lacking is not None:
        raise ConfigError(
            f"io='kvikio' cannot be had: {lacking}. Install gdskv[gds-cu12] on a GPU node, or use io='auto'."
        )
    if device_pages is not None and not kvikio:
        raise ConfigError(
            f"device_pages cannot be had: {unreachable(config)}. Install gdskv[gds-cu12] on a GPU node, or copy "
            "between GPU and host memory yourself."
        )
    if kvikio:
        modes = [probe(directory, number) for directory in directories]
        for directory, mode in zip(directories, modes, strict=True):
            if mode.name == "posix":
                raise ConfigError(f"{directory} cannot be used with KvikIO: {mode.why}. See gdskv doctor {directory}.")
    else:
        why = lacking or (
            f"io={config.io!r}" if config.io == "posix" else f"device={config.device!r} needs no GPU path"
        )
        modes = [Mode("posix", why)] * len(directories)
    for directory, mode in zip(directories, modes, strict=True):
        if config.require_gds and mode.name != "direct":
            raise ConfigError(
                f"require_gds=true, but {directory} is {mode.name}: {mode.why}. "
                f"See gdskv doctor {directory}, or set require_gds=false."
            )
        log.log(logging.INFO if mode.name == "direct" or not gpu else logging.WARNING, "%s: %s, %s", directory, *mode)
    if not kvikio:
        from gdskv.io.posix import PosixEngine

        settings = _settings(config)
        if not (config.read_threads and config.write_threads):
            for name, known in zip(("read_threads", "write_threads"), zip(*threads(), strict=True), strict=False):
                settings[name] = settings[name] or known
        return PosixEngine([*slabs, *records], **settings), modes
    direct = [mode.name == "direct" for mode in modes]
    if device_pages is not None:
        return _staged(config, slabs, records, direct, device_pages), modes
    from gdskv.io.kvikio import KvikioEngine

    engine = KvikioEngine(
        slabs,
        records=records,
        direct=direct,
        device=number,
        device_memory=[(device_pool.base, device_pool.bytes)] if device_pool is not None and gpu else [],
        largest=device_pool.stride if device_pool is not None else 0,
        **_settings(config),
    )
    return engine, modes


def _staged(
    config: CacheConfig, slabs: Sequence[Slab], records: Sequence[Slab], direct: list[bool], pages: DevicePages
) -> IOEngine:
    from gdskv.io.kvikio import KvikioEngine
    from gdskv.io.staging import BLOCKS, StagedEngine

    driver = cuda.load()
    assert driver is not None  # else KvikIO is missing something
    for tensor in pages.tensors:
        if not driver.is_device(tensor.data_ptr()):
            raise ConfigError(
                f"device_pages has a tensor on {tensor.device}. Give tensors on a GPU, or no device_pages and memory "
                "of the host."
            )
    functions = kernels.load(pages.device)
    staging = Staging(driver, pages.device, pages.layout.slot_bytes, config.staging_bytes)
    memory = (staging.base, staging.bytes)
    inner = None
    try:
        inner = KvikioEngine(
            slabs,
            records=records,
            direct=direct,
            device=pages.device,
            device_memory=[memory],
            unchecked=memory,
            **_settings(config),
        )
        mover = kernels.Mover(
            driver,
            staging.stream,
            functions,
            pages,
            staging.buffer_bytes,
            checksums=config.checksums,
            launches=LAUNCHES,
            blocks=min(BLOCKS, staging.buffers),
        )
    except OSError as error:
        if inner is not None:
            inner.close(1.0)
        staging.close()
        raise ConfigError(
            f"the GPU has no memory for the tables of the kernels: {error}. Lower staging_bytes."
        ) from None
    return StagedEngine(inner, staging, pages, mover, queue_depth=config.queue_depth)


def _settings(config: CacheConfig) -> dict[str, Any]:
    return {
        "checksums": config.checksums,
        "read_threads": config.read_threads,
        "write_threads": config.write_threads,
        "queue_depth": config.queue_depth,
        "max_extent": config.max_extent,
    }
