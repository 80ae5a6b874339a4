# SPDX-License-Identifier: Apache-2.0
"""Imports every private torch API that this project uses; no other module does.

`tests/project/test_compat.py` holds one test per name, so that a new torch shows what moved. They
ran with `TESTED_TORCH` and `TESTED_PYTHON` only.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import sympy
import torch
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _create_work_from_future,
    _register_process_group,
    _unregister_process_group,
)
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import ShortenTraceback, Unsupported
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.virtualized import V
from torch._logging import trace_structured  # type: ignore[attr-defined]
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _get_default_store,
    _resolve_process_group,
    _world,
)
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    has_free_unbacked_symbols,
    optimization_hint,
    statically_known_true,
)
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = [
    "TESTED_PYTHON",
    "TESTED_TORCH",
    "WAIT_FOR_SEVERAL",
    "CustomGraphPass",
    "FakeTensorMode",
    "ShapeEnv",
    "ShortenTraceback",
    "TorchDispatchMode",
    "Unsupported",
    "autotunes_matmuls",
    "compile_fx",
    "compile_fx_inner",
    "compiling_later",
    "copied_capture",
    "default_store",
    "emit_expression",
    "fake_store",
    "find_group",
    "freezes_weights",
    "get_hash_for_files",
    "group_ranks",
    "groups_by_name",
    "has_free_unbacked_symbols",
    "inductor_folder",
    "inductor_settings",
    "is_capturing",
    "is_contiguous_or_false",
    "list_mode_options",
    "make_boxed_func",
    "name_cpp_kernels",
    "not_captured",
    "optimization_hint",
    "order_nodes",
    "outside_the_compiler",
    "replaced_groups",
    "skip_frame_of",
    "sort_topologically",
    "statically_known_true",
    "terms_of",
    "trace_artifact",
    "trace_decomposed",
    "without_autograd_cache",
    "work_of_future",
]


TESTED_TORCH = ("2.15.0", "2.14.1", "2.13.0")
"""The newest first. `constraints.txt` pins one of them, `make test-torch` tries another."""
TESTED_PYTHON = "3.11"

WAIT_FOR_SEVERAL: Any = getattr(
    getattr(torch.ops._c10d_functional, "wait_tensors", None), "default", None
)
"""The op that waits for all results of a coalesced collective; None before torch 2.15."""


def without_autograd_cache() -> Any:
    """Returns a context in which a compilation never loads a finished graph from AOTAutograd's
    cache.

    A hit there skips ``inner_compile``, and with it every pass; its key does not contain the
    backend, so that a graph stored by plain Inductor would be returned. Inductor's own code cache,
    whose key is the graph after the passes, stays in use.
    """
    return functorch_config.patch(enable_autograd_cache=False)


@contextmanager
def compiling_later(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Restores the context that `compile_fx` provides to Inductor, for a graph of a compilation
    that is over: the same fake tensors, and a tracing context of its own.
    """
    fake_mode = detect_fake_mode(example_inputs)
    with (
        V.set_fake_mode(fake_mode),
        tracing(TracingContext(fake_mode)),
        enable_python_dispatcher(),
        functorch_config.patch(unlift_effect_tokens=True),
    ):
        yield


def trace_decomposed(function: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> GraphModule:
    """Returns the graph of a function of tensors, in the ops that Inductor's lowerings support."""
    mode = fakes[0].fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        # A tensor for each: one tensor for two arguments would be traced as one.
        own = [
            torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=f.device) for f in fakes
        ]
        traced: GraphModule = make_fx(function, decomposition_table=select_decomp_table())(*own)
    return traced


