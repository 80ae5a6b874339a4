# SPDX-License-Identifier: Apache-2.0
"""The passes: one file each, which applies what was decided and decides nothing."""

if __name__ != "cocodiff_compile.passes":
    raise ImportError(
        f"this package is cocodiff_compile.passes, but was imported as {__name__!r}: "
        "use `from cocodiff_compile import passes`, so that each class exists once"
    )

PASS_NAMES = (
    "shard-tokens",
    "recognize-ulysses",
    "split-projections",
    "chunk-heads",
    "chunk-tokens",
    "select-v-major",
    "split-tapa-phases",
    "schedule-v-first",
)
"""The names of all passes, in the order in which they run."""
