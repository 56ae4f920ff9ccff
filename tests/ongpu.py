"""A pytest plugin for suites over ``GDSKV_IO=kvikio`` and the CUDA driver double: device pools answer as a GPU's.

They are memory that the process can look into; copies to and from them come late. Load it with ``-p ongpu``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostdriver import Driver

from gdskv.pools.device import DevicePool


@pytest.fixture
def driver() -> Driver:
    """The double."""
    return Driver()


@pytest.fixture(autouse=True)
def on_the_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Device pools are the double's; nothing fails any more afterwards."""
    make, close = DevicePool.__init__, DevicePool.close

    def made(pool: DevicePool, *arguments: object, **more: object) -> None:
        make(pool, *arguments, **more)
        driver.adopt(pool.base, pool.bytes)

    def closed(pool: DevicePool) -> None:
        if pool._memory is not None:
            driver.disown(pool.base)
        close(pool)

    monkeypatch.setattr(DevicePool, "__init__", made)
    monkeypatch.setattr(DevicePool, "close", closed)
    driver.set("delay_us", 100)
    yield
    for name in ("fail_copy", "fail_late", "delay_us"):
        driver.set(name, 0)
