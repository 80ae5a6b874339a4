# SPDX-License-Identifier: Apache-2.0
"""Entry points for torch.compile."""

if __name__ != "cocodiff_compile.backends":
    raise ImportError(
        f"this package is cocodiff_compile.backends, but was imported as {__name__!r}: "
        "use `from cocodiff_compile import backends`, so that each class exists once"
    )
