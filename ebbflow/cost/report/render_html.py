"""Render a job as one self-contained HTML page: live while the job runs, then its report.

The page makes no requests to other hosts, and its Content-Security-Policy forbids them and all
foreign scripts. Tables and SVG show everything without JavaScript. With JavaScript, `page/page.js`
shows the values at the pointer in a chart and, while the job runs, loads the same page in a hidden
frame to get newer content. Text from outside this program is always passed through `escape`.
`cost.report.figure_text` formats the numbers.
"""

import base64
import hashlib
import html
import json
import time
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from ebbflow.core.events import LedgerClass, without_nan
from ebbflow.core.grouping import group_by_key
from ebbflow.core.json_values import Json
from ebbflow.core.rank_logs import escape_controls
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import (
    NONE,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_usd,
)
from ebbflow.cost.report import figure_text
from ebbflow.cost.report.parts import CellRow, RankRow
from ebbflow.cost.report.render_svg import list_figures, render_chart
from ebbflow.cost.report.render_text import (
    JOB_HEADER,
    describe_price_kinds,
    describe_rehearsal,
    format_job_rows,
    suggest_next_step,
)
from ebbflow.cost.report.report import RunReport, find_deciding_failure
from ebbflow.cost.report.slurm_jobs import HEADER as SLURM_HEADER
from ebbflow.cost.report.slurm_jobs import format_slurm_rows, list_reasons
from ebbflow.cost.report.verdict import (
    Tile,
    describe_slowest_rank,
    describe_stop,
    describe_title,
    find_changed_settings,
    list_tiles,
    render_verdict,
    reproduce_command,
)

