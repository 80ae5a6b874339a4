# SPDX-License-Identifier: Apache-2.0
"""Shares that compiled blocks hand to each other behave like the whole tensor, whoever reads them
and however they are written to.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from cocodiff_compile.cut.cut import Cut
from cocodiff_compile.lab.distances import largest_error
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.shard.token_share import TokenShare
from cocodiff_compile.shard.whole_of_shares import share_of

TEXT, IMAGE, WIDTH = 5, 8, 6
OTHER = torch.linspace(-1, 1, TEXT + IMAGE).reshape(1, -1, 1).expand(2, -1, WIDTH)

MATRIX = torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)


def _write_all(x: Tensor) -> Tensor:
    x += OTHER
    return x


def _write_a_part(x: Tensor) -> Tensor:
    x[:, TEXT:] += 2
    return x


def _write_through_a_part(x: Tensor) -> Tensor:
    image = x[:, TEXT:]
    image.mul_(3)
    return x + image.sum()


def _write_behind_a_part(x: Tensor) -> Tensor:
    image = x[:, TEXT:]
    x.mul_(2)
    return image + 1


def _write_through_a_view(x: Tensor) -> Tensor:
    x.view(2, -1).add_(1)
    return x * 2


def _write_through_rows(x: Tensor) -> Tensor:
    rows = x.view(-1, WIDTH)
    rows.add_(1)
    rows[3:5] = 7
    return rows * 2


def _write_through_what_is_detached(x: Tensor) -> Tensor:
    x.detach().add_(1)
    return x * 2


def _write_a_copy(x: Tensor) -> Tensor:
    x.clone().add_(1)
    return x * 2


def _fill(x: Tensor) -> Tensor:
    x[:, 2:4] = 7
    return x


def _write_to_another(x: Tensor) -> Tensor:
    other = torch.zeros(x.shape)
    other += x
    other.copy_(x)
    return other


def _write_out(x: Tensor) -> Tensor:
    torch.add(x, 1, out=x)
    return x


def _join_and_part(x: Tensor) -> Tensor:
    text, image = x[:, :TEXT], x[:, TEXT:]
    return torch.cat([image * 2, text], dim=1)


def _part_a_part(x: Tensor) -> Tensor:
    return x[:, TEXT:][:, 3:] * 2


def _write_a_copy_of_a_part(x: Tensor) -> Tensor:
    x[:, TEXT:].contiguous().zero_()
    return x * 2


@torch.library.custom_op("token_shares::add_into", mutates_args=("residual",))
def _add_into(x: Tensor, residual: Tensor) -> Tensor:
    residual.add_(x)
    return residual * 10


@torch.library.custom_op("token_shares::scale_", mutates_args=("x",))
def _scale_in_place(x: Tensor, factor: float) -> None:
    x.mul_(factor)


def _write_to_what_is_not_first(x: Tensor) -> Tensor:
    return _add_into(torch.ones(x.shape), x)


def _write_to_another_and_return(x: Tensor) -> Tensor:
    return _add_into(x, torch.ones(x.shape))


def _write_and_return_nothing(x: Tensor) -> Tensor:
    assert _scale_in_place(x, 2.0) is None
    return x


def _write_two_results(x: Tensor) -> Tensor:
    values, places = torch.empty(2, WIDTH), torch.empty(2, WIDTH, dtype=torch.long)
    found = torch.max(x, 1, out=(values, places))
    return found[0] + found[1] + values


def _pickle(x: Tensor) -> Tensor:
    parts = pickle.loads(pickle.dumps([x, x[:, TEXT:]]))
    return parts[0] + parts[1].sum()


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": lambda x: torch.nn.functional.gelu(x) * 2 + OTHER,
    "broadcast": lambda x: x + torch.arange(float(WIDTH)),
    "sum over tokens": lambda x: x.sum(1),
    "matmul": lambda x: x @ torch.ones(WIDTH, 2),
    "numbers": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: x + x.max().item(),
    "flipped": lambda x: x.flip(1),
    "strided": lambda x: x[:, ::2],
    "another dtype": lambda x: x.to(torch.float64) + 1,
    "normed": lambda x: torch.nn.functional.layer_norm(x, (WIDTH,), eps=1e-6),
    "normed over tokens": lambda x: torch.nn.functional.layer_norm(x, tuple(x.shape[1:])),
    "projected": lambda x: torch.nn.functional.linear(x, MATRIX, MATRIX[:, 0]),
    "projected without bias": lambda x: torch.nn.functional.linear(x, MATRIX),
    "scaled and shifted": lambda x: x * (1 + MATRIX[:2, None, :]) + MATRIX[0, 0],
    "per token": lambda x: x * OTHER[:1, :, :1] + OTHER[0, :, :1],
    "copied": lambda x: x.clone() + 1,
    "heads": lambda x: x.unflatten(-1, (2, -1)) * 2,
    "rows of all samples": lambda x: x.reshape(-1, WIDTH) + 1,
    "other rows": lambda x: x.view(-1, 2, WIDTH // 2) + 1,
    "rows of a part": lambda x: x[:, TEXT:].flatten(0, 1) * 1,
    "a part in another shape": lambda x: x[:, TEXT:].reshape(-1, WIDTH).softmax(-1),
    "rows of a part that are written": lambda x: x[:, TEXT:].flatten(0, 1).add_(1),
    "memory": lambda x: torch.from_dlpack(x) + float(x.data_ptr() == 0),
    "two shares": lambda x: (x * 2) + x,
    "joined and parted": _join_and_part,
    "a part of a part": _part_a_part,
    "written": _write_all,
    "a part is written": _write_a_part,
    "written through a part": _write_through_a_part,
    "written behind a part": _write_behind_a_part,
    "written through a view": _write_through_a_view,
    "written through rows": _write_through_rows,
    "written through what is detached": _write_through_what_is_detached,
    "a copy is written": _write_a_copy,
    "a copy of a part is written": _write_a_copy_of_a_part,
    "pickled": _pickle,
    "filled": _fill,
    "read by one that is written": _write_to_another,
    "out": _write_out,
    "an op writes to its second argument": _write_to_what_is_not_first,
    "an op writes to another tensor": _write_to_another_and_return,
    "an op writes and returns nothing": _write_and_return_nothing,
    "an op writes two results": _write_two_results,
    "an op writes to what it made": lambda x: nn.functional.rrelu(x, training=False),
    "data": lambda x: x.data + 1,
    "written through data": lambda x: x.data.add_(1),
}


def _write_compiled(x: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda tensor: tensor.add_(1), backend="aot_eager")(x)


def _assign_data(x: Tensor) -> None:
    x.data = torch.zeros(x.shape)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "changes the shape": lambda x: x.unsqueeze_(0),
    "resize_.default changes the shape": lambda x: x.resize_(2, WIDTH, TEXT + IMAGE),
    "out changes the shape": lambda x: torch.mm(MATRIX, MATRIX, out=x),
    "is given other data": _assign_data,
    "writes to a tensor in place": _write_compiled,
}


def _made(whole: Tensor) -> TokenShare:
    world = dist.group.WORLD
    assert world is not None
    cut = Cut.over_ranks(1, 1, (TEXT, IMAGE), dist.get_world_size())
    return TokenShare(share_of(whole, cut, dist.get_rank()), cut, str(world.group_name))


def _used(use: Callable[[Tensor], Tensor], mode: Callable[[], Any]) -> list[Tensor]:
    """Returns what a use gives of a plain tensor and of a share, and what it leaves of them."""
    torch.manual_seed(0)
    whole = torch.randn(2, TEXT + IMAGE, WIDTH)
    with mode():
        plain, share = whole.clone(), _made(whole)
        results = [use(plain), use(share), plain, share]
        again = [share * 1, _made(whole)[:, :TEXT]]
        again[1] = again[1] * 1
        results += again
        wholes = [item.whole() if isinstance(item, TokenShare) else item for item in results]
        return [item.clone() for item in wholes]


def _use_all(_rank: int, _num_ranks: int) -> dict[tuple[str, str], list[Tensor]]:
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    return {
        (name, kind): _used(use, mode) for name, use in USES.items() for kind, mode in modes.items()
    }


@pytest.fixture(scope="module")
def used() -> list[dict[tuple[str, str], list[Tensor]]]:
    return run_local_ranks(_use_all, 3, timeout_s=200)


@pytest.mark.gloo
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", USES)
def test_a_share_is_used_like_the_whole(
    used: list[dict[tuple[str, str], list[Tensor]]], name: str, mode: str
) -> None:
    for rank in used:
        expected, actual, plain, share, again, text = rank[name, mode]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(share, plain, rtol=0, atol=0)
        torch.testing.assert_close(again, plain, rtol=0, atol=0)
        assert text.shape == (2, TEXT, WIDTH)


@torch.no_grad()
def _refused_uses(_rank: int, _num_ranks: int) -> dict[str, str]:
    found = {}
    for name, use in REFUSED.items():
        try:
            use(_made(torch.zeros(2, TEXT + IMAGE, WIDTH)))
        except Exception as error:
            found[name] = str(error)
    return found


@pytest.mark.gloo
def test_uses_that_a_share_cannot_keep_are_refused_by_name() -> None:
    for found in run_local_ranks(_refused_uses, 2, timeout_s=100):
        assert found.keys() == REFUSED.keys()
        for name, message in found.items():
            assert "option 'shard'" in message, (name, message)
            assert name in message, (name, message)


class _Block(nn.Module):
    """Adds to a joint sequence in place, in one of several ways, if told to."""

    def __init__(self, write: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.qkv, self.write = nn.Linear(WIDTH, 3 * WIDTH), write

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            self.write(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + attended.transpose(1, 2).flatten(2)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "all": _write_all,
    "part": _write_a_part,
    "through a view": _write_through_a_view,
    "out": _write_out,
    "the same dtype": lambda x: x.to(torch.float32).add_(1),
    "contiguous": lambda x: x.contiguous().add_(1),
    "by position": lambda x: nn.functional.leaky_relu(x, 0.1, True),
    "a module": nn.ELU(inplace=True),
    "transposed": lambda x: x.mT.fill_(1),
    "for each": lambda x: torch._foreach_add_([x], 1.0),
    "a part of several": lambda x: torch.hsplit(x, [2])[0].add_(1),
    "data": lambda x: x.data.add_(1),
}


class _Blocks(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(None), _Block(write), _Block(None)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _OddBlock(nn.Module):
    """Returns more than tensors, its input as it is, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _Block(None)

    def forward(self, x: Tensor, text: Tensor) -> tuple[Any, ...]:
        y = self.block(torch.cat([text, x], 1))
        rows = text.shape[1]
        return None, y[:, rows:], 3, text, x[:, 1:], y[:, :rows], y, "text"


