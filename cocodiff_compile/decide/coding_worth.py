# SPDX-License-Identifier: Apache-2.0
"""Estimates whether coding an attention's exchanges saves more time on the links than it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.ir.aten import value_of
from cocodiff_compile.ir.layout import Size, static_size
from cocodiff_compile.ir.records import Exchange, Role, UlyssesSite
from cocodiff_compile.v_major.payload import Payload

_TRAFFIC_BYTES = 32
"""The bytes that coding and decoding move per element: float32 differences and caches, read and
written. On two cores this came to 2 to 4 ns.
"""


@dataclass(frozen=True)
class CodingWorth:
    """Weighs coding in steps of the usual kind; what does not pay in them is never coded."""

    costs: Costs
    usual: Payload

    def why_not(self, site: UlyssesSite) -> str:
        """Returns why an attention should be sent uncompressed; nothing if coded or unknown."""
        saved_s = taken_s = 0.0
        for exchange, roles, group in site.exchanged:
            share, size_bytes = (
                self._share(exchange, roles, group),
                static_size(exchange.size_bytes),
            )
            if share is None or size_bytes is None or exchange.group not in self.costs.machines:
                return ""
            if share == 1:
                continue
            coded = replace(self.costs, sent_share=share)
            saved_s += self.costs.planned(exchange.group, size_bytes).seconds
            saved_s -= coded.planned(exchange.group, size_bytes).seconds
            elements = size_bytes / value_of(exchange.start).element_size()
            taken_s += self.costs.device.memory_seconds(_TRAFFIC_BYTES * elements)
        if taken_s < saved_s:
            return ""
        return (
            f"coding would take {1e3 * taken_s:.2f} ms a step and save {1e3 * saved_s:.2f} ms on "
            "the links: it is sent uncompressed; set v_major={'only_if_faster': False} to code "
            "it anyway"
        )

    def _share(self, exchange: Exchange, roles: tuple[Role, ...], group: Size) -> float | None:
        elements = static_size(group)
        if elements is None:
            return None
        bits = 8 * value_of(exchange.start).element_size()
        return max(self.usual.share_of(role, bits, elements) for role in roles)
