# SPDX-License-Identifier: Apache-2.0
"""Decides which attentions V-Major codes: those that gain time by it, as far as memory allows."""

from __future__ import annotations

from cocodiff_compile.decide.coding_worth import CodingWorth
from cocodiff_compile.ir.layout import static_size
from cocodiff_compile.ir.records import Recognition, UlyssesSite
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.v_major.payload import CachedRoles


def choose_uncoded(
    select: SelectVMajor,
    recognition: Recognition,
    budget_bytes: float | None = None,
    worth: CodingWorth | None = None,
) -> tuple[str, ...]:
    """Returns for each attention why it is left uncompressed, nothing where it is coded. Those that
    send most get room in the budget first. Without `worth` all are taken to gain time.
    """
    select.check_layers(recognition.sites)
    reasons = [worth.why_not(site) if worth else "" for site in recognition.sites]
    sizes = [
        _cache_bytes(site, select.cached_roles_of(place, site))
        for place, site in enumerate(recognition.sites)
    ]
    left = budget_bytes
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        if left is None or reasons[place]:
            continue
        if sizes[place] > left:
            reasons[place] = (
                f"its caches exceed the memory budget of {budget_bytes} bytes: sent uncompressed"
            )
        else:
            left -= sizes[place]
    return tuple(reasons)


def _cache_bytes(site: UlyssesSite, cached_roles: CachedRoles) -> int:
    """The bytes of the caches of one attention; what it sends, and so can save, grows with it."""
    total = 0
    for exchange, roles, _ in site.exchanged:
        copies = sum(cached_roles.sides_of(roles))
        total += copies * (static_size(exchange.size_bytes) or 0)
    return total