# One colour per class of time, after Okabe and Ito, whose colours the colour-blind can tell apart.
COLOURS = {
    LedgerClass.USEFUL_STEP: "#009e73",
    LedgerClass.DATA_WAIT: "#f0e442",
    LedgerClass.CHECKPOINT_STALL: "#cc79a7",
    LedgerClass.EVALUATION: "#7fd1ae",
    LedgerClass.PROFILING: "#b39ddb",
    LedgerClass.STARTUP: "#56b4e9",
    LedgerClass.RESTORE: "#0072b2",
    LedgerClass.SHUTDOWN: "#9fa8b8",
    LedgerClass.SCRIPT: "#009e73",
    LedgerClass.HANG: "#7a2e00",
    LedgerClass.REDONE_STEP: "#e69f00",
    LedgerClass.SKIPPED_STEP: "#b8860b",
    LedgerClass.INTERRUPTION: "#d55e00",
    LedgerClass.UNATTRIBUTED: "#757575",
    LedgerClass.IDLE: "#a1887f",
    LedgerClass.MINIMUM_CHARGE: "#bcaaa4",
    LedgerClass.BOOT: "#8d6e63",
    LedgerClass.SCALE_DOWN: "#6d4c41",
    LedgerClass.VOLUMES: "#4e5d6c",
}
_PAGE = Path(__file__).parent / "page"
_MOST_EVENTS = 400
_MOST_SETTINGS = 12  # shown unfolded
_RANK_HEADER = (
    "rank",
    "node",
    "step",
    "slowest in",
    "own time / others'",
    "cost",
    "step time",
    "data wait",
    "waits for others",
    "memory",
    "last event",
    "log",
)
_EVIDENCE = {"cascades": "failed after it", "usd_lost": "work lost", "because": "reason"}
_LONGEST_NUMBER = 32  # characters; a column with a longer cell is text, which may wrap
# On narrow screens each row becomes a block with a line for each cell, so that no column is cut
# off.
_AS_BLOCKS = """
TABLE thead{display:none}
TABLE table,TABLE tbody{display:block}
TABLE tr{display:block;padding:8px 0;border-bottom:1px solid var(--line,#8884)}
TABLE td,TABLE td.text{display:flex;justify-content:space-between;gap:16px;padding:2px 0;border:0;white-space:normal;
overflow-wrap:anywhere;text-align:right}
TABLE td[data-label]::before{content:attr(data-label);color:var(--quiet,inherit);text-align:left;flex:none;
max-width:50%}
TABLE td:first-child{font-weight:600;text-align:left}
TABLE td:first-child::before{display:none}
TABLE td i{flex:none;align-self:center}
TABLE td:first-child{justify-content:flex-start;gap:0}
"""
_NARROW_TABLE = 70  # characters; it becomes blocks below 700 px, a wider one below 980 px
TABLE_STYLE = """
.wide{overflow-x:auto}
.wide table{width:100%;border-collapse:collapse;font-variant-numeric:tabular-nums}
.wide th,.wide td{padding:6px 8px;text-align:right;border-bottom:1px solid var(--line,#8884);white-space:nowrap}
.wide th{color:var(--quiet,inherit);font-weight:500;font-size:.85rem;white-space:normal}
.wide th:first-child,.wide td:first-child,.wide .text{text-align:left}
.wide td.text{white-space:normal;overflow-wrap:anywhere}
.wide .total td{font-weight:600;border-bottom:0}
.wide td i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px}
"""
for _width, _kind in ((980, ".wide:not(.few)"), (700, ".few")):
    TABLE_STYLE += f"@media (max-width:{_width}px){{{_AS_BLOCKS.replace('TABLE', _kind)}}}\n"


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def render_html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    colours: Sequence[str] = (),
    total: bool = False,
) -> str:
    """Render a table and escape its cells. Cells beyond the last column of the header are left out.

    Args:
        colours: One colour per row, for the mark in the row's first cell.
        total: Whether the last row is the total.
    """
    kinds = [
        ' class="text"' if any(len(row[column]) > _LONGEST_NUMBER for row in rows) else ""
        for column in range(len(header))
    ]
    head = "".join(
        f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, header, strict=True)
    )
    body = []
    for at, row in enumerate(rows):
        if at < len(colours):
            mark = f'<i style="background:{colours[at]}"></i>'
        else:
            mark = ""
        cells = "".join(
            _cell(row[column], label, kinds[column], mark if column == 0 else "")
            for column, label in enumerate(header)
        )
        body.append(f"<tr{' class=total' if total and at == len(rows) - 1 else ''}>{cells}</tr>")
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=False)]
    if sum(widths) + 3 * len(widths) <= _NARROW_TABLE:
        few = " few"
    else:
        few = ""
    return (
        "<div "
        f'class="wide{few}"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _cell(cell: str, label: str, kind: str, mark: str) -> str:
    if label:
        named = f' data-label="{escape(label)}"'
    else:
        named = ""
    return f"<td{kind}{named}>{mark}{escape(cell).replace(chr(10), ' ')}</td>"


def render(
    report: RunReport, *, earlier: Sequence[RunReport] = (), written: float | None = None
) -> str:
    """Render the whole page.

    Args:
        earlier: Reports of other jobs for comparison, newest last.
        written: Unix time of the report's figures. None means the current time.
    """
    main, data = render_parts(report, earlier=earlier)
    title = f"{describe_title(report)[0]}: {report.state.replace('_', ' ')}"
    return fill_page(main, data, title, running=report.outcome is None, written=written)


def fill_page(
    main: str, data: str, title: str, *, running: bool, written: float | None = None
) -> str:
    """Put the content and its data (JSON) into an HTML document with styles, scripts and
    Content-Security-Policy.
    """
    scripts, styles = _read_assets()
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; img-src data:; "
        "frame-src 'self' file:; base-uri 'none'"
    )
    if written is None:
        now = time.time()
    else:
        now = written
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{styles}</style></head>\n"
        f'<body data-state="{"running" if running else "ended"}" data-written="{now:.3f}">'
        f'<main>{main}</main><script type="application/json" id="data">{data}</script>'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


@cache
def _read_assets() -> tuple[tuple[str, ...], str]:
    """Return the page's scripts and styles."""
    scripts = tuple((_PAGE / name).read_text().strip() for name in ("feed.js", "page.js"))
    return scripts, (_PAGE / "page.css").read_text() + TABLE_STYLE


