"""An audit in words, and as data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from keepstep.audit.operations import Acknowledged, Quiet, Recording
from keepstep.audit.verdicts import Example, Findings, Verdict

_MODEL_WORDS = {
    "weak": "weak (POSIX and no more)",
    "journal": "journal (like ext4)",
}


def in_words(recording: Recording, found: Sequence[Findings]) -> Iterator[str]:
    """Yield the lines of the report."""
    counted = [o for o in recording.operations if not isinstance(o, (Quiet, Acknowledged))]
    said = sum(isinstance(o, Acknowledged) for o in recording.operations)
    yield (
        f"recorded {len(counted):,} file operations, {said:,} acknowledgements; the command left"
        f" with code {recording.exit_code}"
    )
    for doubt in recording.doubts:
        yield f"doubt    {doubt}"
    yield ""
    width = max(len(text) for text in _MODEL_WORDS.values())
    shown = [v for v in Verdict if any(findings.counts[v] for findings in found)]
    yield "  ".join(
        [f"{'model':<{width}}", *(f"{verdict:>{_column(verdict)}}" for verdict in shown)]
    )
    for findings in found:
        numbers = [f"{findings.counts[v]:>{_column(v)},}" for v in shown]
        tail = "  (some of the states: there are more than the limit)" if findings.bounded else ""
        yield "  ".join([f"{_MODEL_WORDS[findings.model]:<{width}}", *numbers]) + tail
    for findings in found:
        for verdict, example in findings.examples.items():
            if verdict.is_fault:
                yield ""
                yield from _example(example)
    yield ""
    faults = sum(findings.faults for findings in found)
    if faults:
        yield f"work can be lost: {faults:,} of the states of the disk are not as they should be"
    else:
        yield "no state of the disk loses what was acknowledged"


def as_data(recording: Recording, found: Sequence[Findings]) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "operations": [operation.text for operation in recording.operations],
        "doubts": recording.doubts,
        "exit_code": recording.exit_code,
        "models": [
            {
                "model": findings.model,
                "moments": findings.cuts,
                "bounded": findings.bounded,
                "states": {str(verdict): findings.counts[verdict] for verdict in Verdict},
                "examples": [
                    asdict(example)
                    for verdict, example in findings.examples.items()
                    if verdict.is_fault
                ],
            }
            for findings in found
        ],
    }


def _column(verdict: Verdict) -> int:
    return max(len(verdict), 6)


def _example(example: Example) -> Iterator[str]:
    yield f"{example.verdict}: the power goes {example.cut} (model {example.model})"
    for text in example.there:
        yield f"    on the disk    {text}"
    for text in example.missing:
        yield f"    not            {text}"
    yield f"    loads          {example.what}"
    if example.remedy:
        yield f"    kept by        {example.remedy}"
