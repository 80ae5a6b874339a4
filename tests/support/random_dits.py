# SPDX-License-Identifier: Apache-2.0
"""Small random diffusion transformers with Ulysses, as the seed says.

    layer   norm, projections, odd views, [text], norm and rotation, exchange, odd views, attention,
            odd views, exchange, a reader of its result, MLP, residual
    model   some layers, with something odd between them

An odd view is something that people may write there: most keep heads and tokens apart, some mix
them, and a pass must then decline.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import hand_written as hw

T = TypeVar("T")
View = Callable[[Tensor], Tensor]
SIZE = 8
"""Elements of a head."""
WIDTH = 32

LAYOUTS: Mapping[str, hw.Layout] = {
    "diffusers": hw.DIFFUSERS,
    "head first": hw.HEAD_FIRST,
    "transposed": hw.TRANSPOSED,
    "stacked": hw.STACKED,
    "concatenated": hw.CONCATENATED,
    "batched": hw.BATCHED,
    "query apart": hw.QUERY_APART,
    "lists": hw.CHUNKED,
}
PACKED = ("stacked", "concatenated", "batched", "query apart")


def _permuted_index(x: Tensor, dim: int) -> Tensor:
    index = torch.arange(x.shape[dim], device=x.device)
    return x.index_select(dim, (index * 5 + 1) % x.shape[dim])


ON_ROWS: Mapping[str, View] = {
    "copied": lambda x: x.contiguous().clone(),
    "transposed and back": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens moved by padding": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "heads moved by padding": lambda x: F.pad(x, (0, 0, 1, -1)),
    "features moved by padding": lambda x: F.pad(x, (1, -1)),
    "tokens rolled": lambda x: x.roll(1, 1),
    "heads rolled": lambda x: x.roll(1, 2),
    "features rolled": lambda x: x.roll(1, 3),
    "heads picked": lambda x: _permuted_index(x, 2),
    "tokens picked": lambda x: _permuted_index(x, 1),
    "heads reversed": lambda x: x.flip(2),
    "heads repeated": lambda x: x[:, :, [0] * x.shape[2]],
    "split and joined": lambda x: torch.cat(x.split(4, 3), 3),
    "heads split and joined": lambda x: torch.cat(x.chunk(2, 2), 2),
    "tokens swapped": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "unbound and stacked": lambda x: torch.stack(x.unbind(2), 2),
    "squeezed": lambda x: x.unsqueeze(2).squeeze(2).squeeze(2).view_as(x),
    "squeezed anywhere": lambda x: x[None].squeeze().view_as(x),
    "features summed": lambda x: x + x.sum(3, keepdim=True),
    "heads averaged": lambda x: x - x.mean(2, keepdim=True),
    "tokens averaged": lambda x: x - x.mean(1, keepdim=True),
    "samples averaged": lambda x: x - x.mean(0, keepdim=True),
    "softmax over heads": lambda x: x.softmax(2),
    "softmax over features": lambda x: x.softmax(3) * x,
    "largest of heads": lambda x: x + x.amax(2, keepdim=True),
    "clamped": lambda x: x.clamp(-1, 1),
    "sum of tokens so far": lambda x: x.cumsum(1),
    "sorted features": lambda x: x.sort(3).values,
    "complex": lambda x: (
        torch.view_as_real(torch.view_as_complex(x.float().unflatten(3, (-1, 2)).contiguous()) * 1j)
        .flatten(3)
        .to(x.dtype)
    ),
    "written in part": lambda x: torch.slice_scatter(x, x[..., :4] * 2, 3, 0, 4),
    "heads written in part": lambda x: torch.slice_scatter(x, x[:, :, :1] * 2, 2, 0, 1),
    "a scale per head": lambda x: x * torch.arange(1, x.shape[2] + 1, dtype=x.dtype)[:, None],
    "a scale per token": lambda x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None, None],
    "a matrix per head": lambda x: torch.einsum(
        "bshd,hde->bshe", x, torch.ones(x.shape[2], SIZE, SIZE, dtype=x.dtype).tril()
    ),
    "a matrix for all heads": lambda x: x @ torch.ones(SIZE, SIZE, dtype=x.dtype).tril(),
    "heads mixed": lambda x: torch.einsum(
        "bshd,hg->bsgd", x, torch.ones(x.shape[2], x.shape[2], dtype=x.dtype).tril()
    ),
    "flattened": lambda x: x.flatten(1, 2).unflatten(1, (x.shape[1], x.shape[2])),
    "flat and shifted": lambda x: x.flatten(1, 2).roll(1, 1).view_as(x),
    "repeated and cut": lambda x: x.repeat(1, 1, 2, 1)[:, :, : x.shape[2]],
    "interleaved and cut": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "every other feature first": lambda x: torch.cat((x[..., ::2], x[..., 1::2]), 3),
}
"""Functions of [batch, tokens, heads, features]; before an exchange, heads are all ranks' heads."""

