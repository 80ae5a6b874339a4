# SPDX-License-Identifier: Apache-2.0
"""The private torch APIs we stand on: each test names what a new torch moved."""

from __future__ import annotations

import inspect
import platform
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from cocodiff_compile import compat
from cocodiff_compile.devices.choose import DEVICE_KINDS
from cocodiff_compile.devices.kind import DeviceKind
from cocodiff_compile.errors import InvariantError, UserError
from cocodiff_compile.ir.aten import ALL_TO_ALL, WAIT, aten
from tests.support.captured import fake_ranks
from tests.support.traced import traced


def test_what_is_said_to_be_tested_is_what_is_installed() -> None:
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert any(f"torch=={version}" in pinned for version in compat.TESTED_TORCH)
    assert torch.__version__.partition("+")[0] in compat.TESTED_TORCH
    assert platform.python_version().startswith(f"{compat.TESTED_PYTHON}.")


@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=DEVICE_KINDS)
def test_inductor_has_the_settings_it_is_handed_graphs_with(kind: DeviceKind) -> None:
    with compat.inductor_settings(kind.inductor_settings):
        pass


def test_capturing_is_noticed() -> None:
    noticed = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        noticed.append(compat.is_capturing())
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert noticed == [True]
    assert not compat.is_capturing()


def test_compile_fx_takes_an_inner_compile_and_patches() -> None:
    parameters = inspect.signature(compat.compile_fx).parameters
    assert {"inner_compile", "config_patches"} <= set(parameters)


def test_the_autograd_cache_has_its_switch() -> None:
    before = config.enable_autograd_cache
    with compat.without_autograd_cache():
        assert config.enable_autograd_cache is False
    assert config.enable_autograd_cache == before


def test_groups_are_found_by_name() -> None:
    with fake_ranks(4):
        group = dist.new_group([0, 2])
        assert compat.group_ranks(group.group_name) == (0, 2)
        assert compat.group_ranks("no such group") is None
    assert compat.group_ranks("0") is None


def test_another_group_can_stand_behind_a_name() -> None:
    with fake_ranks(2):
        stand_in = dist.new_group([0])
        world = dist.group.WORLD
        assert world is not None
        name = world.group_name
        assert compat.groups_by_name()[name] is world
        with compat.replaced_groups({name: stand_in}):
            assert compat.find_group(name) is stand_in
        assert compat.find_group(name) is world


def test_work_is_done_when_its_future_is() -> None:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    work = compat.work_of_future(future)
    future.set_result([torch.ones(1)])
    assert work.wait()
    assert work.is_completed()


def test_dynamo_says_what_it_cannot_capture() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(compat.Unsupported):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))


