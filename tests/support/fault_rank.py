# SPDX-License-Identifier: Apache-2.0
"""One rank of a world in which something goes wrong.

    python -m tests.support.fault_rank ROW RANK FOLDER

Every function below is what all ranks of one row do; `is_victim` is true on the rank that the fault
befalls. FOLDER/fault holds the time when it came.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cocodiff_compile.backends import eager
from cocodiff_compile.compiler import compile_graph
from cocodiff_compile.ranks.agreement import call_rounds, compile_rounds
from tests.support.hand_written import WIDTH, Block

NUM_RANKS, VICTIM = 3, 1
TIMEOUT_S = 60
LATE_S = 40
OPTIONS: dict[str, Any] = {
    "topology": "flat",
    "head_chunks": 1,
    "token_chunks": 1,
    "v_first": False,
}
IN_CHUNKS = {**OPTIONS, "head_chunks": 2}
ROWS: dict[str, Callable[[bool, Path], None]] = {}

_folder = Path()
_in_the_middle: Callable[[], None] | None = None
"""What a rank does between two exchanges of a model."""


def row(function: Callable[[bool, Path], None]) -> Callable[[bool, Path], None]:
    ROWS[function.__name__] = function
    return function


@torch.library.custom_op("cocodiff_faults::middle", mutates_args=())
def middle(x: Tensor) -> Tensor:
    if _in_the_middle is not None:
        _in_the_middle()
    return x.clone()


@middle.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class TwoBlocks(nn.Module):
    """Exchanges, something in the middle, exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(middle(self.first(x)))


def now_it_happens() -> None:
    """The time from which a row is measured."""
    if not _folder.joinpath("fault").exists():
        part = _folder / f"fault.{os.getpid()}"
        part.write_text(str(time.time()))
        part.rename(_folder / "fault")


def be_killed(*_args: Any, **_options: Any) -> Any:
    now_it_happens()
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped(*_args: Any, **_options: Any) -> Any:
    now_it_happens()
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(*_args: Any, **_options: Any) -> Any:
    now_it_happens()
    raise RuntimeError("out of registers")


def be_late(*_args: Any, **_options: Any) -> None:
    now_it_happens()
    time.sleep(LATE_S)


def compiled(options: dict[str, Any] = OPTIONS, name: str = "cocodiff_eager", **more: Any) -> Any:
    return torch.compile(TwoBlocks().eval(), backend=name, options=options, **more)


def inputs(tokens: int = 2) -> Tensor:
    return torch.ones(1, tokens, WIDTH)


def compile_anew(options: dict[str, Any] = OPTIONS) -> None:
    torch._dynamo.reset()
    compiled(options)(inputs())


def generating(generate: Callable[..., Any], is_victim: bool) -> Any:
    """Another code generation, on the victim."""
    return mock.patch.object(eager, "run_as_it_stands", generate) if is_victim else none()


def none() -> Any:
    return contextlib.nullcontext()


def settle() -> None:
    """Every rank has finished all that went before."""
    dist.barrier()


