"""Refusal of options that a function does not have, with hints for calls that are carried over from other libraries.

None of their names is accepted: many mean something slightly else, and a wrong result is worse than an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import wraps
from math import prod
from typing import Any, TypeVar

from .arrays import FLOAT_NAMES, INTEGER_NAMES
from .signatures import NOT_NEEDED, NOT_NEEDED_BESIDE, OUR_NAMES, OUR_NAMES_BESIDE, TOO_MANY

Function = TypeVar("Function", bound=Callable[..., Any])

_parameters: dict[str, frozenset[str]] = {}
"""Names of the parameters of each public function that explains unknown ones."""
positional: dict[str, list[str]] = {}
"""Those of them that need not be named."""
CLOSE = 0.75
"""How alike a name has to be to one of ours; with less, more hints are wrong than right."""


def explains_unknown_options(function: Function) -> Function:
    """Leave `*more` and `**unknown` out of the signature that `help` and `inspect.signature` show."""
    signature = inspect.signature(function)
    shown = _without_unknown(signature)
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    _parameters[function.__name__] = frozenset(x.name for x in shown)
    positional[function.__name__] = [x.name for x in shown if x.kind is not inspect.Parameter.KEYWORD_ONLY]
    return function


def explains_unknown_names(function: Function) -> Function:
    """Refuse arguments that a function does not have with the same hints; a class by its `__init__`.

    A call more, for what is not called by the thousand: such functions have no defaults for what a call must have.
    """
    name = function.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(function).parameters
    known = _parameters[name] = frozenset(parameters) - {"self"}
    unnamed = [x.name for x in parameters.values() if x.kind is not inspect.Parameter.KEYWORD_ONLY]
    positional[name] = [x for x in unnamed if x != "self"]

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        if len(args) > len(unnamed) or not known.issuperset(given):
            check_options(name, given, args[len(unnamed) :])
        return function(*args, **given)

    return checked  # type: ignore[return-value]


def passes_options_to(other: Callable[..., Any], but: Sequence[str]) -> Callable[[Function], Function]:
    """Let hints know what a method takes that passes `**options` on, to a function whose parameters `but` it sets."""

    def decorate(method: Function) -> Function:
        own = {x.name for x in _without_unknown(inspect.signature(method))} - {"self"}
        _parameters[method.__qualname__] = _parameters[other.__name__] - set(but) | own
        return method

    return decorate


def _without_unknown(signature: inspect.Signature) -> list[inspect.Parameter]:
    hidden = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return [x for x in signature.parameters.values() if x.kind not in hidden]


def check_options(
    function: str, given: Iterable[str], more: Sized = (), namesake: Callable[..., Any] | None = None
) -> None:
    """Raise a TypeError that helps with what a public function does not have: positional arguments, or an option.

    Only of those that explain unknown ones; Python itself refuses them for others. `namesake`: the function that was
    called, if it is another one of that name, with options of its own.
    """
    if more:
        names = positional[function]
        others = ", ".join(sorted(_parameters[function].difference(names)))
        taken = f"{len(names)} positional arguments ({', '.join(names)})" if names else "no positional arguments"
        instead = TOO_MANY.get(function, f"name the others, of {others}")
        raise TypeError(f"{function}() takes {taken} but {len(names) + len(more)} were given; {instead}")
    known = _parameters.get(function)
    for name in given:
        if known is not None and name not in known:
            if namesake is not None:
                known = frozenset(x.name for x in _without_unknown(inspect.signature(namesake)))
            words = _hint(function, name, known)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {words}")


def _hint(function: str, name: str, known: frozenset[str]) -> str:
    """Say what to do about a name that a function, of the parameters `known`, does not have."""
    kind = _kind(known)
    names = _of(OUR_NAMES_BESIDE, known, OUR_NAMES if kind["causal"] else {})
    advice = _of(NOT_NEEDED_BESIDE, known, NOT_NEEDED if kind["q"] else {})
    if name in advice:
        return advice[name]
    if name in names:
        return f"cuflash calls it {names[name]}{_unless_taken(function, names[name], known)}"
    alike = {other: x for other, x in _parameters.items() if name in x and _kind(x) == kind}
    if alike:
        return f"{max(alike, key=lambda other: len(alike[other] & known))} takes it"
    from difflib import get_close_matches

    for close in get_close_matches(name.lower(), sorted({*known, *names, *advice}), n=1, cutoff=CLOSE):
        return f"did you mean {close}?" + ("" if close in known else f" {_hint(function, close, known)}")
    return f"expected one of {', '.join(sorted(known - {'q', 'k', 'v'}))}"


def dtype_hint(name: str, dtype: str) -> str:
    """Say how arrays of other kinds go in."""
    if dtype.endswith("(byte-swapped)"):
        return f"; pass {name}.astype({name}.dtype.newbyteorder('='))"
    if name == "mask" and dtype in FLOAT_NAMES:
        return "; what is added to the scores goes in as bias"
    if name == "mask" and dtype in INTEGER_NAMES:
        return "; if 1 is to attend, pass mask.astype(bool)"
    if (name, dtype) == ("bias", "bool"):
        return "; what hides where it is False goes in as mask"
    return f"; pass {name}.astype(np.float32)" if name in ("q", "k", "v", "bias") and dtype in INTEGER_NAMES else ""


def rows_hint(name: str, shape: tuple[int, ...]) -> str:
    """Say how rows of one number go in."""
    return f"; if each row has one feature, pass {name}[:, None]" if len(shape) == 1 else ""


def axes_hint(name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> str:
    """Say how an array with other axes goes in, as other libraries have them."""
    if len(shape) > len(target) and shape[-2:] == (1, 1):
        return f"; pass {name}[..., 0, 0]"
    if len(target) > 2 and shape == (*target[:-2], target[-1]):
        return f"; if it is one row for all queries of a head, pass {name}[..., None, :]"
    if name in ("bias", "mask") and target[-3] > 1 and shape[-2:] == (target[-3],) * 2:
        return "; if the arrays are (batch, sequence, heads, feature), pass x.swapaxes(-3, -2) of each"
    if len(target) < 4:
        return ""
    colons = ":, " * (len(target) - 3)
    if shape == (*target[:-3], target[-1]):
        return f"; if it is one row for all queries of a batch, pass {name}[{colons}None, None, :]"
    if shape in ((*target[:-3], *target[-2:]), (*target[:-3], 1, target[-1])):
        return f"; if all heads of a batch share it, pass {name}[{colons}None, :, :]"
    if shape == (prod(target[:-2]), *target[-2:]):
        return f"; if its first axis has the heads of all batches, pass {name}.reshape{target}"
    return ""


def _of(beside: dict[str, dict[str, str]], known: frozenset[str], others: dict[str, str]) -> dict[str, str]:
    """Collect what holds for all functions of a kind, and what holds for those with certain parameters."""
    found = dict(others)
    for parameter, names in beside.items():
        found |= names if parameter in known else {}
    return found


def _unless_taken(function: str, ours: str, known: frozenset[str]) -> str:
    """Add that a function does not take what cuflash calls it, unless that is said."""
    first = ours.replace(",", " ").replace("=", " ").replace(":", " ").split()[0]
    return "" if first in known or ", which attention" in ours else f"; {function} takes no {first}"


def _kind(parameters: frozenset[str]) -> dict[str, bool]:
    """What functions have in common whose options are mixed up: attention, the delta rule, what computes neither."""
    return {name: name in parameters for name in ("q", "causal")}
