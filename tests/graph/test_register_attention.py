# SPDX-License-Identifier: Apache-2.0
"""An op of somebody else's: declined with how to register it, and found once it is registered."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cocodiff_compile
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.attention_ops import AttentionOp, attention_op, registry_text
from cocodiff_compile.passes.recognize_ulysses import recognize
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written import WIDTH, Block
from tests.support.random_trials import try_passes

ENTRY = {"query": "q", "key": "k", "value": "v", "layout": "BSHD", "per_head": {"sinks": 0}}


@torch.library.custom_op("cocodiff_tests::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplies the result of each head with its own number."""
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2).contiguous() * sinks[:, None], torch.zeros(())


@attend.register_fake
def _(q: Tensor, _k: Tensor, _v: Tensor, _sinks: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(())


@torch.library.custom_op("cocodiff_tests::attend_into", mutates_args=("out",))
def attend_into(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    out.copy_(q + k + v)


@torch.library.custom_op("cocodiff_tests::attend_causally", mutates_args=())
def attend_causally(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, window: int) -> Tensor:
    return (q + k + v) * is_causal * window


attend_at_random = torch.library.custom_op(
    "cocodiff_tests::attend_at_random",
    lambda q, k, v: q + k + v,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
LIKE_CAUSAL = {"query": "q", "key": "k", "value": "v", "causal": "is_causal"}


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinks = torch.arange(1, q.shape[2] + 1, dtype=q.dtype)
    return torch.ops.cocodiff_tests.attend(q, k, v, sinks)[0]


@pytest.fixture
def registered() -> Iterator[None]:
    cocodiff_compile.register_attention(attend, **ENTRY)
    yield
    cocodiff_compile.unregister_attention(attend)


def _reasons() -> list[str]:
    with fake_ranks(4):
        (gm,) = capture(Block(attend=_attended, heads=16), torch.randn(2, 8, WIDTH))
        recognition = recognize(gm.graph)
    assert not recognition.sites
    return [item.reason for item in recognition.declined]


def test_an_unknown_op_is_declined_with_how_to_register_it() -> None:
    reasons = _reasons()
    assert reasons
    for reason in reasons:
        assert "register_attention(torch.ops.cocodiff_tests.attend.default" in reason


@pytest.mark.usefixtures("registered")
def test_every_pass_works_on_an_op_that_is_registered() -> None:
    model = Block(attend=_attended, heads=16)
    sites, outcomes = try_passes(model, [torch.randn(2, 8, WIDTH)], 4)
    assert sites == 1
    assert outcomes["chunk-heads"] == outcomes["split-tapa-phases"] == "rewritten"
    assert outcomes["chunk-tokens"] == "declined"  # it reads more than its query by token
    assert outcomes["all"] == outcomes["select-v-major"] == "rewritten"


def test_an_op_with_another_number_of_dims_than_registered_is_refused() -> None:
    cocodiff_compile.register_attention(attend, **{**ENTRY, "layout": "SHD"})
    try:
        with pytest.raises(UserError, match=r"layout 'SHD', but its argument 'q' .* has 4 dims"):
            _reasons()
    finally:
        cocodiff_compile.unregister_attention(attend)


def test_an_entry_is_not_changed_from_outside() -> None:
    entry = copy.deepcopy(ENTRY)
    cocodiff_compile.register_attention(attend, **entry)
    try:
        entry["per_head"].clear()  # type: ignore[attr-defined]
        found = attention_op(torch.ops.cocodiff_tests.attend.default)
        assert found is not None
        assert found.per_head == {"sinks": 0}
    finally:
        cocodiff_compile.unregister_attention(attend)


def test_what_is_registered_is_a_text_that_tells_fields_apart() -> None:
    texts = [registry_text()]
    for layout in ("BSHD", "BHSD", "BSHD"):
        cocodiff_compile.register_attention(attend, **{**ENTRY, "layout": layout})
        texts.append(registry_text())
        cocodiff_compile.unregister_attention(attend)
    assert texts[0] == "none"
    assert texts[1] == texts[3] != texts[2]


def test_registering_is_taken_back() -> None:
    target = torch.ops.cocodiff_tests.attend.default
    assert attention_op(target) is None
    cocodiff_compile.register_attention(torch.ops.cocodiff_tests.attend, **ENTRY)
    assert attention_op(target) == AttentionOp("cocodiff_tests::attend", **ENTRY)
    cocodiff_compile.unregister_attention(target)
    assert attention_op(target) is None


@pytest.mark.parametrize(
    ("op", "entry", "words"),
    [
        (attend, {}, "has no argument 'query', 'key', 'value': its schema is"),
        (attend, {**ENTRY, "per_head": {}}, "what its tensors 'sinks' hold is not known"),
        (attend, {**ENTRY, "layout": "SBHD"}, "'layout' is 'SBHD'; allowed: 'BHSD', 'BSHD'"),
        (attend, {**ENTRY, "output": "out"}, "'output' is 'out'; allowed: a whole number"),
        (attend, {**ENTRY, "shared": "sinks"}, "'shared' is 'sinks'; allowed: a tuple of names"),
        (attend_causally, LIKE_CAUSAL, "what its flags and numbers 'window' do is not known"),
        (attend_at_random, {**LIKE_CAUSAL, "causal": None}, "it draws random numbers"),
        (attend, {**ENTRY, "per_head": ["sinks"]}, "'per_head' is ['sinks']; allowed: a dict"),
        (attend, {**ENTRY, "is_pattern": True}, "unknown field 'is_pattern'"),
        (attend, {**ENTRY, "output": 2}, "'output' is 2; it has 2 results"),
        (attend, {**ENTRY, "casual": "c"}, "unknown field 'casual' for cocodiff_tests.attend"),
        (attend, {**ENTRY, "causal": "is_causal"}, "has no argument 'is_causal'"),
        (
            attend_into,
            {**ENTRY, "per_head": {}, "shared": ("out",)},
            "it writes to its arguments",
        ),
        (F.scaled_dot_product_attention, {}, "allowed: an op of torch.library"),
        (None, {}, "None is NoneType, no attention op; allowed"),
        (
            torch.ops.aten.slice,
            {},
            "aten.slice has several overloads, none of them the default: give",
        ),
    ],
)
def test_what_does_not_fit_the_op_is_refused(op: Any, entry: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        cocodiff_compile.register_attention(op, **entry)
    assert words in str(raised.value)
