# SPDX-License-Identifier: Apache-2.0
"""Prints which package imports which, as it stands in docs/architecture.md.

python -m tests.package_graph
"""

from __future__ import annotations

import grimp

ROOT = "cocodiff_compile"


def imports_of_packages() -> dict[str, list[str]]:
    """Returns the packages that each package imports, from the top of the layers to the bottom."""
    graph = grimp.build_graph(ROOT)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        own = _package(module)
        found.setdefault(own, set())
        for imported in graph.find_modules_directly_imported_by(module):
            found[own].add(_package(imported))
    found.pop("")
    return _from_the_top({name: used - {name, ""} for name, used in found.items()})


def _package(module: str) -> str:
    """Returns the package below the root that a module lies in; nothing for the root itself."""
    return ".".join(module.split(".")[1:2])


def _from_the_top(imports: dict[str, set[str]]) -> dict[str, list[str]]:
    ordered: list[str] = []
    left = dict(imports)
    while left:
        lowest = sorted(name for name, used in left.items() if not used & left.keys())
        if not lowest:
            raise ValueError(f"packages import each other in a cycle: {', '.join(sorted(left))}")
        ordered += lowest
        for name in lowest:
            left.pop(name)
    return {name: sorted(imports[name], key=ordered.index) for name in reversed(ordered)}


def package_graph() -> str:
    """Returns the picture as text: a line for each package."""
    imports = imports_of_packages()
    width = max(map(len, imports))
    return "\n".join(
        f"{name:{width}}  ->  {', '.join(used)}".rstrip(" ->") for name, used in imports.items()
    )


if __name__ == "__main__":
    print(package_graph())
