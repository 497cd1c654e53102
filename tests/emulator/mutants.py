"""What may be taken out of the CUDA sources, found by how it looks, and compiled in for one number to pick it.

A *guard* is a condition that only a running kernel knows: one with a snake_case name in it. Each operand of && and ||
is dropped; a condition by itself always holds or, where it leads away, never; a choice (?:) takes either side; a loop
goes one step further; min and max give either argument. Barriers and waits are left out. clang-format has put blanks
around the operators, and none in front of the arguments of templates.

A comment with the words "right either way" excuses what begins on its line, or below it if it has its own; of a choice
it excuses one side only. Barriers that only keep the compiler from moving instructions have the word "fence" in such a
comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BARRIER = re.compile(r"(?:__sync\w+\(\)|\b(?:\w+\.)+wait\(\)|\b\w+_wait\w*(?:\[[^;()]*\])?\((?:[^()]|\([^()]*\))*\));")
_COMPARISON = re.compile(r"(?<= )(?:[<>]=?|[!=]=)(?= )")
_JOINT = re.compile(r"(?<= )(?:&&|\|\|)(?=\s)")
_CHOICE = re.compile(r"\?(?=\s)")
_STATEMENT = re.compile(r"\b(if|while) \(")
_LOOP = re.compile(r"\bfor \(([^;()]*(?:\([^()]*\)[^;()]*)*;)")
_CLAMP = re.compile(r"(?<![\w.:])(min|max)\(")
_RUNTIME_NAME = re.compile(r"(?<![\w.])(?!(?:sizeof|static_cast|long|int|true|false|nullptr|k[A-Z]\w*)\b)[a-z]\w*")
_EXCUSE = re.compile(r"right either way|\bfence\b")


class Mutant(NamedTuple):
    """One change to one source."""

    number: int
    file: str
    line: int
    text: str
    change: str
    instead: int | None
    """Another mutant that may be noticed in its place."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.text.split())} -> {self.change}"


class Guard(NamedTuple):
    """A place in a source, and its mutants: each is a change, and what goes before and behind the place."""

    begin: int
    end: int
    changes: tuple[tuple[str, str, str], ...]
    excused: bool


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    raise ValueError(f"nothing closes {text[opening : opening + 40]!r}")


def _running_code(source: str) -> str:
    """The source with blanks for comments and for what the compiler decides, character by character."""
    text = re.sub(r"//[^\n]*|^[ \t]*#[^\n]*|\"[^\"\n]*\"", lambda match: _blank(match[0]), source, flags=re.M)
    for match in re.finditer(r"\bif constexpr (?=\()|\b(?:constexpr|static_assert)\b(?! \()[^;{]*", text):
        end = match.end() + 1
        if text[match.end()] in "({":
            end = _closing(text, match.end()) + 1
        text = text[: match.start()] + _blank(text[match.start() : end]) + text[end:]
    # What encloses the arguments of templates is a bracket like others.
    return re.sub(r"(?<![\s>-])>|(?<!\s)(?<! >)>(?=[(> ])", "]", re.sub(r"<(?=[^\s<=])", "[", text))


_BEFORE = re.compile(r"[;,{}]|&& |\|\| |\? |: |(?<![=!<>])=\s|return |else ")
_BEHIND = re.compile(r"[;,{})\]]|\s(?:&&|\|\||[?:])\s")


def _operand(text: str, begin: int, end: int) -> tuple[int, int]:
    """The operand of &&, || or ? that holds a place, without the blanks around it."""
    depth = 0
    while True:
        begin -= 1
        depth += (text[begin] in ")]") - (text[begin] in "([")
        before = _BEFORE.match(text, begin)
        if depth < 0 or (depth == 0 and before):
            break
    begin = begin + 1 if depth < 0 else before.end()  # type: ignore[union-attr]
    depth = 0
    while depth > 0 or not _BEHIND.match(text, end):
        depth += (text[end] in "([") - (text[end] in ")]")
        end += 1
    return begin + len(text[begin:end]) - len(text[begin:end].lstrip()), end


def _conditions(text: str) -> Iterator[tuple[int, int]]:
    """Places of all operands that are true or false."""
    for match in _COMPARISON.finditer(text):
        yield _operand(text, match.start(), match.end())
    for match in _JOINT.finditer(text):
        yield _operand(text, match.start() - 1, match.start() - 1)
        yield _operand(text, match.end() + 1, match.end() + 1)
    for match in _CHOICE.finditer(text):
        yield _operand(text, match.start() - 1, match.start() - 1)
    for match in _STATEMENT.finditer(text):
        yield _operand(text, match.end(), match.end())


