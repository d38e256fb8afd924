"""Figures as text: tables of at most 100 columns, each with what was measured and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ENGINE_NAMES = {
    "engine": "Ebbflow's engine",
    "bare": "bare loop, torch's defaults",
    "bare_tuned": "bare loop, the engine's options",
}
_PARTS = {
    "heartbeat_beat": ("heartbeat beat", "4"),
    "sample_order": ("order of the samples", "1"),
    "event_emit": ("event emit", "1"),
    "step_sync": ("step sync: row, all-gather, checks", "1"),
    "step_sync_all_gather": ("  of which the all-gather", ""),
    "guards": ("guards: numbers, pace, memory", "1"),
    "guards_with_spikes": ("  with spikes looked for", ""),
}
_SAVERS = {
    "engine": "Ebbflow's save",
    "dcp_save": "DCP save",
    "dcp_async_save": "DCP async_save, kept stager",
    "dcp_async_fresh": "DCP async_save, fresh stager",
    "dcp_process": "DCP async_save, process mode",
}


def machine_line(machine: dict[str, Any]) -> str:
    return (
        f"measured {machine['measured_at']} on {machine['cpu']}\n{machine['cores']} cores, torch "
        f"{machine['torch']}, Python {machine['python']}, load average before "
        f"{machine['load_average']}"
    )


def engine_text(engine: dict[str, Any]) -> str:
    """Modes and contestants, then the parts."""
    about = (
        f"measured · {engine['parameters']:,} parameters, {engine['tokens_per_step']:,} tokens "
        f"per step\nmedians of {engine['rounds']} rounds of {engine['steps']} steps, in turn; 1 "
        "thread per rank; low–high of the rounds in brackets"
    )
    rows = []
    for mode, contestants in engine["modes"].items():
        ranks = engine["ranks"][mode]
        for number, (name, found) in enumerate(contestants.items()):
            rows.append(
                [
                    f"{mode} ×{ranks}" if number == 0 else "",
                    _ENGINE_NAMES[name],
                    f"{found['tokens_per_second']['median']:,.0f}",
                    f"{found['milliseconds_per_step']['median']:.2f}",
                    f"{found['cpu_milliseconds_per_step']['median']:.2f}",
                    "" if name == "engine" else bracketed(found["engine_over_this"], ratio=True),
                    f"{found['last_loss']:.4f}",
                ]
            )
    steps = table(
        ["mode", "loop", "tokens/s", "ms/step", "CPU ms", "engine ÷ this", "loss"],
        rows,
        text_columns=2,
    )
    return f"engine: {about}\n\n{steps}\n\n{parts_text(engine['parts'], ranks=2)}"


def parts_text(parts: dict[str, Any], *, ranks: int) -> str:
    """What a part of a step costs each time it is called."""
    rows = [[_PARTS[name][0], bracketed(found), _PARTS[name][1]] for name, found in parts.items()]
    return table(
        [f"part of a step, {ranks} ranks", "microseconds per call", "calls per step"],
        rows,
        text_columns=1,
    )


def checkpoint_text(checkpoint: dict[str, Any]) -> str:
    copy = checkpoint["memcpy_seconds"]
    about = (
        f"measured · {checkpoint['bytes'] / 1e6:.1f} MB over {checkpoint['ranks']} ranks of 1 "
        f"thread, store on {checkpoint['file_system']}\nmedians of {checkpoint['rounds']} warm "
        "saves and restores, in turn; low–high in brackets\nwarm memcpy of the same bytes: "
        f"{1e3 * copy['median']:.1f} ms ({1e3 * copy['low']:.1f}–{1e3 * copy['high']:.1f}), = 1 "
        "below"
    )
    rows = [
        [
            _SAVERS[name],
            f"{1e3 * found['blocked_seconds']['median']:,.1f}",
            bracketed(found["blocked_over_memcpy"]),
            _three_digits(found["first_blocked_over_memcpy"]),
            f"{found['durable_seconds']['median']:.3f}",
            f"{found['durable_bytes_per_second']['median'] / 1e6:,.0f}",
            f"{found['restore_seconds']['median']:.3f}" if "restore_seconds" in found else "",
        ]
        for name, found in checkpoint["contestants"].items()
    ]
    heads = ["save", "stall ms", "stall ÷ memcpy", "first ÷", "durable s", "MB/s", "restore s"]
    return f"checkpoint: {about}\n\n{table(heads, rows, text_columns=1)}"


def bracketed(found: dict[str, float], *, ratio: bool = False) -> str:
    """Median (low–high). A ratio near 1 has three decimals, since there a hundredth matters."""
    median, low, high = (
        f"{value:.3f}" if ratio else _three_digits(value)
        for value in (found["median"], found["low"], found["high"])
    )
    return f"{median} ({low}–{high})"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int) -> str:
    """The first `text_columns` to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])
