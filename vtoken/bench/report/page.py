"""The report as one HTML page that needs nothing else: pictures are inside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from vtoken.bench.report.figure import Figure, Inputs, Row
from vtoken.bench.report.quick import ORDER
from vtoken.bench.tables.cells import MISSING, bar, command_of
from vtoken.bench.tables.overview import LINES, Line
from vtoken.results.files import Result, Source

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0; font-size: 13px }
td, th { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; vertical-align: top }
img { max-width: 100% } .missing { color: #a00 } .origin { color: #666; font-size: 13px }
dt { font-weight: 600 } dd { margin: 0 0 .4rem 0 }
"""

INTRODUCTION = """
<p>Every figure is drawn from result files of this repository's own commands. The paper's numbers stand beside ours;
they were measured on other hardware, engines and models, so compare directions, not digits.</p>
"""

REASONS = {
    "waste": "Who keeps half of the tokens holds at least half of the blocks, and rows grow between two decisions.",
    "idle": "The share timed inside is far below the bar. What the ratio of CPU seconds has on top is partly what the "
    "control, unmodified vLLM against itself, shows too.",
    "copy": "vLLM's CPU layout stores K transposed, so one token's K is one element on each of many cache lines. Whole "
    "blocks hold the bar.",
    "reader": "Rows with holes are read token by token. It is the reader for proofs and for naive; `reader: auto` "
    "reads packed rows with the engine's own kernel.",
    "heartbeats": "Ray's calls cost more than the work in them: one controller is full at about 100 replicas that "
    "send ten heartbeats a second each. More heartbeats in a call carry further.",
    "frontier": "Not every scene has been run.",
    "scoring": "The control is off by more than the bar, so CPU seconds decide nothing; the time inside does not "
    "depend on it.",
    "simulate-study": "Where replicas are equal, an oracle does no better than our router: under sustained overload "
    "the queues break the service level, not their placement.",
}  # fmt: skip
"""Why a bar is missed, as far as it is known; docs/results.md has the experiments."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure with its numbers, and its picture if there is one."""

    figure: Figure
    rows: Sequence[Row]
    picture: Path | None


def page(drawn: Sequence[Drawn], inputs: Inputs, repeated: Inputs | None) -> str:
    """The whole page; `repeated`: what was measured again for it."""
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8"><title>vToken: evaluation</title>',
        f"<style>{STYLE}</style></head><body>", "<h1>vToken: evaluation</h1>",
        INTRODUCTION, _contents(drawn), *_short(inputs), *(_section(one, inputs) for one in drawn),
        *_repeated(inputs, repeated), *_runs(inputs), "</body></html>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _contents(drawn: Sequence[Drawn]) -> str:
    links = (f'<a href="#{one.figure.key}">{escape(one.figure.title)}</a>' for one in drawn)
    return f"<p>{' · '.join(links)}</p>"


# ---- what fell short ------------------------------------------------------------------------------------------------


def _short(inputs: Inputs) -> Iterable[str]:
    yield "<h2>What fell short</h2><ul>"
    for line in LINES:
        result = inputs.results.get(line.id)
        if result is None:
            yield f"<li>{escape(line.question)}: not measured; <code>{command_of(line.id)}</code> does it.</li>"
        elif not result.passed:
            found = f"{escape(line.question)}: {_words(bar(result))}. Bar: {escape(line.bar)}. "
            found += f"Found: {_words(line.found(result.values))}. {escape(REASONS.get(line.id, ''))}"
            yield f"<li>{found}</li>"
    for name, result in inputs.results.items():
        if name.startswith("drill-") and not result.passed:
            yield f"<li><code>{command_of(name)}</code>: {escape('; '.join(result.values.get('failures', [])))}</li>"
    held = [line.question for line in LINES if line.id in inputs.results and inputs.results[line.id].passed]
    yield f"</ul><p>Bars that hold: {escape(', '.join(held)) or 'none'}.</p>"


def _words(text: str) -> str:
    return escape(text.replace("**", "").replace("`", ""))


# ---- figures --------------------------------------------------------------------------------------------------------


def _section(one: Drawn, inputs: Inputs) -> str:
    figure = one.figure
    head = f'<h2 id="{figure.key}">{escape(figure.title)}</h2>'
    paper = f"<dt>Paper</dt><dd>{escape(figure.paper)}</dd>" if figure.paper else ""
    facts = f"<dl>{paper}<dt>Method</dt><dd>{escape(figure.method)}</dd></dl>"
    if not one.rows:
        command = f"<code>{command_of(figure.source)} --record</code>"
        return f'{head}{facts}<p class="missing">No data yet: {command} makes it.</p>'
    shown = _picture(one.picture) if one.picture else _table(one.rows)
    return f"{head}{facts}{shown}{_origin(inputs.results[figure.source], figure.key)}"


def _picture(path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{path.stem}" src="data:image/png;base64,{content}">'


def _origin(result: Result, key: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    words = [f"<code>{escape(result.command)}</code>", escape(result.date), escape(result.machine), escape(versions)]
    if result.quick:
        words.append("a shorter run")
    if result.source is not Source.RUN:
        words.append(f"from {escape(result.source.value)} figures of an earlier run")
    if result.note:
        words.append(escape(result.note))
    whiskers = "Whiskers: 95 % bootstrap intervals. " if result.interval else ""
    return f'<p class="origin">{whiskers}{"; ".join(words)}. Numbers: <code>{key}.csv</code></p>'


def _table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return _html(columns, [[_cell(row.get(name)) for name in columns] for row in rows])


def _cell(value: object) -> str:
    return MISSING if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(one)}</th>" for one in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


# ---- repetition and origin ------------------------------------------------------------------------------------------


def _repeated(inputs: Inputs, repeated: Inputs | None) -> Iterable[str]:
    if repeated is None:
        return
    yield "<h2>Repeated on this machine, in short</h2>"
    yield "<p>Shorter runs say less than those above: that the commands work here, and in which direction.</p>"
    rows = [
        [line.question, *(_found(line, one.results) for one in (inputs, repeated))]
        for line in LINES if line.id in repeated.results
    ]  # fmt: skip
    yield _html(["question", "result file", "here"], rows)
    missing = [name for name in ORDER if name not in repeated.results]
    if missing:
        yield f"<p>Not repeated, or not within the time: {', '.join(missing)}.</p>"


def _found(line: Line, results: Mapping[str, Result]) -> str:
    if line.id not in results:
        return MISSING
    result = results[line.id]
    return f"{line.found(result.values)}: {bar(result)}".replace("**", "").replace("`", "")


def _runs(inputs: Inputs) -> Iterable[str]:
    yield "<h2>All result files</h2>"
    rows = [
        [name, result.command, result.date, result.machine, result.source.value, result.note]
        for name, result in inputs.results.items()
    ]
    yield _html(["id", "command", "date", "machine", "source", "note"], rows)