def test_a_frame_can_be_skipped_and_what_it_calls_compiled() -> None:
    runs: list[int] = []
    graphs: list[int] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @compat.skip_frame_of
    def outer(x: torch.Tensor) -> torch.Tensor:
        runs.append(0)
        return inner(x)

    def count(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(0)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(outer, backend=count, fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(1))
    assert (len(runs), len(graphs)) == (2, 1)


def test_nodes_can_be_told_to_follow_others() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ x, x @ x.t()

    graph = traced(two, torch.ones(3, 3))
    module = torch.fx.GraphModule({}, graph)
    first, second = (node for node in module.graph.nodes if node.target is aten.mm.default)
    assert compat.order_nodes(module.graph, {first: [second.all_input_nodes[0]]})
    targets = [str(node.target) for node in module.graph.nodes]
    assert "control_deps" in targets


def test_inductor_takes_a_last_pass_with_a_key_of_its_own() -> None:
    class Nothing(compat.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> bytes:
            key: bytes = compat.get_hash_for_files((__file__,))
            return key

    settings = {
        "post_grad_custom_post_pass": Nothing(),
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
    }
    before = inductor_config.reorder_for_peak_memory
    with compat.inductor_settings(settings):
        assert not inductor_config.reorder_for_peak_memory
        assert isinstance(inductor_config.post_grad_custom_post_pass, Nothing)
    assert inductor_config.reorder_for_peak_memory == before


def test_kernels_can_be_named_for_profilers() -> None:
    with inductor_config.patch("cpp.enable_kernel_profile", False):
        compat.name_cpp_kernels()
        assert inductor_config.cpp.enable_kernel_profile


def test_the_collective_has_the_arguments_we_read() -> None:
    names = [argument.name for argument in ALL_TO_ALL._schema.arguments]
    assert names == ["input", "output_split_sizes", "input_split_sizes", "group_name"]
    assert [argument.name for argument in WAIT._schema.arguments] == ["tensor"]


def test_errors_pass_dynamo_with_their_own_type() -> None:
    assert issubclass(UserError, (compat.ShortenTraceback, ValueError))
    assert isinstance(UserError("x"), ValueError)
    assert isinstance(InvariantError("x"), AssertionError)


def test_modes_of_inductor_can_be_listed() -> None:
    assert compat.list_mode_options("max-autotune")


def test_sizes_have_hints() -> None:
    assert compat.optimization_hint(3) == 3


def test_the_default_store_holds_keys_and_the_timeout(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'store'}"
    dist.init_process_group(
        "gloo", init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        store = compat.default_store()
        store.set("key", "value")
        assert store.check(["key"])
        assert not store.check(["other"])
        assert store.get("key") == b"value"
        assert store.add("count", 1) == 1
        assert store.timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


def test_a_fake_group_has_any_size() -> None:
    dist.init_process_group("fake", store=compat.fake_store(), rank=5, world_size=96)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (5, 96)
    finally:
        dist.destroy_process_group()


def test_the_compiler_can_be_left_and_entered_again() -> None:
    with compat.FakeTensorMode() as mode, enable_python_dispatcher():
        with compat.outside_the_compiler():
            real = torch.ones(2) + 1
            assert not torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher")
        fake = torch.ones(2)
    assert real.tolist() == [2.0, 2.0]
    assert fake.fake_mode is mode  # type: ignore[attr-defined]


def test_contiguity_is_known_or_false() -> None:
    assert compat.is_contiguous_or_false(torch.ones(2, 3))
    assert not compat.is_contiguous_or_false(torch.ones(2, 3).t())


def test_a_dispatch_mode_sees_calls_and_ops_know_whether_they_are_views() -> None:
    seen = []

    class Recorder(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        torch.ones(4).view(2, 2).sin()
    assert [func.is_view for func in seen] == [False, True, False]


def test_functions_are_traced_into_ops_that_inductor_lowers() -> None:
    with compat.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(4))
    graph = compat.trace_decomposed(lambda x, y: x.clamp(0, 1) - y, [fake, fake]).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert aten.clamp.default not in targets  # decomposed
    first, second = graph.find_nodes(op="placeholder")
    assert len(first.users) == len(second.users) == 1  # two inputs, though one tensor was given


def test_nodes_can_be_sorted_behind_what_they_read() -> None:
    graph = traced(lambda x: (x + 1) * 2, torch.ones(2))
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    (mul,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    mul.append(add)
    compat.sort_topologically(graph)
    assert add < mul
    graph.lint()


def test_recording_is_told_from_computing() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.is_recording())
        return x + 1

    look(torch.ones(2))
    compat.make_fx(look)(torch.ones(2))
    assert seen == [False, True]


def test_a_lazy_module_computes_what_its_graph_holds_when_it_is_called() -> None:
    graph = traced(lambda x: x + 1, torch.ones(2))
    module = compat.lazy_module(torch.nn.Module(), graph)
    (add,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    for number in (1, 5):
        add.args = (add.args[0], number)
        module.recompile()
        assert f", {number})" in module.code
        (result,) = torch.utils._pytree.tree_leaves(module(torch.ones(2)))
        assert result.tolist() == [1 + number] * 2


def test_a_graph_of_a_compile_that_is_over_is_compiled() -> None:
    kept: list[tuple[object, list[object], dict[str, object]]] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: list[object], **options: object) -> object:
        kept.append((gm, example_inputs, options))
        return compat.make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[object]) -> object:
        return compat.compile_fx(gm, example_inputs, inner_compile=keep)

    torch._dynamo.reset()
    x = torch.randn(8)
    with torch.no_grad():
        expected = torch.compile(lambda x: (x * 2).relu(), backend=backend)(x)
        ((gm, example_inputs, options),) = kept
        with compat.compiling_later(example_inputs):
            compiled = compat.compile_fx_inner(gm, example_inputs, **options)
        (found,) = compiled([x])
    assert torch.equal(found, expected)


def test_inductor_folder_is_where_inductor_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compat.inductor_folder() == str(tmp_path) == cache_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert compat.inductor_folder() == default_cache_dir()


def _graph_of_any_size() -> torch.fx.GraphModule:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _inputs: list[object], **_options: object) -> object:
        graphs.append(gm)
        return compat.make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[object]) -> object:
        return compat.compile_fx(gm, example_inputs, inner_compile=keep)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x: torch.cat([x, x[:, :3]], 1), backend=backend, dynamic=True)(
            torch.randn(2, 12)
        )
    return graphs[-1]


def test_a_symbolic_size_is_parted_and_emitted() -> None:
    gm = _graph_of_any_size()
    (cat,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    rows, columns = cat.meta["val"].shape
    assert not compat.has_free_unbacked_symbols(cat.meta["val"])
    (term,) = compat.terms_of(columns)
    assert compat.statically_known_true(term + 3 == columns)
    assert not compat.statically_known_true(term == rows)
    (symbol,) = columns.node.expr.free_symbols
    is_symbol = [
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt) and node.meta["val"].node.expr == symbol
    ]
    with gm.graph.inserting_before(cat):
        node = compat.emit_expression(gm.graph, (columns // 4).node.expr, {symbol: is_symbol[0]})
    assert node.op == "call_function"
    assert compat.statically_known_true(node.meta["val"] == columns // 4)


def test_a_copy_of_a_capture_still_knows_its_weights() -> None:
    found: list[tuple[object, ...]] = []

    def keep(gm: torch.fx.GraphModule, _inputs: list[object], **options: object) -> object:
        found.append(tuple(options["static_input_idxs"]))
        return compat.make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[object]) -> object:
        copied = compat.copied_capture(gm)
        assert not {*copied.graph.nodes} & {*gm.graph.nodes}
        compat.compile_fx(copied, example_inputs, inner_compile=keep)
        return compat.compile_fx(gm, example_inputs, inner_compile=keep)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(torch.nn.Linear(4, 4), backend=backend)(torch.ones(2, 4))
    copied, original = found
    assert copied == original
    assert len(copied) == 2
