# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree or fail: every rank raises, and says why. `test_fault_matrix.py` has ranks
that die, hang or come late.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from cocodiff_compile import register_attention, unregister_attention
from cocodiff_compile.backends import eager
from cocodiff_compile.cost.phase_plan import plan_phases
from cocodiff_compile.decide import phases
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.ranks.agreement.compile_rounds import first_difference
from tests.support.hand_written import WIDTH, Block

NUM_RANKS = 4
PHASED = {"topology": "aurora", "tapa": "on"}
SIX_RANKS = """
{"name": "six", "copy_bytes_per_s": 1e9, "links": {"any": {"bytes_per_s": 1e9, "latency_s": 1e-6}},
 "axes": [{"name": "gpu", "size": 3, "link": "any"}, {"name": "node", "size": 2, "link": "any"}]}
"""


def _error_of(options: dict[str, Any], batch: int = 1) -> str:
    """Compiles and calls a block anew; the error, empty if there was none."""
    torch._dynamo.reset()
    x = torch.zeros(batch, 2, WIDTH)
    try:
        with torch.no_grad():
            compiled = torch.compile(Block().eval(), backend="cocodiff_eager", options=options)
            compiled(x)
    except UserError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _fails(*_args: Any, **_options: Any) -> Any:
    raise RuntimeError("out of registers")


def _plans_flat(topology: Any, size_bytes: float, _tapa: str) -> Any:
    return plan_phases(topology, size_bytes, "off")


def _with_another_plan() -> str:
    with mock.patch.object(phases, "plan_phases", _plans_flat):
        return _error_of(PHASED)


def _with_broken_code_generation() -> str:
    with mock.patch.object(eager, "run_as_it_stands", _fails):
        return _error_of(PHASED)


def _one_recompiles(rank: int) -> str:
    torch._dynamo.reset()
    model = torch.compile(Block().eval(), backend="cocodiff_eager", options=PHASED)
    x = torch.zeros(1, 2, WIDTH)
    with torch.no_grad():
        model(x)
        if rank == 2:
            torch._dynamo.reset()
        model(x)
    return ""


def _with_a_registered_op() -> str:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    register_attention(op, mask="attn_mask", causal="is_causal", dropout="dropout_p")
    try:
        return _error_of(PHASED)
    finally:
        unregister_attention(op)


def _all_faults(rank: int, _num_ranks: int, six_ranks: str) -> dict[str, str]:
    return {
        "options": _error_of({**PHASED, "tapa": "off"} if rank == 1 else PHASED),
        "shapes": _error_of(PHASED, batch=2 if rank == 2 else 1),
        "bad option": _error_of({"tapa": "maybe"} if rank == 3 else PHASED),
        "bad option everywhere": _error_of({"tapa": "maybe"}),
        "does not fill": _error_of({**PHASED, "topology": six_ranks}),
        "plan": _with_another_plan() if rank == 1 else _error_of(PHASED),
        "registered": _with_a_registered_op() if rank == 1 else _error_of(PHASED),
        "fails": _with_broken_code_generation() if rank == 0 else _error_of(PHASED),
        "works": _error_of(PHASED),
        "recompiles alone": _one_recompiles(rank),
    }


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    file = tmp_path_factory.mktemp("topology") / "six.json"
    file.write_text(SIX_RANKS)
    return run_local_ranks(_all_faults, NUM_RANKS, str(file), timeout_s=300)


SAME_ON_ALL = {
    "options": "ranks disagree about option 'tapa': rank 0 has 'on', rank 1 has 'off'",
    "shapes": "ranks disagree about collective 0: rank 0 has all_to_all_single of 192 "
    "torch.float32 over 4 ranks, rank 2 has all_to_all_single of 384 torch.float32 over 4 ranks",
    "plan": "ranks disagree about exchange 0: rank 0 has the phases tile | gpu, rank 1 has the "
    "phases flat",
    "registered": "ranks disagree about registered attention ops: rank 0 has none, rank 1 has name="
    "'aten::_scaled_dot_product_flash_attention_for_cpu'",
    "bad option everywhere": "option 'tapa' of backend 'cocodiff' is 'maybe'",
    "does not fill": "topology 'six' has 6 ranks (3 gpu x 2 node), the group has 4",
    "works": "",
    "recompiles alone": "",
}


@pytest.mark.gloo
@pytest.mark.parametrize("fault", SAME_ON_ALL)
def test_every_rank_says_the_same(errors: list[dict[str, str]], fault: str) -> None:
    said = {rank[fault] for rank in errors}
    assert len(said) == 1
    assert SAME_ON_ALL[fault] in said.pop()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("fault", "culprit", "words"),
    [("bad option", 3, "option 'tapa' of backend"), ("fails", 0, "out of registers")],
)
def test_the_others_raise_with_the_message_of_the_rank_that_failed(
    errors: list[dict[str, str]], fault: str, culprit: int, words: str
) -> None:
    for rank, said in enumerate(errors):
        assert words in said[fault]
        expected = rank != culprit
        assert said[fault].startswith(f"rank {culprit} failed to compile") is expected


def test_no_difference_no_words() -> None:
    assert first_difference({0: [("a", "1")], 3: [("a", "1")]}) == ""


def test_the_first_difference_names_both_sides() -> None:
    facts = {0: [("a", "1"), ("b", "2")], 1: [("a", "1"), ("b", "2")], 2: [("a", "1"), ("b", "3")]}
    assert "about b: rank 0 has 2, rank 2 has 3" in first_difference(facts)


def test_a_fact_that_only_one_rank_has_is_a_difference() -> None:
    assert "about b: rank 0 has none, rank 1 has 2" in first_difference({0: [], 1: [("b", "2")]})
