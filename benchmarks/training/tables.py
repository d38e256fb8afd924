"""Figures as text: tables of at most 100 columns, each with what was measured and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ENGINE_NAMES = {
    "engine": "Ebbflow's engine",
    "bare": "bare loop, torch's defaults",
    "bare_tuned": "bare loop, the engine's options",
}
_SAVERS = {
    "engine": "Ebbflow's save",
    "dcp_save": "DCP save",
    "dcp_async_save": "DCP async_save, kept stager",
}


def machine_line(machine: dict[str, Any]) -> str:
    return (
        f"measured {machine['measured_at']} on {machine['cpu']}\n{machine['cores']} cores, torch "
        f"{machine['torch']}, Python {machine['python']}, load average before "
        f"{machine['load_average']}"
    )


def engine_text(engine: dict[str, Any]) -> str:
    about = (
        f"measured · {engine['parameters']:,} parameters, {engine['tokens_per_step']:,} tokens "
        f"per step\nmedians of {engine['rounds']} rounds of {engine['steps']} steps, in turn; 1 "
        "thread per rank; low–high of the rounds in brackets"
    )
    rows = []
    for mode, contestants in engine["modes"].items():
        ranks = engine["ranks"][mode]
        for number, (name, figures) in enumerate(contestants.items()):
            rows.append(
                [
                    f"{mode} ×{ranks}" if number == 0 else "",
                    _ENGINE_NAMES[name],
                    f"{figures['tokens_per_second']['median']:,.0f}",
                    f"{figures['milliseconds_per_step']['median']:.2f}",
                    f"{figures['cpu_milliseconds_per_step']['median']:.2f}",
                    "" if name == "engine" else bracketed(figures["engine_over_this"], ratio=True),
                    f"{figures['last_loss']:.4f}",
                ]
            )
    steps = table(
        ["mode", "loop", "tokens/s", "ms/step", "CPU ms", "engine ÷ this", "loss"],
        rows,
        text_columns=2,
    )
    return f"engine: {about}\n\n{steps}"


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
            f"{1e3 * figures['blocked_seconds']['median']:,.1f}",
            bracketed(figures["blocked_over_memcpy"]),
            _three_digits(figures["first_blocked_over_memcpy"]),
            f"{figures['durable_seconds']['median']:.3f}",
            f"{figures['durable_bytes_per_second']['median'] / 1e6:,.0f}",
            f"{figures['restore_seconds']['median']:.3f}" if "restore_seconds" in figures else "",
        ]
        for name, figures in checkpoint["contestants"].items()
    ]
    heads = ["save", "stall ms", "stall ÷ memcpy", "first ÷", "durable s", "MB/s", "restore s"]
    return f"checkpoint: {about}\n\n{table(heads, rows, text_columns=1)}"


def bracketed(figures: dict[str, float], *, ratio: bool = False) -> str:
    """Median (low–high). A ratio near 1 has three decimals, since there a hundredth matters."""
    median, low, high = (
        f"{value:.3f}" if ratio else _three_digits(value)
        for value in (figures["median"], figures["low"], figures["high"])
    )
    return f"{median} ({low}–{high})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int) -> str:
    """Align the first `text_columns` to the left, and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])


def _three_digits(value: float) -> str:
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}"