def render_parts(report: RunReport, *, earlier: Sequence[RunReport]) -> tuple[str, str]:
    """Render the content of the page, and the data of its charts as JSON that is safe to embed in
    HTML.
    """
    figures, tables = list_figures(report, earlier)
    marks = report.charts.get("marks") or []
    drawn = [
        f'<figure class="chart" id="figure-{figure.id}"><figcaption>{escape(figure.title)}</figcaption>'
        f"{render_chart(figure, tables[figure.table], marks)}</figure>"
        for figure in figures
    ]
    shown = []
    for figure in figures:
        series = [{"key": line.key, "label": line.label} for line in figure.series]
        shown.append({"id": figure.id, "table": figure.table, "series": series})
    data = {"figures": shown, "tables": tables}
    verdict = render_verdict(report)
    sections = [
        _header(report, verdict),
        f'<div class="tiles" id="tiles">{"".join(map(_tile, list_tiles(report)))}</div>',
        _stop(report),
        "".join(
            f'<p id="rehearsal"><b>Rehearsal:</b> {escape(line.split(None, 1)[1])}</p>'
            for line in (describe_rehearsal(report, earlier) if report.outcome else ())
        ),
        _failure(report),
        _plots(drawn),
        _evaluations(report),
        _timeline(report),
        _money(report),
        _table_section(
            "plan",
            "Plan against actual",
            ("figure", *figure_text.get_comparison_header(report)[1:]),
            _plan_rows(report),
        ),
        _attempts(report),
        _slurm_jobs(report),
        _table_section(
            "generations",
            "Generations",
            figure_text.GENERATION_HEADER,
            figure_text.format_generation_rows(report),
        ),
        _ranks(report),
        _events(report),
        _configuration(report, earlier),
        _environment(report),
        _comparison(report, earlier),
        _section("all", "All figures", _definitions(figure_text.format_key_figures(report))),
        _section("trust", "How far to trust this", _list(figure_text.explain_figures(report))),
    ]
    text = json.dumps(without_nan(data), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return "".join(sections), text.replace("<", "\\u003c").replace(">", "\\u003e").replace(
        "&", "\\u0026"
    )


def _header(report: RunReport, verdict: str) -> str:
    if report.outcome is None:
        tone = "on"
    elif report.exit_code:
        tone = "bad"
    else:
        tone = "good"
    title, more = describe_title(report)
    if more:
        small = f" <small>{escape(more)}</small>"
    else:
        small = ""
    state = escape(report.state.replace("_", " "))
    damaged = "".join(
        f'<p class="message">{escape(line)}</p>' for line in figure_text.describe_damage(report)[:1]
    )
    return (
        f'<header id="header"><h1>{escape(title)}{small}</h1>'
        f'<p class="badge {tone}">{state}<span id="age"></span></p>'
        f'<p class="verdict">{escape(verdict)}</p>{damaged}</header>'
    )


def _tile(tile: Tile) -> str:
    meter = ""
    if tile.share is not None:
        width = min(100.0, max(0.0, 100 * tile.share))
        if tile.share > 1:
            over = " class=over"
        else:
            over = ""
        meter = f'<div class="meter"><i{over} style="width:{width:.1f}%"></i></div>'
    return (
        f'<div class="tile"><span>{escape(tile.name)}</span><b>{escape(tile.number)}</b>{meter}'
        f"<span>{escape(tile.words)}</span></div>"
    )


def _stop(report: RunReport) -> str:
    text = describe_stop(report)
    if text:
        return f'<p id="stop"><b>Safe to stop?</b> {escape(text)}</p>'
    return ""


def _failure(report: RunReport) -> str:
    """Render the failures, the evidence of the first failure, and the command that continues the
    job.

    The first failure usually caused all later failures.
    """
    parts = []
    failures = report.events.get("failures") or []
    ended = report.outcome is not None and bool(report.exit_code)
    message = report.events.get("message")
    if message:
        parts.append(f'<p class="message">{escape(one_line(message))}</p>')
    failure = find_deciding_failure(failures)
    if failure is not None:
        known = failure.get("evidence") or {}
        named = {
            _EVIDENCE.get(name, name.replace("_", " ")): _evidence_text(name, value)
            for name, value in known.items()
        }
        if named:
            evidence = _definitions(named)
        else:
            evidence = ""
        lines = figure_text.format_failures(report)
        listed = _list(lines[:_MOST_EVENTS])
        parts.append(evidence + listed if len(lines) > 1 else listed + evidence)
        finding = figure_text.describe_finding(report)
        if finding:
            parts.append(f'<p id="finding"><b>Diagnosis:</b> {escape(finding)}</p>')
        place = ""
        stack = report.events.get("stack")
        if stack:
            text = "\n".join(escape_controls(line) for line in stack["lines"])
            path = _log_path(report, failure["generation"], stack["rank"])
            parts.append(
                f"<p>Rank {stack['rank']} printed last "
                f"({escape(path)}):</p><pre>{escape(text)}</pre>"
            )
            place = f" --generation {failure['generation']} --rank {stack['rank']}"
        logs = (
            f"ebbflow logs {one_line(report.job)}{place}\nebbflow diagnose {one_line(report.job)}"
        )
        parts.append(f"<p>All of its output, and the diagnosis:</p><pre>{escape(logs)}</pre>")
    following = suggest_next_step(report)
    if following is not None:
        parts.append(
            "<h3>What "
            f"next</h3><p>{escape(following.explanation)}:</p><pre>{escape(following.command)}</pre>"
        )
    if ended:
        title = "Why it ended, first failure first"
    else:
        title = "What went wrong, first failure first"
    if parts:
        return _section("failure", title, "".join(parts))
    return ""


def _log_path(report: RunReport, generation: int, rank: int | None) -> str:
    """Return a glob pattern for the path of a rank's log on its node.

    The folder's name ends with a random id.
    """
    return f"runs/{one_line(report.job)}/logs/{generation:06d}-*/rank-{rank}.log"


def _evidence_text(name: str, value: Json) -> str:
    if isinstance(value, list):
        if name == "cascades":
            ranks = f"rank{'' if len(value) == 1 else 's'} "
        else:
            ranks = ""
        return one_line(ranks + ", ".join(map(str, value)))
    if isinstance(value, float):
        return format_usd(value)
    return one_line(value)


def _plots(drawn: Sequence[str]) -> str:
    if not drawn:
        return _section("plots", "Training", '<p class="quiet">no step has been recorded yet</p>')
    keys = (
        "dashed red: interruption; grey: start of a generation; green tick: commit; red: "
        "non-finite loss"
    )
    return (
        f'<section id="plots"><h2>Training</h2><div class="figures">{"".join(drawn)}</div>'
        f'<p class="quiet">by step; {keys}</p></section>'
    )


def _evaluations(report: RunReport) -> str:
    """Render a workload's metrics per evaluation, and its pictures.

    The pictures are embedded as images, in which scripts do not run.
    """
    found = report.charts.get("evaluations") or {}
    rows = found.get("rows") or []
    pictures = found.get("pictures") or {}
    if figure_text.get_weight_unit(report) == "tokens" and not pictures:
        return ""
    names = list(dict.fromkeys(chain.from_iterable(row["metrics"] for row in rows)))
    cells = []
    for row in rows:
        values = [format_number(row["metrics"].get(name)) for name in names]
        cells.append((str(row["step"]), *values))
    if rows:
        table = render_html_table(
            ("step", *(one_line(name).replace("_", " ") for name in names)), cells
        )
    else:
        table = ""
    drawn = [
        f"<figure><figcaption>{escape(name)}, step {escape(found.get('pictures_step'))}</figcaption>"
        f'<img alt="{escape(name)}" style="max-width:100%" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"></figure>'
        for name, picture in pictures.items()
    ]
    if drawn or table:
        return _section("evaluations", "Evaluations", "".join(drawn) + table)
    return ""


def _timeline(report: RunReport) -> str:
    """Render one bar per node and generation on a common time axis.

    The colours stand for classes of paid time.
    """
    lanes = report.charts.get("lanes") or []
    if not lanes:
        return ""
    end = max(lane["end"] for lane in lanes) or 1.0
    start = min(lane["start"] for lane in lanes)
    scale = 100 / max(end - start, 1e-9)
    rows = []
    used = {}
    for lane in lanes:
        parts = []
        paid = max(lane["end"] - lane["start"], 1e-9)
        for segment in lane["segments"]:
            begin = float(segment[0])
            until = float(segment[1])
            kind = str(segment[2])
            used[kind] = True
            usd = lane["usd"] * (until - begin) / paid
            text = (
                f"{kind.replace('_', ' ')}: {format_duration(until - begin)}, "
                f"{format_usd(usd or None)}"
            )
            parts.append(
                "<i "
                f'style="left:{(begin - start) * scale:.2f}%;width:{max(0.05, (until - begin) * scale):.2f}%;'
                f'background:{COLOURS[LedgerClass(kind)]}" title="{escape(text)}"></i>'
            )
        where = f"{one_line(lane['machine'])}: {one_line(lane['pool'])}"
        label = (
            f"generation {lane['generation']}, node {lane['node']} {where} at "
            f"{format_usd(lane['usd_per_hour'] or None)}/h, from step {lane['step']:,}, "
            f"{format_duration(paid)}, {format_usd(lane['usd'] or None)}, ended by: "
            f"{one_line(lane['ended']).replace('_', ' ')}"
        )
        text = escape(label)
        rows.append(
            f'<div class="laneof">{text}</div><div class="lane" role="img" '
            f'aria-label="{text}">{"".join(parts)}</div>'
        )
    left_out = report.charts.get("lanes_left_out") or 0
    if left_out:
        more = f'<p class="quiet">{left_out:,} earlier nodes are left out</p>'
    else:
        more = ""
    return _section(
        "timeline", "Timeline: nodes of each generation", "".join(rows) + _keys([*used]) + more
    )


def _keys(kinds: Sequence[str]) -> str:
    marks = "".join(
        f'<span><i style="background:{COLOURS[kind]}"></i>{escape(kind.replace("_", " "))}</span>'
        for kind in LedgerClass
        if kind in kinds
    )
    return f'<div class="keys">{marks}</div>'


def _money(report: RunReport) -> str:
    """Render one bar per cause of cost, divided by class of paid time.

    The ledger's table explains the colours.
    """
    colours = [COLOURS[line.ledger_class] for line in report.ledger]
    ledger = render_html_table(
        figure_text.LEDGER_HEADER,
        figure_text.format_ledger_rows(report),
        colours=colours,
        total=True,
    )
    cells = group_by_key(
        (str(cell["cause"]), cell)
        for cell in report.money.get("cells") or []
        if cell["rank_seconds"]
    )
    rows = figure_text.format_cause_rows(report)
    causes = report.money.get("causes") or []
    widest = max((cause["rank_seconds"] for cause in causes), default=0.0) or 1.0
    bars = []
    for (name, seconds, share, usd), cause in zip(rows, causes, strict=False):
        parts = "".join(
            f'<span style="flex:0 0 {100 * cell["rank_seconds"] / widest:.2f}%;'
            f'background:{COLOURS[LedgerClass(cell["class"])]}" '
            f'title="{escape(_cell_text(cell))}"></span>'
            for cell in cells.get(str(cause["cause"]))
            or [{**cause, "class": LedgerClass.UNATTRIBUTED}]
        )
        text = f"{name}: {seconds} rank-seconds, {share}, {usd}"
        bars.append(
            f'<div class="cause"><span>{escape(name)}</span><div class="bar" role="img" '
            f'aria-label="{escape(text)}" title="{escape(text)}">{parts}</div>'
            f'<b>{escape(usd)}<br><small class="quiet">{escape(share)}</small></b></div>'
        )
    if rows:
        total = (
            "<div "
            f'class="cause"><strong>total</strong><span></span><b>{escape(rows[-1][3])}</b></div>'
        )
    else:
        total = ""
    prices = escape(figure_text.format_key_figures(report)["prices"])
    table = f'<h3>By class of time</h3>{ledger}<p class="quiet">{prices}</p>'
    return _section("money", "Where the money went", "".join(bars) + total + table)


def _cell_text(cell: CellRow) -> str:
    kind = str(cell["class"]).replace("_", " ")
    return f"{kind}: {format_number(cell['rank_seconds'], 2)} s, {format_usd(cell['usd'] or None)}"


def _plan_rows(report: RunReport) -> list[tuple[str, str, str]]:
    """Return rows that compare plan and run.

    For an ended job, add the parts of the difference in dollars.
    """
    rows = [*figure_text.format_comparison_rows(report)]
    if not rows or report.outcome is None:
        return rows
    others = [
        cause for cause in report.money.get("causes") or [] if cause["cause"] != "useful work"
    ]
    extra = sum(other["usd"] for other in others)
    useful = float(report.total_usd) - extra
    forecast = report.money.get("forecast") or {}
    planned = forecast.get("useful_usd")
    rest = None
    made_of = NONE
    if planned is not None:
        rest = (forecast.get("compute_usd") or 0.0) - planned
        largest = max(others, key=lambda other: other["usd"], default=None)
        if largest:
            of_it = f", of which {one_line(largest['cause'])} cost {format_usd(largest['usd'])}"
        else:
            of_it = ""
        signed = [
            f"{'+' if usd > 0 else ''}{format_usd(usd)}" for usd in (useful - planned, extra - rest)
        ]
        made_of = f"useful work {signed[0]}, everything else {signed[1]}{of_it}"
    return [
        *rows,
        ("of the dollars: useful work", format_usd(planned), format_usd(useful)),
        ("everything else", format_usd(rest), format_usd(extra)),
        ("difference in dollars", "", made_of),
    ]


def _rank_memory(rank: RankRow) -> str:
    """Format the peak memory of a rank's GPU or, without a GPU, the memory of its node."""
    allocated = rank.get("gpu_allocated_bytes")
    reserved = rank.get("gpu_reserved_bytes")
    if allocated is not None and reserved is not None:
        return f"{allocated / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} reserved"
    if rank["node_resident_bytes"] is None:
        return NONE
    return f"{rank['node_resident_bytes'] / 2**30:.2f} GiB/node"


def _ranks(report: RunReport) -> str:
    ranks = report.charts.get("ranks") or []
    if not ranks:
        return ""
    end = max(rank["last_seconds"] for rank in ranks)
    rows = [
        (
            str(rank["rank"]),
            f"{rank['node']} {one_line(rank['host'])}".strip(),
            NONE if rank["step"] is None else f"{rank['step']:,}",
            format_percent(rank["slowest_share"], 0),
            format_number(rank["slowest_ratio"], 2),
            format_usd(rank.get("lost_usd")),
            f"{format_number(rank['step_seconds'], 3)} s",
            format_percent(rank["data_share"]),
            format_percent(rank.get("wait_share")),
            _rank_memory(rank),
            "newest"
            if end - rank["last_seconds"] < 0.05
            else f"{format_duration(end - rank['last_seconds'])} before the newest",
            f"rank-{rank['rank']}.log",
        )
        for rank in ranks[:64]
    ]
    if len(ranks) > 64:
        more = f"; {len(ranks) - 64:,} more ranks are left out"
    else:
        more = ""
    folder = _log_path(report, ranks[0].get("generation", 0), 0).rpartition("/")[0]
    logs = f"{folder} on each node; from anywhere: ebbflow logs {one_line(report.job)} --rank N"
    note = f"newest generation, the most often slowest rank first{more}; logs are in {logs}"
    words = describe_slowest_rank(report)
    if words:
        slowest = f"<p><b>Which rank is slow?</b> {escape(words)}</p>"
    else:
        slowest = ""
    table = render_html_table(_RANK_HEADER, rows)
    return _section("ranks", "Ranks", f'{slowest}{table}<p class="quiet">{escape(note)}</p>')


def _events(report: RunReport) -> str:
    found = report.events.get("notable") or []
    if not found:
        return ""
    rows = [
        (
            format_duration(row["seconds"]),
            str(row["generation"]),
            str(row["step"] or ""),
            one_line(row["name"]).replace("_", " "),
            one_line(row["text"]),
        )
        for row in found[-_MOST_EVENTS:]
    ]
    if len(found) > _MOST_EVENTS:
        more = f'<p class="quiet">the newest {_MOST_EVENTS} of {len(found):,}</p>'
    else:
        more = ""
    table = render_html_table(("after", "generation", "step", "event", "details"), rows)
    box = (
        '<input id="search" type="search" placeholder="search events" aria-label="search events" '
        "hidden>"
    )
    return _section("events", "Events", box + table + more)


def _configuration(report: RunReport, earlier: Sequence[RunReport]) -> str:
    if not report.configuration:
        return ""
    chosen, defaults = (
        figure_text.format_configuration_rows(report, defaults=each) for each in (False, True)
    )
    header = ("key", "value", "source")
    folded = (
        f'<details id="defaults"><summary>{format_count(len(defaults), "default")}</summary>'
        f"{render_html_table(header[:2], defaults)}</details>"
    )
    if chosen:
        listed = render_html_table(header, chosen)
    else:
        listed = ""
    if len(chosen) > _MOST_SETTINGS:
        listed = (
            f'<details id="chosen"><summary>{len(chosen)} settings, with their '
            f"sources</summary>{listed}</details>"
        )
    if earlier:
        before = earlier[-1]
    else:
        before = None
    changed = find_changed_settings(report, before)
    differs = ""
    if before is not None and changed:
        names = ("key", one_line(before.job), one_line(report.job))
        differs = (
            "<h3>Changed since "
            f"{escape(one_line(before.job))}</h3>{render_html_table(names, changed)}"
        )
    command = reproduce_command(report)
    if command:
        again = f"<h3>The same configuration again</h3><pre>{escape(command)}</pre>"
    else:
        again = ""
    return _section("configuration", "Configuration", differs + listed + folded + again)


def _environment(report: RunReport) -> str:
    checks = report.events.get("checks") or []
    if not checks:
        return ""
    rows = [
        (one_line(check["title"]), one_line(check["status"]), one_line(check["detail"]))
        for check in checks
    ]
    table = render_html_table(("check", "result", "found"), rows)
    return _section(
        "environment",
        "Environment",
        f'<details id="checks"><summary>{len(rows)} checks before the '
        f"start</summary>{table}</details>",
    )


def _comparison(report: RunReport, earlier: Sequence[RunReport]) -> str:
    if not earlier:
        return ""
    every = [*earlier, report]
    note = f'<p class="quiet">{escape(describe_price_kinds(every))}</p>'
    return _section(
        "earlier",
        "Beside the jobs before it",
        render_html_table(JOB_HEADER, format_job_rows(every)) + note,
    )


def _list(lines: Sequence[str]) -> str:
    return f"<ol>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ol>"


def _definitions(figures: dict[str, str]) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in figures.items()
    )
    return f"<dl>{rows}</dl>"


def _attempts(report: RunReport) -> str:
    attempts = report.money.get("attempts") or []
    if not attempts:
        return ""
    figures = render_html_table(
        figure_text.ATTEMPT_HEADER, figure_text.format_attempt_rows(attempts)
    )
    return _section(
        "attempts",
        "Attempts",
        figures
        + render_html_table(figure_text.PLACE_HEADER, figure_text.format_placement_rows(attempts)),
    )


def _slurm_jobs(report: RunReport) -> str:
    jobs = report.money.get("slurm_jobs") or []
    if not jobs:
        return ""
    tables = render_html_table(SLURM_HEADER, format_slurm_rows(jobs))
    reasons = list_reasons(jobs)
    if reasons:
        tables += render_html_table(("Slurm job", "why this partition"), reasons)
    return _section("slurm-jobs", "Slurm jobs", tables)


def _table_section(
    name: str, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    if rows:
        return _section(name, title, render_html_table(header, rows))
    return ""


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>'
