"""`CacheConfig`: every setting, from keywords, ``GDSKV_*`` variables or a TOML file. `Sizing`: the blocks it gives.

Knows settings only and must not open a directory, allocate memory or import what it configures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gdskv.errors import ConfigError
from gdskv.layout import ALIGNMENT, KVLayout
from gdskv.units import format_size, parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["CacheConfig", "Sizing"]

TIERS = ("device", "host", "disk")
MAX_BLOCKS = (1 << 31) - 1  # per tier: slot numbers are int32
MAX_EXTENT = 1 << 30  # one preadv(2) moves less than 2 GiB


def _split(value: object) -> object:
    """Make a sequence of one directory, or of a variable's text, in which a colon separates as in PATH."""
    if isinstance(value, str):
        return tuple(Path(part).expanduser() for part in value.split(os.pathsep) if part)
    if isinstance(value, os.PathLike):
        return (Path(value).expanduser(),)
    if not isinstance(value, Iterable) or not all(part and isinstance(part, (str, os.PathLike)) for part in value):
        raise ConfigError(f"{value!r} is no list of directories. Write directories=['/nvme0/kv', '/nvme1/kv'].")
    return tuple(Path(part).expanduser() for part in value)


def _apart(directories: tuple[Path, ...]) -> tuple[Path, ...]:
    real = [os.path.realpath(path) for path in directories]
    for index, path in enumerate(real):
        if path in real[:index]:
            raise ConfigError(
                f"{[str(d) for d in directories]} holds {directories[index]} twice ({path}). Name each directory once."
            )
    return directories


