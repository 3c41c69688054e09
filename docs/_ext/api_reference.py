"""The API reference, written from ``__all__`` of each package: a new name appears by itself."""

import inspect

from public_names import PACKAGE, documented, names, public_objects


def page(package: str) -> str:
    """The docstring of a package, and everything that is documented on its page."""
    lines = [f".. automodule:: {package}", "   :no-members:", ""]
    for name in documented(package):
        lines += [f".. {_directive(name)}:: {name}", ""]
    elsewhere = [n for n in names(package) if f"{PACKAGE}.{n}" not in documented(package)]
    if package == PACKAGE:
        lines += ["The other names of the top level stand on the pages of their packages:", ""]
        lines += [", ".join(f":py:obj:`{name} <{PACKAGE}.{name}>`" for name in elsewhere), ""]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _directive(name: str) -> str:
    found = public_objects()[name]
    if inspect.isclass(found):
        return "autoexception" if issubclass(found, BaseException) else "autoclass"
    return "autofunction" if inspect.isroutine(found) else "autodata"