def wait_for_others(number: str) -> None:
    """Through the store: it is no collective."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {number} {dist.get_rank()}", "")
    store.wait([f"here {number} {rank}" for rank in range(NUM_RANKS)])


# Ranks that run different code


@row
def other_options(is_victim: bool, _folder: Path) -> None:
    now_it_happens()
    compile_anew(IN_CHUNKS if is_victim else OPTIONS)


@row
def other_plan_agreed_on_before(is_victim: bool, _folder: Path) -> None:
    compile_anew(IN_CHUNKS)
    compile_anew(OPTIONS)
    settle()
    now_it_happens()
    compile_anew(IN_CHUNKS if is_victim else OPTIONS)


@row
def other_plans_agreed_on_before(is_victim: bool, _folder: Path) -> None:
    """None of the two is what ran last."""
    compile_anew(IN_CHUNKS)
    compile_anew(OPTIONS)
    compile_anew({**OPTIONS, "head_chunks": 4})
    settle()
    now_it_happens()
    compile_anew(IN_CHUNKS if is_victim else OPTIONS)


@row
def other_code_called(is_victim: bool, _folder: Path) -> None:
    """Nothing is compiled: the ranks take different ones of two models."""
    torch._dynamo.reset()
    models = compiled(IN_CHUNKS), compiled(OPTIONS)
    for model in models:
        model(inputs())
    settle()
    now_it_happens()
    models[0 if is_victim else 1](inputs())


@row
def new_code_on_one_rank(is_victim: bool, _folder: Path) -> None:
    compile_anew()
    settle()
    now_it_happens()
    compile_anew(IN_CHUNKS) if is_victim else compiled()(inputs())


@row
def other_shape_of_dynamic_code(is_victim: bool, _folder: Path) -> None:
    model = compiled(dynamic=True)
    model(inputs(4))
    settle()
    now_it_happens()
    model(inputs(8 if is_victim else 4))


@row
def models_in_another_order(is_victim: bool, _folder: Path) -> None:
    orders = [(2, 4), (4, 2)]
    now_it_happens()
    for tokens in orders[is_victim]:
        compiled()(inputs(tokens))


# Ranks that fail


@row
def fails_in_compile(is_victim: bool, _folder: Path) -> None:
    with generating(fail, is_victim):
        compile_anew()


@row
def fails_while_others_measure(is_victim: bool, _folder: Path) -> None:
    """The others are in a collective of the compile."""
    with mock.patch.object(compile_graph, "find_machines", fail) if is_victim else none():
        compile_anew({"topology": "auto"})


@row
def fails_in_recompile(is_victim: bool, _folder: Path) -> None:
    compile_anew()
    settle()
    model = compiled()
    if is_victim:
        torch._dynamo.reset()
    with generating(fail, is_victim):
        model(inputs())


@row
def interrupted_in_recompile(is_victim: bool, _folder: Path) -> None:
    def interrupted(*_args: Any, **_options: Any) -> Any:
        now_it_happens()
        raise KeyboardInterrupt

    compile_anew()
    settle()
    if is_victim:
        torch._dynamo.reset()
    with generating(interrupted, is_victim):
        compiled()(inputs())


@row
def exits_in_compile(is_victim: bool, _folder: Path) -> None:
    def leave(*_args: Any, **_options: Any) -> Any:
        now_it_happens()
        sys.exit(3)

    with generating(leave, is_victim):
        compile_anew()


@row
def fails_in_forward(is_victim: bool, _folder: Path) -> None:
    run_then(fail, is_victim)


@row
def fails_between_calls(is_victim: bool, _folder: Path) -> None:
    """Outside of compiled code; the process ends with a traceback."""
    compile_anew()
    settle()
    if is_victim:
        fail()
    compiled()(inputs())


@row
def leaves_the_process_group(is_victim: bool, _folder: Path) -> None:
    compile_anew()
    settle()
    if is_victim:
        now_it_happens()
        dist.destroy_process_group()
        time.sleep(TIMEOUT_S)  # its process lives on
        sys.exit()
    compiled()(inputs())


def run_then(what: Callable[[], None], is_victim: bool) -> None:
    """One good call, and one in the middle of which something happens to the victim."""
    global _in_the_middle  # noqa: PLW0603
    model = compiled()
    model(inputs())
    settle()
    if is_victim:
        _in_the_middle = what
    model(inputs())


# Ranks that are killed or stopped


@row
def killed_before_agreement(is_victim: bool, _folder: Path) -> None:
    if is_victim:
        be_killed()
    compile_anew()


@row
def killed_while_agreeing(is_victim: bool, _folder: Path) -> None:
    kill = mock.patch.object(compile_rounds, "wait_for", be_killed) if is_victim else none()
    with kill:
        compile_anew()


@row
def killed_while_compiling(is_victim: bool, _folder: Path) -> None:
    with generating(be_killed, is_victim):
        compile_anew()


@row
def killed_before_first_call(is_victim: bool, _folder: Path) -> None:
    kill = mock.patch.object(call_rounds, "_publish", be_killed) if is_victim else none()
    with kill:
        compile_anew()


@row
def killed_while_recompiling(is_victim: bool, _folder: Path) -> None:
    compile_anew()
    settle()
    if is_victim:
        torch._dynamo.reset()
    with generating(be_killed, is_victim):
        compiled()(inputs())


@row
def killed_in_a_collective(is_victim: bool, _folder: Path) -> None:
    run_then(be_killed, is_victim)


@row
def killed_with_the_store(_is_victim: bool, _folder: Path) -> None:
    run_then(be_killed, dist.get_rank() == 0)


@row
def stopped_while_compiling(is_victim: bool, _folder: Path) -> None:
    with generating(be_stopped, is_victim):
        compile_anew()


@row
def stopped_in_a_collective(is_victim: bool, _folder: Path) -> None:
    run_then(be_stopped, is_victim)


# What all ranks must survive


@row
def late_to_compile(is_victim: bool, _folder: Path) -> None:
    if is_victim:
        be_late()
    compile_anew()


@row
def late_to_a_call(is_victim: bool, _folder: Path) -> None:
    compile_anew()
    settle()
    if is_victim:
        be_late()
    compiled()(inputs())


@row
def recompiles_alone(is_victim: bool, _folder: Path) -> None:
    model = compiled()
    model(inputs())
    settle()
    now_it_happens()
    if is_victim:
        torch._dynamo.reset()
    model(inputs())


@row
def recompiles_alone_with_symbolic_sizes(is_victim: bool, _folder: Path) -> None:
    compiled()(inputs(4))
    settle()
    now_it_happens()
    torch._dynamo.reset()
    compiled(dynamic=is_victim)(inputs(4))


@row
def read_only_caches(is_victim: bool, folder: Path) -> None:
    if is_victim:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["XDG_CACHE_HOME"] = str(folder / "mount")
    now_it_happens()
    options = {**OPTIONS, "topology": "auto"}
    torch.compile(Block().eval(), backend="cocodiff", options=options)(inputs())


@row
def full_disk_for_dumps(is_victim: bool, folder: Path) -> None:
    debug_dir = folder / ("mount" if is_victim else "roomy")
    now_it_happens()
    compile_anew({**OPTIONS, "debug_dir": str(debug_dir)})


def meet(rank: int, folder: Path) -> dist.TCPStore:
    """Rank 0 holds the store, on a port that is free then, and tells the others which."""
    told, timeout = folder / "port", timedelta(seconds=TIMEOUT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, NUM_RANKS, True, timeout, wait_for_workers=False)
        whole = folder / "port written"
        whole.write_text(str(store.port))
        whole.rename(told)
        return store
    while not told.exists():
        time.sleep(0.1)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), NUM_RANKS, False, timeout)


def main(name: str, rank: int, folder: Path) -> None:
    global _folder  # noqa: PLW0603
    _folder = folder
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=meet(rank, folder), rank=rank, world_size=NUM_RANKS, timeout=timeout
    )
    settle()
    try:
        with torch.no_grad():
            ROWS[name](rank == VICTIM, folder)
    finally:
        folder.joinpath(f"end_{rank}").write_text(str(time.time()))
    wait_for_others("end")  # the store ends with rank 0


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
