# SPDX-License-Identifier: Apache-2.0
"""recognize-ulysses: find every Ulysses attention of a graph.

Needs     a functional ATen inference graph with values on its nodes.
Rewrites  nothing.
Keeps     the graph, to the letter.
Declines  an attention that has some of its exchanges but is not Ulysses as drawn below, with the
          values that speak against it. An attention whose operands are inputs of the graph, on
          several ranks: what exchanges them may lie behind a graph break. An exchange that is cut
          off from its attention by the border of the graph, is another op than all_to_all_single,
          or lies in a branch or a loop. All-to-alls that no attention touches (experts, rings) are
          reported as unrelated and left alone.

    q  projection(s) -> [norm, RoPE] -> pack -> all_to_all -> wait -> unpack --+
    k  projection(s) -> [norm, RoPE] -> pack -> all_to_all -> wait -> unpack --+-> attention --+
    v  projection(s) -----------------> pack -> all_to_all -> wait -> unpack --+               |
    o  projection(s) <- unpack <- wait <- all_to_all <- pack <---------------------------------+

    input exchange   [B, S, H, D] -> [B, N, h, D]   scatters heads,  gathers tokens
    output exchange  [B, N, h, D] -> [B, S, H, D]   scatters tokens, gathers heads

Roles come from the data flow: which operand of the attention an exchange feeds. Q, K and V may
share one exchange. Pack and unpack may be any chain of views, copies and slices; layouts are
followed element by element (`layout.py`), so that no idiom is matched by its spelling. Heads and
tokens may be padded before an exchange and the padding dropped after it; H and S count it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import distributed as dist
from torch.fx import Graph

from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.module_path import module_path_of
from cocodiff_compile.ir.records import Declined, Recognition, UlyssesSite
from cocodiff_compile.recognize.attention_cores import find_attention_cores
from cocodiff_compile.recognize.exchanges import Exchanges, Surroundings
from cocodiff_compile.recognize.independent_work import with_independent_work
from cocodiff_compile.recognize.orphan_exchanges import explain_orphans
from cocodiff_compile.recognize.other_exchanges import decline_other_exchanges
from cocodiff_compile.recognize.refusals import OUTSIDE
from cocodiff_compile.recognize.ulysses_match import match_site


@dataclass(frozen=True)
class RecognizeUlysses:
    """The pass; it has no options."""

    name: str = "recognize-ulysses"

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:  # noqa: ARG002
        return PassResult(changed=False, recognition=recognize(graph))


def recognize(graph: Graph) -> Recognition:
    """Finds all Ulysses attentions of `graph` in linear time, and leaves it untouched."""
    exchanges = Exchanges.of(graph)
    declined = decline_other_exchanges(graph)
    if not exchanges.by_start and not _has_ranks():
        return Recognition(declined=tuple(declined))
    sites: list[UlyssesSite] = []
    orphans = dict(exchanges.by_start)
    for core in find_attention_cores(graph):
        around = Surroundings.of(core, exchanges)
        touched = around.all_to_alls(exchanges)
        if not touched:
            # Else a local attention: nothing crosses the network.
            if _has_ranks() and around.from_outside == {"q", "k", "v"}:
                declined.append(Declined(core.nodes[0], OUTSIDE, module_path_of(core.nodes)))
            continue
        for all_to_all in touched:
            orphans.pop(all_to_all.start, None)
        found = match_site(core, around, exchanges, index=len(sites))
        if isinstance(found, UlyssesSite):
            sites.append(found)
        else:
            declined.append(found)
    unknown, unrelated = explain_orphans(list(orphans.values()), exchanges)
    return Recognition(
        sites=with_independent_work(graph, sites),
        declined=(*declined, *unknown),
        unrelated=tuple(unrelated),
    )


def _has_ranks() -> bool:
    """Returns whether there is anybody to exchange with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