def skip_frame_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Dynamo compile the functions that `function` calls, but not the function, which runs at
    every call.

    Unlike with `torch.compiler.disable`, it is traced as usual where a compiled function calls it.
    """
    skip_code(function.__code__)
    return function


def lazy_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """Returns a module that generates its code when it is first called or shown."""
    return _LazyGraphModule(root, graph)


def sort_topologically(graph: Graph) -> None:
    """Moves nodes after the nodes they read; other nodes stay in their order."""
    cast(Callable[[Graph], None], stable_topological_sort)(graph)


def fake_store() -> Any:
    """Returns a store for `init_process_group("fake", ...)`, whose ranks exist in name only."""
    from torch.testing._internal.distributed.fake_pg import (  # noqa: PLC0415  (rarely needed)
        FakeStore,
    )

    return FakeStore()


def group_ranks(group_name: str) -> tuple[int, ...] | None:
    """Returns the global ranks of a process group; None if this process does not know it."""
    if not torch.distributed.is_initialized():
        return None
    try:
        group = find_group(group_name)
    except RuntimeError:
        return None
    return tuple(torch.distributed.get_process_group_ranks(group))


def is_capturing() -> bool:
    """Returns whether Dynamo or AOTAutograd is tracing a graph right now."""
    return TracingContext.try_get() is not None


def is_recording() -> bool:
    """Returns whether the ops that are called become nodes of a graph: not where Dynamo only looks
    what an op would return.
    """
    return get_proxy_mode() is not None


def not_captured(function: Function) -> Function:
    """Decorates a function that Dynamo leaves alone, also where it captures what runs by itself
    behind a graph break.
    """
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def find_group(group_name: str) -> Any:
    """Returns a process group by its name. Raises RuntimeError if this process does not know it."""
    return cast(Callable[[str], Any], _resolve_process_group)(group_name)


@contextmanager
def outside_the_compiler() -> Iterator[None]:
    """Restores real tensors and plain dispatch inside of a compilation, which runs under fake
    tensors and Python's dispatcher.

    Under that dispatcher a collective is called with the interpreter locked. gloo then waits for a
    lock that its own thread holds while that thread waits for the interpreter to free a tensor, a
    deadlock that has occurred.
    """
    with _disable_current_modes(), no_python_dispatcher():
        yield


def autotunes_matmuls() -> bool:
    """Returns whether Inductor chooses the kernel of a matmul by trying several for its shape."""
    config = torch._inductor.config
    return bool(config.max_autotune or config.max_autotune_gemm)


def freezes_weights() -> bool:
    """Returns whether Inductor makes constants of weights."""
    return bool(torch._inductor.config.freezing)


def groups_by_name() -> dict[str, Any]:
    """Returns every process group of this process, by the name that functional collectives use."""
    return {name: group for group, name in _world.pg_names.items()}


@contextmanager
def replaced_groups(stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Puts other groups behind the names in `stand_ins`, for functional collectives. They get the
    same ranks as the groups they replace.
    """
    originals = groups_by_name()
    for name, group in stand_ins.items():
        _world.pg_group_ranks[group] = _world.pg_group_ranks[originals[name]]
    _register_groups(stand_ins)
    try:
        yield
    finally:
        _register_groups({name: originals[name] for name in stand_ins})
        for group in stand_ins.values():
            del _world.pg_group_ranks[group]


def _register_groups(groups: Mapping[str, Any]) -> None:
    for name, group in groups.items():
        cast(Callable[[str], None], _unregister_process_group)(name)
        cast(Callable[[str, Any], None], _register_process_group)(name, group)


def work_of_future(future: Any) -> Any:
    """Returns the work object of a collective that is done when `future` is."""
    return _create_work_from_future(future)


def order_nodes(graph: Graph, before: Mapping[Node, Sequence[Node]]) -> bool:
    """Makes Inductor run each node of `before` after the nodes it maps to. Returns False if this
    torch has no means to.
    """
    try:
        from torch._inductor.fx_passes.control_dependencies import (  # noqa: PLC0415
            preserve_node_ordering,
        )
    except ImportError:
        return False
    preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in before.items()})
    return True


class _SizeTracer(GraphAppendingTracer):
    """Gives the nodes that it makes the values of their sizes."""

    def create_node(self, *given: Any, **named: Any) -> Node:
        node = super().create_node(*given, **named)
        assert callable(node.target)
        node.meta["val"] = node.target(*map_arg(node.args, lambda item: item.meta["val"]))
        return node


def emit_expression(graph: Graph, expression: Any, symbols: Mapping[Any, Node]) -> Node:
    """Emits nodes that compute the expression of a symbolic size from those of its symbols."""
    tracer = _SizeTracer(graph)
    proxies = {symbol: Proxy(node, tracer) for symbol, node in symbols.items()}
    computed: Proxy = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    return computed.node


def copied_capture(module: GraphModule) -> GraphModule:
    """Returns a graph of Dynamo with nodes of its own. AOTAutograd still finds out which of its
    inputs are weights: Dynamo says so in attributes that a copy would not have.
    """
    copied = GraphModule(module, copy.deepcopy(module.graph))
    copied.meta.update(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copied._param_name_to_source = module._param_name_to_source
    pairs = zip(
        module.graph.find_nodes(op="placeholder"),
        copied.graph.find_nodes(op="placeholder"),
        strict=True,
    )
    for before, after in pairs:
        if hasattr(before, "_dynamo_source"):
            after._dynamo_source = before._dynamo_source
    return copied


def terms_of(size: torch.SymInt) -> list[torch.SymInt]:
    """Returns the symbolic terms that a size is the sum of."""
    terms = sympy.Add.make_args(size.node.expr)
    make: Callable[..., torch.SymInt] = size.node.shape_env.create_symintnode
    return [make(term, hint=None) for term in terms if not term.is_number]


def inductor_settings(settings: Mapping[str, Any]) -> Any:
    """Returns a context in which Inductor's configuration has these settings."""
    return torch._inductor.config.patch(dict(settings))


def inductor_folder() -> str:
    """Returns the folder to which Inductor writes its code; it need not exist."""
    return os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())  # noqa: PTH100


def name_cpp_kernels() -> None:
    """Makes Inductor's C++ kernels that are compiled from now on show their names to profilers."""
    torch._inductor.config.cpp.enable_kernel_profile = True


def default_store() -> Any:
    """Returns the store in which the ranks of the world met, with the process group's timeout."""
    return _get_default_store()


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Adds a text to the structured trace (`TORCH_TRACE`), where tlparse shows it by name."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=payload,
    )