ON_TOKENS: Mapping[str, View] = {
    "copied": lambda x: x.clone(),
    "normed": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "tokens moved by padding": lambda x: F.pad(x, (0, 0, 1, -1)),
    "features moved by padding": lambda x: F.pad(x, (1, -1)),
    "tokens swapped": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "one token for all": lambda x: x + x[:, :1],
    "tokens averaged": lambda x: x + x.mean(1, keepdim=True),
    "read as columns": lambda x: x + (x.transpose(1, 2) @ x).mean(1, keepdim=True),
    "tokens first": lambda x: (x.transpose(0, 1) * 2).transpose(0, 1),
    "features first": lambda x: F.gelu(x.transpose(1, 2)).transpose(1, 2),
    "halves gated": lambda x: torch.cat([half.sigmoid() for half in x.chunk(2, 2)], 2) * x,
    "unbound and stacked": lambda x: torch.stack(x.unbind(1), 1),
    "more than there are": lambda x: x[:, -100:] * 2,
    "nothing joined": lambda x: torch.cat([x[:, :0], x], 1),
    "attended among themselves": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None]
    )[:, 0],
    "widened": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
"""Functions of [batch, tokens, width]."""


@dataclass(frozen=True)
class Choices:
    """The properties that are drawn for a model."""

    ranks: int
    batch: int
    tokens: int
    layers: int
    heads: int
    kv_heads: int
    layout: str
    text: int
    attend: str
    mask: str
    fused: bool
    dtype: torch.dtype