class _OddBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_OddBlock(), _OddBlock(), _OddBlock()])

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        text, x = x[:, :TEXT], x[:, TEXT:]
        seen: list[Any] = []
        for block in self.blocks:
            none, x, number, same, part, text, joint, name = block(x, text)
            seen += [none, number, name, same, part, joint]
        return (*seen, text, x)


def _compiled_by_block(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="cocodiff_eager", options={"shard": {"min_gain": 0}})
    return model


def _odd_blocks(_rank: int, _num_ranks: int) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    model = _OddBlocks().eval()
    x = torch.randn(2, TEXT + IMAGE, WIDTH)
    with torch.no_grad():
        expected = model(x)
        _compiled_by_block(model)
        results = [expected, model(x), model(x)]
    return [
        tuple(item.whole() if isinstance(item, TokenShare) else item for item in result)
        for result in results
    ]


@pytest.mark.gloo
def test_blocks_may_return_what_they_were_given_and_what_is_no_tensor() -> None:
    for expected, *results in run_local_ranks(_odd_blocks, 2, timeout_s=200):
        for result in results:
            for actual, wanted in zip(result, expected, strict=True):
                if isinstance(wanted, Tensor):
                    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)
                else:
                    assert actual == wanted


@torch.no_grad()
def _other_weights(rank: int, _num_ranks: int) -> str:
    torch.manual_seed(0)
    model = _Blocks(None).eval()
    if rank:
        model.blocks[2].qkv.weight.mul_(2)  # which has the graph of the second block
    try:
        _compiled_by_block(model)(torch.ones(2, TEXT + IMAGE, WIDTH))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_other_weights_of_any_block_are_named() -> None:
    first, second = run_local_ranks(_other_weights, 2, timeout_s=200)
    assert first == second
    assert "rank 1 was called with another value than rank 0" in first


def _blocks(_rank: int, _num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, write in {"none": None, **WRITES}.items():
        torch.manual_seed(0)
        model = _Blocks(write).eval()
        x = torch.randn(2, TEXT + IMAGE, WIDTH)
        with torch.no_grad():
            expected = model(x.clone())
            _compiled_by_block(model)
            try:
                actual = [model(x.clone()) for _ in range(2)]
                found[name] = largest_error(actual, [expected] * 2)
            except ValueError as error:
                found[name] = str(error)
    return found


@pytest.mark.gloo
def test_a_compiled_block_that_writes_to_a_share_is_refused() -> None:
    for rank in run_local_ranks(_blocks, 2, timeout_s=200):
        assert rank["none"] < 1e-5
        for name in WRITES:
            assert "writes to its input in place" in str(rank[name]), name
