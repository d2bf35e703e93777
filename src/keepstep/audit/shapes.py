"""What a power cut could leave of one file whose bytes were not synced.

The kernel writes blocks back in any order, and a file's size apart from its bytes. Of a file
there may be: all of it; what was durable before; the new size over zeros; the new bytes within the
old size; the bytes up to some block, or from some block on; what stood there after each of its
operations, a size of 0 after O_TRUNC among them. Files of few blocks get every such cut, large
ones the first, the middle and the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepstep.audit.operations import DataChange

BLOCK_BYTES = 4096
_CUTS_MAX = 4
_STEPS_MAX = 6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Bytes that a file may have, and in words what of it is on the disk."""

    content: bytes
    text: str


def after(durable: bytes, pending: Sequence[DataChange]) -> bytes:
    """Return the bytes of a file when its operations have all happened."""
    content = bytearray(durable)
    for change in pending:
        if change.data is None:
            del content[change.offset :]
            content.extend(bytes(change.offset - len(content)))
        else:
            content.extend(bytes(max(0, change.offset - len(content))))
            content[change.offset : change.offset + len(change.data)] = change.data
    return bytes(content)


def shapes_of(durable: bytes, pending: Sequence[DataChange]) -> list[Shape]:
    """Return what may be there of a file, each once: all of it first, then what was there before.

    ``durable``: what was synced last; ``pending``: what was done to it since, in order.
    """
    if not pending:
        return [Shape(content=durable, text="whole")]
    found: dict[bytes, Shape] = {}
    for content, text in _candidates(durable, pending):
        found.setdefault(content, Shape(content=content, text=text))
    return list(found.values())


def _candidates(durable: bytes, pending: Sequence[DataChange]) -> Iterator[tuple[bytes, str]]:
    new = after(durable, pending)
    yield new, "whole"
    yield durable, "as it was synced last" if durable else "empty"
    size = len(new)
    old = durable[:size] + bytes(size - len(durable[:size]))
    yield old, f"{size:,} bytes, what was written since is not there"
    yield new[: len(durable)], f"the first {len(durable):,} bytes of it"
    for cut in _cuts(size):
        yield new[:cut] + old[cut:], f"{size:,} bytes, of which only the first {cut:,} are there"
        yield old[:cut] + new[cut:], f"{size:,} bytes, of which the first {cut:,} are not there"
        yield new[:cut], f"the first {cut:,} bytes of it"
    for count in _steps(len(pending)):
        yield after(durable, pending[:count]), f"as after {count} of {len(pending)} writes"


def _cuts(size: int) -> list[int]:
    """Return where a file may be torn: at its blocks, or at some of them."""
    blocks = list(range(BLOCK_BYTES, size, BLOCK_BYTES))
    if len(blocks) <= _CUTS_MAX:
        return blocks
    return sorted({blocks[0], blocks[len(blocks) // 2], blocks[-1]})


def _steps(count: int) -> list[int]:
    steps = range(1, count)
    if len(steps) <= _STEPS_MAX:
        return list(steps)
    return sorted({1, 2, 3, count // 2, count - 2, count - 1})