class Draws:
    """Draws with names, kept as the description of a model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names: list[str] = []

    def one(self, what: str, options: list[T]) -> T:
        chosen = self.random.choice(options)
        self.names.append(f"{what}: {chosen}")
        return chosen

    def maybe(self, what: str, views: Mapping[str, View], chance: float) -> View:
        """One of the views, or nothing."""
        if self.random.random() >= chance:
            return lambda x: x
        return views[self.one(what, list(views))]


def choose(draws: Draws) -> Choices:
    ranks = draws.one("ranks", [4, 4, 6])
    kv_heads = ranks * draws.one("kv heads per rank", [2, 2, 4])
    layout = draws.one("layout", list(LAYOUTS))
    times = 1 if layout in PACKED else draws.one("queries per kv head", [1, 1, 1, 2])
    attends = [*["fused"] * 6, "causal", "matmuls", "einsums"]
    attend = draws.one("attention", attends) if times == 1 else "grouped"
    return Choices(
        ranks=ranks,
        batch=draws.one("batch", [1, 2, 3]),
        tokens=draws.one("tokens", [3, 8, 12, 16]),
        layers=draws.one("layers", [1, 2, 2]),
        heads=kv_heads * times,
        kv_heads=kv_heads,
        layout=layout,
        text=draws.one("text tokens", [0, 0, 3, 8]),
        attend=attend,
        mask=draws.one("mask", ["", "", "", "keys", "rows", "heads"]) if attend == "fused" else "",
        fused=times == 1 and draws.one("fused projection", [False, False, True]),
        dtype=draws.one("dtype", [torch.float32, torch.float32, torch.bfloat16]),
    )


ATTEND: Mapping[str, Callable[..., Tensor]] = {
    "fused": hw.fused,
    "causal": hw.causal,
    "grouped": hw.repeated,
    "matmuls": hw.batched_matmuls,
    "einsums": hw.einsums,
}


class Layer(nn.Module):
    def __init__(self, chosen: Choices, draws: Draws) -> None:
        super().__init__()
        self.chosen = chosen
        inner, kv_inner = chosen.heads * SIZE, chosen.kv_heads * SIZE
        self.widths = [inner, kv_inner, kv_inner]
        self.projections = self._projections(draws)
        self.text_projections = self._projections(draws) if chosen.text else None
        self.before = [draws.maybe(f"{role} before", ON_ROWS, 0.1) for role in "qkv"]
        self.behind = [draws.maybe(f"{role} behind", ON_ROWS, 0.15) for role in "qkv"]
        self.attended = draws.maybe("attended", ON_ROWS, 0.15)
        self.left = draws.maybe("left", ON_ROWS, 0.1)
        self.is_normed = draws.one("normed", [False, True])
        self.rotated = draws.one("rotated", ["", "before", "behind"])
        self.reader = draws.one("reader", ["linear", "linear", "per head", "columns"])
        self.to_out = nn.Linear(inner, WIDTH)
        self.per_head = nn.Parameter(torch.randn(chosen.heads, SIZE, 4) / 3)
        self.from_heads = nn.Linear(chosen.heads * 4, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.has_mlp = draws.one("mlp", [False, True])

    def _projections(self, draws: Draws) -> nn.ModuleList:
        biases = [draws.random.random() < 0.7 for _ in range(3)]
        if self.chosen.fused:
            return nn.ModuleList([nn.Linear(WIDTH, sum(self.widths), bias=biases[0])])
        pairs = zip(self.widths, biases, strict=True)
        return nn.ModuleList(nn.Linear(WIDTH, width, bias=bias) for width, bias in pairs)

    def _project(self, x: Tensor, layers: nn.ModuleList) -> list[Tensor]:
        projected = [layer(x) for layer in layers]
        if self.chosen.fused:
            projected = list(projected[0].split(self.widths, -1))
        return [part.unflatten(-1, (-1, SIZE)) for part in projected]

    def forward(self, x: Tensor, text: Tensor | None, mask: Tensor | None) -> Any:
        qkv = self._project(F.layer_norm(x, (WIDTH,)), self.projections)
        if text is not None:
            assert self.text_projections is not None
            texts = self._project(text, self.text_projections)
            qkv = [torch.cat(pair, 1) for pair in zip(texts, qkv, strict=True)]
        qkv = [view(part) for view, part in zip(self.before, qkv, strict=True)]
        if self.is_normed:
            qkv = [hw.norm(qkv[0]), hw.norm(qkv[1]), qkv[2]]
        qkv = self._rotate(qkv, "before")
        qkv = list(LAYOUTS[self.chosen.layout].enter(tuple(qkv)))
        qkv = [view(part) for view, part in zip(self.behind, qkv, strict=True)]
        qkv = self._rotate(qkv, "behind")
        masks = () if mask is None else (mask,)
        attended = self.attended(ATTEND[self.chosen.attend](*qkv, *masks))
        left = self.left(LAYOUTS[self.chosen.layout].leave(attended))
        read = self._read(left)
        if text is not None:
            text, read = text + read[:, : text.shape[1]], read[:, text.shape[1] :]
        x = x + read
        return (x + self.mlp(x) if self.has_mlp else x), text

    def _rotate(self, qkv: list[Tensor], where: str) -> list[Tensor]:
        if where != self.rotated:
            return qkv
        places = torch.arange(qkv[0].shape[1], dtype=torch.float32)[None, :, None, None]
        angles = (places * torch.arange(1, SIZE + 1)).to(qkv[0].dtype) / 10
        return [hw.rotate(qkv[0], angles), hw.rotate(qkv[1], angles), qkv[2]]

    def _read(self, left: Tensor) -> Tensor:
        """[B, S, H, D] -> [B, S, WIDTH]"""
        if self.reader == "linear":
            return self.to_out(left.flatten(2))
        if self.reader == "columns":
            columns = left.flatten(2).transpose(1, 2)
            return (self.to_out.weight @ columns).transpose(1, 2)
        heads = left.permute(2, 0, 1, 3).flatten(1, 2) @ self.per_head
        return self.from_heads(heads.transpose(0, 1).flatten(1).unflatten(0, left.shape[:2]))


class RandomDit(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = Draws(seed)
        self.chosen = choose(draws)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Layer(self.chosen, draws) for _ in range(self.chosen.layers))
        self.between = [draws.maybe("between", ON_TOKENS, 0.3) for _ in self.layers]
        self.description = "; ".join(draws.names)
        self.to(self.chosen.dtype)

    def forward(self, x: Tensor, text: Tensor | None, mask: Tensor | None) -> Any:
        for layer, between in zip(self.layers, self.between, strict=True):
            x, text = layer(between(x), text, mask)
        return (x,) if text is None else (x, text)

    def arguments(self) -> tuple[Tensor | None, ...]:
        """Returns the arguments that one rank calls the model with."""
        chosen = self.chosen
        x = torch.randn(chosen.batch, chosen.tokens, WIDTH)
        text = torch.randn(chosen.batch, chosen.text, WIDTH) if chosen.text else None
        mask = self._mask()
        values = (x, text, mask)
        return tuple(None if value is None else value.to(chosen.dtype) for value in values)

    def _mask(self) -> Tensor | None:
        chosen = self.chosen
        tokens = (chosen.tokens + chosen.text) * chosen.ranks
        shapes = {
            "keys": (chosen.batch, 1, 1, tokens),
            "rows": (1, 1, tokens, tokens),
            "heads": (chosen.batch, chosen.heads // chosen.ranks, tokens, tokens),
        }
        return torch.randn(shapes[chosen.mask]) if chosen.mask else None
