"""The report as one self-contained page: no request, no script, light and dark, readable on a phone.

Everything that is not ours goes through `escape`; numbers arrive as text from `cost.report.figures`, so that NaN cannot
reach it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbflow.cost.report.attempts import ATTEMPT_HEADER, PLACE_HEADER, attempt_rows, place_rows
from ebbflow.cost.report.figures import (
    GENERATION_HEADER,
    LEDGER_HEADER,
    comparison_header,
    comparison_rows,
    configuration_rows,
    failure_lines,
    generation_rows,
    key_figures,
    ledger_rows,
    loss_unit,
    plain,
    trust_lines,
)
from ebbflow.cost.report.html_parts import COLOURS, TABLE_STYLE, escape, ledger_bar, loss_chart, table
from ebbflow.cost.report.money_rows import CAUSE_HEADER, cause_rows
from ebbflow.cost.report.next_step import PYTHON, resume_line
from ebbflow.cost.report.report import RunReport

# Shown large, in this order; the others follow in a table.
_HEADLINES = (
    "total",
    "savings",
    "held-out loss",
    "loss / entropy",
    "interruptions",
    "redone",
    "goodput",
    "speed",
    "MFU",
)


def render(report: RunReport, *, python: str = PYTHON) -> str:
    """The whole page. python: the interpreter that the command to go on names."""
    figures = key_figures(report)
    title = f"Ebbflow report: {figures['job']}"
    tone = "bad" if report.exit_code else "good"
    body = [
        f'<header><h1>{escape(figures["job"])}</h1><p class="badge {tone}">{escape(figures["outcome"])}</p></header>',
        _message(report),
        _tiles(figures),
        _section("Where the paid time went", ledger_bar(report) + _ledger(report)),
        _causes(report),
        _section(f"Training loss, {loss_unit(report)}", loss_chart(report)),
        _comparison(report),
        _attempts(report),
        _generations(report),
        _list("What went wrong, first failure first", failure_lines(report)),
        _section("All figures", _definitions(figures)),
        _configuration(report),
        _list("How far to trust this", trust_lines(report)),
        _next_step(report, python),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_STYLE}{TABLE_STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _tiles(figures: dict[str, str]) -> str:
    tiles = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(figures[name])}</b></div>'
        for name in _HEADLINES
        if name in figures
    )
    return f'<div class="tiles">{tiles}</div><p class="quiet">Dollars: {escape(figures["prices"])}</p>'


def _ledger(report: RunReport) -> str:
    colours = [COLOURS[line.ledger_class] for line in report.ledger]
    return table(LEDGER_HEADER, ledger_rows(report), colours=colours, total=True)


def _causes(report: RunReport) -> str:
    rows = cause_rows(report)
    return _section("Dollars by cause", table(CAUSE_HEADER, rows)) if rows else ""


def _comparison(report: RunReport) -> str:
    rows = comparison_rows(report)
    return _section("Plan against actual", table(("", *comparison_header(report)[1:]), rows)) if rows else ""


def _definitions(figures: dict[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in figures.items())
    return f"<dl>{rows}</dl>"


def _message(report: RunReport) -> str:
    message = report.events.get("message")
    return f'<p class="message">{escape(plain(message))}</p>' if message else ""


def _generations(report: RunReport) -> str:
    rows = generation_rows(report)
    return _section("Generations", table(GENERATION_HEADER, rows)) if rows else ""


def _attempts(report: RunReport) -> str:
    attempts = report.money.get("attempts") or []
    if not attempts:
        return ""
    figures = table(ATTEMPT_HEADER, attempt_rows(attempts))
    return _section("Attempts", figures + table(PLACE_HEADER, place_rows(attempts)))


def _configuration(report: RunReport) -> str:
    """What somebody set; the defaults fold away, without a script."""
    if not report.configuration:
        return ""
    chosen, defaults = (configuration_rows(report, defaults=each) for each in (False, True))
    header = ("key", "value", "source")
    folded = f"<details><summary>{len(defaults)} defaults</summary>{table(header[:2], defaults)}</details>"
    return _section("Configuration", (table(header, chosen) if chosen else "") + folded)


def _next_step(report: RunReport, python: str) -> str:
    following = resume_line(report, python=python)
    if following is None:
        return ""
    return _section("What next", f"<p>{escape(following.words)}:</p><pre>{escape(following.command)}</pre>")


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return _section(title, f"<ol>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ol>")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


_STYLE = """
:root{--ink:#1c2430;--quiet:#5d6878;--line:#dde2e9;--page:#f6f7f9;--card:#fff;--good:#1c7c4c;--bad:#b5352c;
--loss:#2663b8;--entropy:#b06a1b}
@media (prefers-color-scheme:dark){:root{--ink:#e7ebf1;--quiet:#9aa6b6;--line:#303a48;--page:#12161c;--card:#1a2029;
--good:#56c48a;--bad:#f0857c;--loss:#7db1ff;--entropy:#e3a55c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:860px;margin:0 auto;padding:24px 16px 48px}
header{display:flex;flex-wrap:wrap;gap:8px 16px;align-items:baseline;justify-content:space-between}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1rem;margin:0 0 12px}
.badge{margin:0;font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
.quiet{color:var(--quiet);font-size:.9rem}
.message{border-left:3px solid var(--bad);padding-left:12px;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin-top:16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(180px,1fr));gap:10px;margin-top:16px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px}
.tile span{display:block;color:var(--quiet);font-size:.8rem}
.tile b{font-size:1.1rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.bar{display:flex;height:22px;border-radius:6px;overflow:hidden;margin-bottom:12px}
dl{display:grid;grid-template-columns:minmax(110px,auto) 1fr;gap:4px 16px;margin:0}
dt{color:var(--quiet)}dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
ol{margin:0;padding-left:1.2em}li{overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:14px/1.5 ui-monospace,monospace}
summary{cursor:pointer;color:var(--quiet)}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--quiet);font:12px system-ui,sans-serif}
.grid{stroke:var(--line)}.loss{fill:none;stroke:var(--loss);stroke-width:1.8;stroke-linejoin:round}
.dot{fill:var(--loss)}.entropy{stroke:var(--entropy);stroke-dasharray:5 4}
"""
