"""Graph passes of cocodiff."""

if __name__ != "cocodiff_compile.passes":
    raise ImportError(
        f"this package is cocodiff_compile.passes, but was imported as {__name__!r}: "
        "use `from cocodiff_compile import passes`, so that each class exists once"
    )