def _share_or_size(value: object) -> float | int:
    number: Any = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = parse_size(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
        raise ConfigError(f"{value!r} is neither a share nor a size. Write 0 up to 1 for a share, or '10GiB'.")
    return float(number) if number < 1 else parse_size(number)


def _budget(value: Any) -> str | int:
    if isinstance(value, str) and value.lower().endswith("dwpd"):
        try:
            if float(value[:-4]) > 0:
                return value.lower()
        except ValueError:
            pass
        raise ConfigError(
            f"{value!r} is no number of drive writes per day. Write '0.5dwpd', or bytes such as '500GiB'."
        )
    return parse_size(value)


def _aligned(size: int) -> int:
    if size % ALIGNMENT or not ALIGNMENT <= size <= MAX_EXTENT:
        raise ConfigError(
            f"{size} is no multiple of {ALIGNMENT} from {format_size(ALIGNMENT)} to {format_size(MAX_EXTENT)}. "
            "Write a size such as '2MiB'."
        )
    return size


Size = Annotated[int, BeforeValidator(parse_size)]
Share = Annotated[float, Field(ge=0, le=1)]
Threads = Annotated[int, Field(ge=0, le=256)]


class CacheConfig(BaseSettings):
    """Settings of a cache. Keywords win over ``GDSKV_*`` variables, those over a TOML file (`from_toml`).

    Sizes are bytes or text such as ``"64GiB"``. A tier of 0 bytes is absent.

    Parameters
    ----------
    device_bytes, host_bytes, disk_bytes
        What each tier may hold, allocated at open.
    directories
        Where the disk tier lies, one per drive. In a variable a colon separates them. ``{rank}`` in a name stands for
        the rank of the namespace, so that each rank has its own, on the drives near its GPU.
    min_free
        What must stay free on each directory's file system: a share (below 1), or a size.
    device
        The torch device of the device pool, such as ``"cpu"`` or ``"cuda:0"``.
    host_clean
        Share of the host blocks that is kept on disk too, ahead of need, so that they can go at once.
    policy, memory_policy
        Order of eviction among equals, on disk and in memory: ``"lru"``, least recently used first, or ``"hazard"``,
        first what is least likely to be asked again, as learned from the requests.
    spill
        What is worth writing to disk: ``"all"``, ``"reused"`` (used again at least once), ``"retained"``, or
        ``"learned"``: what is more likely to come back than what would leave for it. ``"auto"`` is ``"learned"`` where
        ``policy`` is ``"hazard"``, else ``"all"``.
    write_budget
        Bytes that may be written to disk per day, such as ``"500GiB"``, or drive writes per day, such as ``"0.5dwpd"``;
        held over every hour, retained blocks first. 0: any number.
    record
        File to which requests are recorded, as a trace for ``gdskv replay``; none by default.
    record_bytes
        What it may take, older files of it included.
    events
        Whether `KVStore.events` is kept: which blocks have come to be served from a tier, and which are no more.
    retained_fraction
        Share of a tier that blocks with a live deadline may hold as such.
    tenant_fraction
        Share of that budget that one tenant may hold.
    on_expiry
        ``"demote"``: an expired block is an ordinary one. ``"forget"``: it stops matching at once.
    protect_unexpired
        Whether a full tier of live retained blocks refuses new ones instead of giving up the earliest deadline.
    checksums
        Whether payloads carry a CRC-32C that is verified on load.
    durability
        ``"lazy"``: ordered by design and safe by checksum, with no fsync on the way. ``"fsync"``: a committed spill
        survives a power cut.
    verify
        ``"first_use"``: a payload that outlived a restart is checked when it is read. ``"all"``: at open, which reads
        all of them.
    io_timeout
        Seconds that a request waits for its blocks; those that have not come by then are computed again.
    io
        The I/O engine: ``"kvikio"``, ``"posix"``, or ``"auto"``: KvikIO where the device is a GPU that it can serve.
    require_gds
        Whether a directory whose bytes are not proven to go directly between GPU and drive refuses to open.
    read_threads, write_threads
        I/O threads per directory; 0: chosen by the I/O engine.
    queue_depth
        Transfers in flight per directory.
    write_queue
        Blocks that may wait to be written before further best-effort spills are shed.
    max_extent
        The largest transfer that neighbouring blocks are joined to.
    staging_bytes
        GPU memory of the buffers between an engine's pages and the other tiers; taken only where a `KVStore` has
        `device_pages`. Cut to half of the GPU's BAR1 where that is smaller.
    stripe_width
        Directories over which one allocation is cut at most.

    Raises
    ------
    ConfigError
        A value is wrong, a name is unknown, or two settings contradict each other. One line for each.
    """

    model_config = SettingsConfigDict(env_prefix="GDSKV_", extra="forbid", frozen=True)

    device_bytes: Size = 0
    host_bytes: Size = 0
    disk_bytes: Size = 0
    directories: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split), AfterValidator(_apart)] = ()
    min_free: Annotated[float | int, PlainValidator(_share_or_size)] = 0.05
    device: Annotated[str, Field(pattern=r"^[a-z]+(:[0-9]+)?$")] = "cpu"
    host_clean: Share = 0.10
    policy: Literal["lru", "hazard"] = "hazard"
    memory_policy: Literal["lru", "hazard"] = "lru"
    spill: Literal["auto", "all", "reused", "retained", "learned"] = "auto"
    write_budget: Annotated[str | int, BeforeValidator(_budget)] = 0
    record: Path | None = None
    record_bytes: Size = 256 << 20
    events: bool = False
    retained_fraction: Share = 0.5
    tenant_fraction: Share = 1.0
    on_expiry: Literal["demote", "forget"] = "demote"
    protect_unexpired: bool = False
    checksums: bool = True
    durability: Literal["lazy", "fsync"] = "lazy"
    verify: Literal["first_use", "all"] = "first_use"
    io_timeout: Annotated[float, Field(gt=0)] = 30.0
    io: Literal["auto", "kvikio", "posix"] = "auto"
    require_gds: bool = False
    read_threads: Threads = 0
    write_threads: Threads = 0
    queue_depth: Annotated[int, Field(ge=16, le=65536)] = 4096
    write_queue: Annotated[int, Field(ge=1)] = 4096
    max_extent: Annotated[Size, AfterValidator(_aligned)] = 2 << 20
    staging_bytes: Size = 64 << 20
    stripe_width: Annotated[int, Field(ge=1)] = 4

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, *, _toml: str | os.PathLike[str] | None = None, **values: Any) -> None:
        variables = {name.lower(): name for name in os.environ}
        sources = dict.fromkeys(type(self).model_fields, "default")
        sources |= {n: f"variable {variables[f'gdskv_{n}']}" for n in sources if f"gdskv_{n}" in variables}
        sources |= dict.fromkeys(values, "keyword")
        if _toml is not None:
            in_file = _read_toml(_toml)
            # A variable wins over the file; pydantic would let what is passed here win over the variable.
            used = {name: value for name, value in in_file.items() if sources.get(name, "default") == "default"}
            sources |= dict.fromkeys(used, f"file {os.fspath(_toml)}")
            values = used | values
        try:
            super().__init__(**values)
        except ValidationError as error:
            lines = [_explain(type(self), dict(one), sources) for one in error.errors()]
            raise ConfigError("\n".join(lines)) from None
        self._sources = sources

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], **values: Any) -> CacheConfig:
        """Read settings from a TOML file of ``name = value`` lines, under keywords and ``GDSKV_*`` variables.

        Raises
        ------
        ConfigError
            The file cannot be read, is no TOML, or holds a wrong value.
        """
        return cls(_toml=path, **values)

    @model_validator(mode="after")
    def _check(self) -> CacheConfig:
        if self.disk_bytes and not self.directories:
            raise ConfigError(
                f"disk_bytes={format_size(self.disk_bytes)} has no place: directories is empty. "
                "Name one directory per drive, or set disk_bytes=0."
            )
        if self.spill == "learned" and self.policy != "hazard":
            raise ConfigError(
                f"spill='learned' cannot be had with policy={self.policy!r}, under which the disk learns nothing. "
                "Set policy='hazard', or spill='all'."
            )
        return self

    def places(self, rank: int) -> tuple[Path, ...]:
        """Return the directories of a rank."""
        return tuple(Path(str(path).replace("{rank}", str(rank))) for path in self.directories)

    @property
    def spills(self) -> str:
        """What ``spill`` means under this ``policy``."""
        if self.spill != "auto":
            return self.spill
        return "learned" if self.policy == "hazard" else "all"

    def budget_per_hour(self) -> float:
        """Return the bytes that may be written to disk in an hour; 0: any number."""
        if isinstance(self.write_budget, str):
            return float(self.write_budget[:-4]) * self.disk_bytes / 24
        return self.write_budget / 24

    def sources(self) -> dict[str, str]:
        """Return where each setting came from: ``keyword``, ``variable GDSKV_X``, ``file kv.toml`` or ``default``."""
        return dict(self._sources)

    def sizing(self, layout: KVLayout) -> Sizing:
        """Return how many blocks of that layout each tier holds, rounded down to whole blocks.

        Raises
        ------
        ConfigError
            A tier is smaller than one block, holds 2**31 blocks or more, or has less than one block per directory.
        """
        slot = layout.slot_bytes
        asked = {tier: int(getattr(self, f"{tier}_bytes")) for tier in TIERS}
        blocks = {tier: size // slot for tier, size in asked.items()}
        for tier, size in asked.items():
            shown = f"{tier}_bytes={format_size(size)}"
            least = max(1, len(self.directories)) if tier == "disk" else 1
            if size and blocks[tier] < least:
                what = "one block" if least == 1 else f"one block for each of {least} directories"
                raise ConfigError(
                    f"{shown} is less than {what}, {format_size(least * slot)}. "
                    f"Set {tier}_bytes to at least {least * slot}, or to 0 for no {tier} tier."
                )
            if blocks[tier] > MAX_BLOCKS:
                raise ConfigError(
                    f"{shown} makes {blocks[tier]} blocks; the limit is {MAX_BLOCKS}. "
                    f"Use more tokens per block, or set {tier}_bytes to at most {format_size(MAX_BLOCKS * slot)}."
                )
        return Sizing(
            block_bytes=layout.block_bytes,
            slot_bytes=slot,
            **{f"{tier}_blocks": blocks[tier] for tier in TIERS},
            **{f"{tier}_bytes_asked": asked[tier] for tier in TIERS},
            **{f"{tier}_bytes_used": blocks[tier] * slot for tier in TIERS},
        )


@dataclass(frozen=True)
class Sizing:
    """What settings give for one layout: whole blocks per tier, bytes asked for and bytes used. Prints as a table."""

    block_bytes: int
    slot_bytes: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    device_bytes_asked: int
    host_bytes_asked: int
    disk_bytes_asked: int
    device_bytes_used: int
    host_bytes_used: int
    disk_bytes_used: int

    def __str__(self) -> str:
        values = asdict(self)
        lines = [f"{'tier':<8}{'blocks':>12}{'asked':>12}{'used':>12}{'rounded off':>13}"]
        for tier in TIERS:
            asked, used = values[f"{tier}_bytes_asked"], values[f"{tier}_bytes_used"]
            shown = "".join(f"{format_size(size):>12}" for size in (asked, used))
            lines.append(f"{tier:<8}{values[f'{tier}_blocks']:>12}{shown}{format_size(asked - used):>13}")
        lines.append(f"a block is {format_size(self.block_bytes)}, in a slot of {format_size(self.slot_bytes)}")
        return "\n".join(lines)


def _read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            values: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)} cannot be read: {error.strerror}. Name a readable TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)} is not TOML: {error}. Write lines such as disk_bytes = '1TiB'.") from None
    return values


