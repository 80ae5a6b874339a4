"""Reads one step of one rank as spans from torch's profiler.

The lane `compute` is the calling thread, kernel by kernel, with its waits; the lanes `exchange 0`,
`exchange 1` and so on are the threads that run collectives. Time 0 is when all ranks began.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Kind = Literal["matmul", "attention", "kernel", "wait", "start", "exchange"]

_STEP = "cocodiff step"
_WRAPPERS = ("Torch-Compiled", "## Call", "AOTDispatcher", "TorchDynamo", "Pregraph", _STEP)
_MATMULS = ("mm", "linear", "matmul", "convolution", "gemm")
_COLLECTIVES = ("gloo:", "nccl:", "xccl:", "ccl:")


@dataclass(frozen=True)
class Span:
    lane: str
    name: str
    kind: Kind
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Timeline:
    """Holds the spans of one variant on one rank."""

    variant: str
    rank: int
    spans: tuple[Span, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        spans = tuple(Span(**span) for span in data["spans"])
        return cls(data["variant"], data["rank"], spans)

    @property
    def lanes(self) -> list[str]:
        others = sorted({span.lane for span in self.spans} - {"compute"})
        return ["compute", *others]

    @property
    def exchanges(self) -> list[Span]:
        """The all-to-alls, ordered by start."""
        return [
            span for span in self.spans if span.kind == "exchange" and "all_to_all" in span.name
        ]

    def block(self, number: int, num_blocks: int) -> tuple[Span, ...]:
        """Returns the spans of one of `num_blocks` blocks with equally many exchanges: from the end
        of the preceding block's last exchange to the end of its own last exchange.
        """
        per_block = len(self.exchanges) // num_blocks
        ends = sorted(span.end_us for span in self.exchanges)
        begin = ends[number * per_block - 1] if number else 0.0
        end = ends[(number + 1) * per_block - 1]
        inside = [span for span in self.spans if span.end_us > begin and span.start_us < end]
        return tuple(_cut(span, begin, end) for span in inside)


def _cut(span: Span, begin: float, end: float) -> Span:
    start = max(span.start_us, begin)
    return Span(span.lane, span.name, span.kind, start - begin, min(span.end_us, end) - start)


def profile_step(meet: Callable[[], object], step: Callable[[], object]) -> list[Span]:
    """Runs `step` once under the profiler. `meet` lets all ranks begin together."""
    activities = [ProfilerActivity.CPU]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type.upper()  # type: ignore[union-attr]
        activities.append(getattr(ProfilerActivity, kind))
    with profile(activities=activities) as profiler:
        meet()
        with record_function(_STEP):
            step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return read_spans(json.loads(file.read_text())["traceEvents"])


def read_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Returns the spans of a Chrome trace that holds one step, ordered by start."""
    whole = [event for event in events if event.get("ph") == "X"]
    step = next(event for event in whole if event["name"] == _STEP)
    timed = sorted(
        (event for event in whole if event["ts"] >= step["ts"]),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    spans: list[Span] = []
    lanes: dict[Any, str] = {}
    busy_until = step["ts"]
    for event in timed:
        name, start = event["name"], event["ts"] - step["ts"]
        if name.startswith(_COLLECTIVES):
            lane = lanes.setdefault(event["tid"], f"exchange {len(lanes)}")
            spans.append(Span(lane, name, "exchange", start, event["dur"]))
        elif (
            event["tid"] == step["tid"]
            and event["ts"] >= busy_until
            and not name.startswith(_WRAPPERS)
        ):
            spans.append(Span("compute", name, kind_of(name), start, event["dur"]))
            busy_until = event["ts"] + event["dur"]
    return spans


def kind_of(name: str) -> Kind:
    """Returns the kind of a span of the calling thread, by the name of the op or kernel."""
    if "wait_tensor" in name:
        return "wait"
    if name.startswith("_c10d_functional"):
        return "start"
    if "attention" in name:
        return "attention"
    op = name.rsplit("::", maxsplit=1)[-1]
    return "matmul" if name.count("::") and any(part in op for part in _MATMULS) else "kernel"
