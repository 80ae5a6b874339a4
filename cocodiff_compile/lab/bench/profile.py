# SPDX-License-Identifier: Apache-2.0
"""Measures one step of one rank as a timeline, with torch's profiler.

The lane `compute` is the calling thread, kernel by kernel, with its waits; the lanes `exchange 0`,
`exchange 1` and so on are the threads that run collectives. Time 0 is when all ranks began.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cocodiff_compile.cost.timeline import COMPUTE, Span, SpanKind, Timeline

_STEP = "cocodiff step"
_WRAPPERS = ("Torch-Compiled", "## Call", "AOTDispatcher", "TorchDynamo", "Pregraph", _STEP)
_MATMULS = ("mm", "linear", "matmul", "convolution", "gemm")
_COLLECTIVES = ("gloo:", "nccl:", "xccl:", "ccl:")
_MICROSECOND = 1e-6


@dataclass(frozen=True)
class ProfiledStep:
    """One variant on one rank."""

    variant: str
    rank: int
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProfiledStep:
        spans = tuple(Span(**span) for span in data["timeline"]["spans"])
        return cls(data["variant"], data["rank"], Timeline(spans))

    @property
    def title(self) -> str:
        return f"{self.variant}, rank {self.rank}"

    def block(self, number: int, num_blocks: int) -> Timeline:
        """Returns what one of `num_blocks` blocks with the same number of all-to-alls does: from
        the end of the last all-to-all of the block before to the end of its own.
        """
        exchanges = (span for span in self.timeline.spans if span.kind == "exchange")
        ends = sorted(span.end_s for span in exchanges if "all_to_all" in span.name)
        per_block = len(ends) // num_blocks
        begin_s = ends[number * per_block - 1] if number else 0.0
        return self.timeline.between(begin_s, ends[(number + 1) * per_block - 1])


def profile_step(meet: Callable[[], object], step: Callable[[], object]) -> Timeline:
    """Runs `step` once under the profiler; `meet` lets all ranks begin together."""
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
        return read_timeline(json.loads(file.read_text())["traceEvents"])


def read_timeline(events: Iterable[dict[str, Any]]) -> Timeline:
    """Returns the timeline of a Chrome trace that holds one step, spans by their begin."""
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
        name = event["name"]
        begin_s = (event["ts"] - step["ts"]) * _MICROSECOND
        end_s = begin_s + event["dur"] * _MICROSECOND
        if name.startswith(_COLLECTIVES):
            lane = lanes.setdefault(event["tid"], f"exchange {len(lanes)}")
            spans.append(Span(lane, name, "exchange", begin_s, end_s))
        elif (
            event["tid"] == step["tid"]
            and event["ts"] >= busy_until
            and not name.startswith(_WRAPPERS)
        ):
            spans.append(Span(COMPUTE, name, kind_of(name), begin_s, end_s))
            busy_until = event["ts"] + event["dur"]
    return Timeline(tuple(spans))


def kind_of(name: str) -> SpanKind:
    """Returns the kind of what the calling thread does, by the name of the op or kernel."""
    if "wait_tensor" in name:
        return "wait"
    if name.startswith("_c10d_functional"):
        return "start"
    if "attention" in name:
        return "attention"
    op = name.rsplit("::", maxsplit=1)[-1]
    return "matmul" if name.count("::") and any(part in op for part in _MATMULS) else "kernel"