def _explain(cls: type[CacheConfig], error: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Write one of pydantic's errors as one line: the name and the value, the limit, the remedy."""
    cause = error.get("ctx", {}).get("error")
    if not error["loc"]:
        return str(cause or error["msg"])
    name, value, kind = str(error["loc"][0]), error["input"], error["type"]
    source = sources.get(name, "keyword")
    came = "" if source == "keyword" else f" ({source})"
    if kind == "extra_forbidden":
        near = get_close_matches(name, cls.model_fields, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"The settings are {', '.join(cls.model_fields)}."
        return f"{name}={value!r} is not a setting{came}. {remedy}"
    if isinstance(cause, ConfigError):
        return f"{name}={cause}{came}"
    if kind == "literal_error":
        allowed = str(error["ctx"]["expected"])
    elif name == "device":
        allowed = "'cpu', 'cuda' or 'cuda:0'"
    elif kind.startswith("bool"):
        allowed = "true or false"
    else:
        limits = cls.model_fields[name].metadata
        above = next((limit.gt for limit in limits if hasattr(limit, "gt")), None)
        least = next((limit.ge for limit in limits if hasattr(limit, "ge")), None)
        most = next((limit.le for limit in limits if hasattr(limit, "le")), None)
        allowed = f"more than {above}" if above is not None else f"{least} or more"
        if most is not None:
            allowed = f"from {least} to {most}"
    return f"{name}={value!r} is not allowed{came}. Choose {allowed}."
