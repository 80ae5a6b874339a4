# SPDX-License-Identifier: Apache-2.0
"""A tensor of which each rank holds a share, between blocks that are compiled one by one.

A compiled block returns its shares as `TokenShare`. The next compiled block takes the share of its
rank as it is, without traffic, and so do ops between blocks that work token by token: a residual
that is added, text and image that are joined or parted. Any other op that reads it gathers the
whole first; all ranks run the same program, so that they gather together. In a captured graph the
whole is one op, `WHOLE`.

    block 1 (compiled) -> TokenShare -> block 2 (compiled) -> TokenShare -> norm (eager): gathered
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from cocodiff_compile.compat import (
    find_group,
    group_ranks,
    is_capturing,
    is_recording,
    not_captured,
    outside_the_compiler,
)
from cocodiff_compile.cut.cut import Cut, CutUnknown
from cocodiff_compile.cut.view_rules import reshaped_cut
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import aten
from cocodiff_compile.ir.layout import Size
from cocodiff_compile.ir.pointwise import POINTWISE
from cocodiff_compile.ranks.agreement.eager_calls import eager_call
from cocodiff_compile.shard.model_calls import is_gathered_behind, next_step
from cocodiff_compile.shard.mutable_ops import changes_shape, with_own_arguments, written_by
from cocodiff_compile.shard.whole_of_shares import WHOLE, share_of

_LEFT = (
    "option 'shard': a tensor of which this rank holds a share has left the model as an attribute "
    "or in an object that is no tuple, dict or dataclass: it cannot be read here, where others may "
    "not read it; return it from the model's forward, or read it there"
)
_NEW_SHAPE = (
    "option 'shard': {op} changes the shape of a tensor in place, of which this rank holds a "
    "share; make a new tensor instead"
)
_NEW_DATA = (
    "option 'shard': a tensor of which this rank holds a share is given other data; use the other "
    "tensor instead of assigning to .data"
)
_WRITTEN_WHILE_CAPTURED = (
    "option 'shard': {op} writes to a tensor in place, of which this rank holds a share, in code "
    "that is compiled; write x = x + y instead of x += y"
)
_MAX_ORIGIN = 160


@dataclass(frozen=True)
class _Source:
    """Says what a view of a share looks at, and how."""

    base: TokenShare
    of_share: Callable[[Tensor], Tensor]
    of_whole: Callable[[Tensor], Tensor]


class TokenShare(Tensor):
    """Has the shape of the whole, and holds the share of this rank. It is gathered when read.

    From then on it holds the whole, which may be written to, also through views of it. A view of a
    share holds nothing itself: it reads the share that it looks at.
    """

    cut: Cut
    group: str
    origin: str
    """What this is, in words that all ranks use alike: ranks compare what they gather."""
    _held: Tensor | None
    _source: _Source | None
    """What this is a view of."""
    _whole: Tensor | None
    _is_of_a_call: bool
    """Whether it was made in the call of a model, which it must not leave."""
    _shown: Tensor
    """What was last shown of it, kept alive: Dynamo takes tensors at one address for the same."""

    @staticmethod
    def __new__(
        cls,
        share: Tensor,
        cut: Cut,
        group: str,
        strides: Sequence[Any] | None = None,
        origin: str = "",
    ) -> TokenShare:
        """Makes a share of a contiguous whole, or of one that lies in memory with `strides`."""
        shape = list(share.shape)
        shape[cut.dim] = int(cut.outer) * int(cut.inner)
        made: TokenShare = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=share.dtype, device=share.device
        )
        return made

    def __init__(
        self,
        share: Tensor,
        cut: Cut,
        group: str,
        strides: Sequence[Any] | None = None,  # noqa: ARG002  (of __new__)
        origin: str = "",
    ) -> None:
        super().__init__()
        self.cut, self.group, self.origin = cut, group, origin
        self._held, self._source, self._whole = share, None, None
        self._is_of_a_call = is_gathered_behind()

    @property
    def share(self) -> Tensor:
        """Returns what this rank holds."""
        if self._held is not None:
            return self._held
        with outside_the_compiler() if is_capturing() else nullcontext():  # what is held is real
            if self._source is not None:
                self._shown = self._source.of_share(self._source.base.share).contiguous()
            else:
                assert self._whole is not None
                rank = find_group(self.group).rank()
                self._shown = share_of(self._whole, self.cut, rank)
        return self._shown

    def whole(self) -> Tensor:
        """Returns all of it. Every rank of the group must call this."""
        if self._source is not None:
            return self._source.of_whole(self._source.base.whole())
        if self._whole is not None:
            return self._whole
        cut = self.cut
        place = (cut.dim, int(cut.outer), list(cut.segments), cut.count)
        if is_capturing():  # a graph has values of its own
            in_graph: Tensor = WHOLE(self.share, *place, self.group)
            return in_graph
        if self._is_of_a_call and not is_gathered_behind():
            raise UserError(_LEFT)
        origin = self.origin or "a share"
        what = f"in step {next_step()} of a model's call the gather of {list(self.shape)}, {origin}"
        with eager_call(tuple(group_ranks(self.group) or ()), what):
            self._whole = WHOLE(self.share, *place, self.group)
        self._held = None
        return self._whole

    def part(self, first: int, last: int) -> TokenShare:
        """Returns the rows of some segments, by the first one and the one behind the last."""
        cut = self.cut

        def rows(lengths: Sequence[Size]) -> Callable[[Tensor], Tensor]:
            begin, end = sum(lengths[:first]), sum(lengths[:last])
            return lambda tensor: tensor.narrow(cut.dim, begin, end - begin)

        return self._view(
            cut.with_segments(cut.segments[first:last]), rows(cut.pieces), rows(cut.segments)
        )

    def reshaped(self, cut: Cut, shape: Sequence[int]) -> TokenShare:
        """Returns a view of another shape, in which shares lie as a cut says."""
        own = list(shape)
        own[cut.dim] = int(cut.outer) * int(cut.lengths[0])
        return self._view(cut, lambda share: share.reshape(own), lambda whole: whole.view(*shape))

    def _view(
        self,
        cut: Cut,
        of_share: Callable[[Tensor], Tensor],
        of_whole: Callable[[Tensor], Tensor],
    ) -> TokenShare:
        strides = of_whole(_like(self)).stride()
        origin = _origin(f"a view {list(cut.segments)}", [self])
        made = TokenShare(of_share(self.share), cut, self.group, strides, origin)
        made._held, made._source = None, _Source(self, of_share, of_whole)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TokenShare({list(self.shape)}, {self.cut.count} shares)"

    # What torch does not dispatch.

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, _other: Tensor) -> None:
        raise UserError(_NEW_DATA)

    @not_captured
    def tolist(self) -> Any:
        return self.whole().tolist()

    @not_captured
    def numpy(self, *, force: bool = False) -> Any:
        return self.whole().numpy(force=force)

    @not_captured
    def data_ptr(self) -> int:
        return self.whole().data_ptr()

    @not_captured
    def __dlpack__(self, **how: Any) -> Any:
        return self.whole().__dlpack__(**how)

    @not_captured
    def share_memory_(self) -> Any:
        return self.whole().share_memory_()  # type: ignore[no-untyped-call]

    @not_captured
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @not_captured
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.whole(), memo)

    # What torch asks of a tensor class that can be captured

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Cut, str]]:
        return ["share"], (self.cut, self.group)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: tuple[Cut, str], _size: Any, strides: Any
    ) -> TokenShare:
        return TokenShare(inner["share"], *context, strides)

    def _stable_hash_for_caching(self) -> str:
        return repr((self.cut, self.group))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @not_captured
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (kept := _kept_shared(func, args, kwargs)) is not None:
            return kept
        written = [item for item in written_by(func, args, kwargs) if isinstance(item, TokenShare)]
        _refuse_write(func, args, written)
        given, named = pytree.tree_map_only(TokenShare, TokenShare.whole, (args, kwargs))
        result = func(*given, **named)
        if any(item.whole().shape != item.shape for item in written):
            raise UserError(_NEW_SHAPE.format(op=func))
        return with_own_arguments(func, args, kwargs, result) if written else result


def _refuse_write(
    func: Callable[..., Any], args: Sequence[Any], written: Sequence[TokenShare]
) -> None:
    """Raises UserError if an op writes to shares in a way that a whole made of them cannot keep."""
    if changes_shape(func) and isinstance(args[0], TokenShare):
        raise UserError(_NEW_SHAPE.format(op=func))
    if written and is_recording():
        raise UserError(_WRITTEN_WHILE_CAPTURED.format(op=func))


def _origin(how: str, shares: Sequence[TokenShare]) -> str:
    """Describes what was made of these shares, in a text that stays short."""
    text = f"{how} of ({', '.join(item.origin for item in shares)})"
    if len(text) <= _MAX_ORIGIN:
        return text
    return f"{how} of {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _kept_shared(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of an op as a share, if every rank can compute its own from its shares;
    None if not, or in a graph that is being captured, where the rank is not known.
    """
    operands = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    shares = [item for item in operands if isinstance(item, TokenShare)]
    first = shares[0]
    if func is aten.detach.default:
        return _with_same_share(first) if is_capturing() else _all_of(first)
    if is_capturing() or any(item.group != first.group for item in shares):
        return None
    if func is aten.cat.default and len(operands) == len(shares):
        return _joined(shares, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if func is aten.slice.Tensor and not kwargs:
        return _sliced(*args)
    if func is aten.view.default:
        return _viewed(first, args[1])
    if func in POINTWISE or func is aten.clone.default:
        return _pointwise(func, args, kwargs, first)
    if len(shares) == 1 and not kwargs:
        return _by_rows(func, args, first)
    return None


def _like(source: TokenShare) -> Tensor:
    """Returns a tensor without values that lies in memory as the whole does."""
    return torch.empty_strided(source.shape, source.stride(), device="meta")


def _with_same_share(source: TokenShare) -> TokenShare:
    return TokenShare(source.share, source.cut, source.group, source.stride(), source.origin)


def _all_of(source: TokenShare) -> TokenShare:
    return source.part(0, len(source.cut.segments))


def _joined(shares: Sequence[TokenShare], dim: int) -> TokenShare | None:
    first = shares[0].cut
    if dim % shares[0].dim() != first.dim:
        return None
    if any((item.cut.dim, item.cut.outer) != (first.dim, 1) for item in shares):
        return None
    cut = first.with_segments([n for item in shares for n in item.cut.segments])
    share, origin = torch.cat([item.share for item in shares], first.dim), _origin("cat", shares)
    return TokenShare(share, cut, shares[0].group, origin=origin)


def _sliced(
    source: TokenShare,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> TokenShare | None:
    cut = source.cut
    if dim % source.dim() != cut.dim or cut.outer != 1 or step != 1:
        return None
    begin, end, _ = slice(start, end).indices(source.shape[cut.dim])
    bounds = [0, *itertools.accumulate(cut.segments)]
    if begin not in bounds or end not in bounds or begin >= end:
        return None
    first, last = bounds.index(begin), bounds.index(end)
    return source.part(first, last)


def _viewed(source: TokenShare, shape: Sequence[int]) -> TokenShare | None:
    after = [*_like(source).view(shape).shape]
    try:
        cut = reshaped_cut(source.cut, source.shape, after, "a view of a share")
    except CutUnknown:
        return None
    return source.reshaped(cut, after)


def _pointwise(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], first: TokenShare
) -> TokenShare | None:
    """Computes an op element by element; operands may be broadcast to the first share's shape."""
    operands = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    shapes = [item.shape for item in operands]
    if torch.broadcast_shapes(*shapes) != first.shape:  # type: ignore[no-untyped-call]
        return None
    rank = find_group(first.group).rank()

    def own(operand: Tensor) -> Tensor:
        dim = first.cut.dim - first.dim() + operand.dim()
        if isinstance(operand, TokenShare) and operand.shape == first.shape:
            is_alike = operand.cut.is_like(first.cut)
            return operand.share if is_alike else share_of(operand.whole(), first.cut, rank)
        whole = operand.whole() if isinstance(operand, TokenShare) else operand
        is_repeated = dim < 0 or whole.shape[dim] == 1
        return whole if is_repeated else share_of(whole, first.cut.at(dim), rank)

    given, named = pytree.tree_map_only(Tensor, own, (args, kwargs))
    origin = _origin(str(func), [item for item in operands if isinstance(item, TokenShare)])
    return TokenShare(func(*given, **named), first.cut, first.group, origin=origin)


def _by_rows(func: Callable[..., Any], args: Sequence[Any], first: TokenShare) -> Any:
    """Computes a norm over channels, or a matmul with one matrix for all rows: between blocks and
    behind the last one these are the ops of large results.
    """
    cut, group, origin = first.cut, first.group, _origin(str(func), [first])

    def made(share: Tensor) -> TokenShare:
        return TokenShare(share, cut, group, origin=origin)

    if func is aten.native_layer_norm.default and args[0] is first:
        if cut.dim >= first.dim() - len(args[1]):
            return None
        return tuple(map(made, func(first.share, *args[1:])))
    if func is aten.mm.default and args[0] is first and cut.dim == 0:
        return made(func(first.share, args[1]))
    is_bias = func is aten.addmm.default and args[0].dim() == 1
    if is_bias and len(args) == 3 and args[1] is first and cut.dim == 0:
        return made(func(args[0], first.share, args[2]))
    return None