def _forced(value: str) -> tuple[str, str, str]:
    return value, f"cpu_cuda_guard(@, {value}, static_cast<bool>(", "))"


def _changes(text: str, begin: int, end: int, loops: list[tuple[int, int]]) -> tuple[tuple[str, str, str], ...]:
    """What may happen to the condition at a place, by what is around it."""
    before, behind = text[max(0, begin - 8) : begin].rstrip(), text[end : end + 4].split()
    neighbours = {before[-2:], *behind[:1]}
    if "&&" in neighbours:
        return (_forced("true"),)
    if "||" in neighbours:
        return (_forced("false"),)
    comparison = _COMPARISON.search(text, begin, end)
    if any(first <= begin and end <= last for first, last in loops) or before.endswith("while ("):
        bound = text[comparison.end() : end] if comparison else ""
        if not comparison or comparison[0] in ("==", "!=") or not _RUNTIME_NAME.search(bound):
            return ()
        return ((f"{text[begin:end]} {'+' if '<' in comparison[0] else '-'} 1", "",
                 f" {'+' if '<' in comparison[0] else '-'} cpu_cuda_mutant(@)"),)  # fmt: skip
    if behind[:1] == ["?"]:
        return _forced("true"), _forced("false")
    if before.endswith("if ("):
        leads_away = re.match(r"\s*\{?\s*(?:return|continue|break)\b", text[end + 1 :])
        return (_forced("false" if leads_away else "true"),)
    return (_forced("true"),)


def guards(source: str) -> list[Guard]:
    """All guards and barriers of a source, in order, without those that a comment excuses."""
    text = _running_code(source)
    loops = []
    for match in _LOOP.finditer(text):
        loops.append((match.end(), text.index(";", match.end())))
    found = {}
    for begin, end in _conditions(text):
        content = text[begin:end]
        if _RUNTIME_NAME.search(content) and not _JOINT.search(re.sub(r"^\(|\)$", "", content)):
            found[begin, end] = _changes(text, begin, end, loops)
    for match in _BARRIER.finditer(text):
        found[match.span()] = (("nothing", "{ if (!cpu_cuda_mutant(@)) ", " }"),)
    for match in _CLAMP.finditer(text):
        begin, end = match.start(), _closing(text, match.end() - 1) + 1
        if _RUNTIME_NAME.search(text, match.end(), end):
            found[begin, match.end()] = (
                (f"the first of {text[begin:end]}", "cpu_cuda_", "@, "),
                (f"the second of {text[begin:end]}", "", "@, "),
            )
    lines, excused = source.split("\n"), set()
    for number, line in enumerate(lines):
        if _EXCUSE.search(line.partition("//")[2]):
            while lines[number].lstrip().startswith(("//", "#")):
                number += 1
            excused.add(number)
    all_guards = [
        Guard(*place, changes, source.count("\n", 0, place[0]) in excused) for place, changes in sorted(found.items())
    ]
    return [guard for guard in all_guards if not guard.excused or _is_choice(guard)]


def _is_choice(guard: Guard) -> bool:
    return [change for change, *_ in guard.changes] == ["true", "false"]


def instrument(source: str, file: str, first_number: int) -> tuple[str, list[Mutant]]:
    """The source with all its mutants in it, and these; line by line as it was."""
    mutants = []
    insertions: list[tuple[int, int, int, int, str]] = []
    original = source
    for guard in guards(source):
        line = 1 + source.count("\n", 0, guard.begin)
        pair = 2 * (first_number + len(mutants)) + 1
        for change, before, behind in guard.changes:
            number = first_number + len(mutants)
            instead = pair - number if guard.excused else None
            mutants.append(Mutant(number, file, line, original[guard.begin : guard.end], change, instead))
            # Of two that begin or end in one place the longer one is outside.
            insertions.append((guard.begin, 1, -guard.end, number, before.replace("@", str(number))))
            insertions.append((guard.end, 0, -guard.begin, number, behind.replace("@", str(number))))
    for place, *_, text in sorted(insertions, reverse=True):
        source = source[:place] + text + source[place:]
    return source, mutants
