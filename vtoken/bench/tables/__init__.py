"""The generated tables of the pages: name -> what makes its Markdown of the result files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vtoken.bench.tables import engines, fleet, overview, pieces, quality, questions
from vtoken.results.pages import Table

PAGES = (Path("README.md"), Path("docs/results.md"), Path("docs/simulator.md"))

TABLES: Mapping[str, Table] = {
    "overview": overview.overview,
    "questions": questions.questions,
    "runs": overview.runs,
    "readme": fleet.readme,
    "capacity": engines.capacity,
    "waste": engines.waste,
    "sla": engines.sla,
    "prefix": engines.prefix,
    "identity": engines.identity,
    "choices": engines.choices,
    "soak": engines.soak,
    "idle": engines.idle,
    "speed": engines.speed,
    "scoring": engines.scoring,
    "rows": pieces.rows,
    "reader": pieces.reader,
    "copies": pieces.copies,
    "bookkeeping": pieces.bookkeeping,
    "routing": pieces.routing,
    "heartbeats": pieces.heartbeats,
    "pressure": pieces.pressure,
    "perplexity": quality.perplexity,
    "needles": quality.needles,
    "needle-sets": quality.needle_sets,
    "likeness": quality.likeness,
    "drills": fleet.drills,
    "simulator": fleet.simulator,
    "capacities": fleet.capacities,
    "routers": fleet.routers,
    "sensitivity": fleet.sensitivity,
    "settings": fleet.settings,
}
