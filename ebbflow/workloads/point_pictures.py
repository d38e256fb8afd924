"""Drawings of point clouds as small SVG images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from torch import Tensor

_SIZE, _MARGIN, _LABEL = 120, 6, 16  # pixels of a cloud's square, of its margin, and of a row's label
_MOST_POINTS = 256
_NEAR, _FAR, _KNOWN = "#0b4f6c", "#7fb7be", "#c0571e"


def draw_clouds(rows: Mapping[str, Tensor], *, known: int = 0) -> str:
    """Return an SVG image with one labelled row of clouds, `[clouds, points, 3]`, for each entry of `rows`.

    Points of the far half are lighter. The first `known` points of each cloud have another colour.
    """
    width = _SIZE * max(len(clouds) for clouds in rows.values())
    height = (_SIZE + _LABEL) * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="#fff"/>')
    for number, (label, clouds) in enumerate(rows.items()):
        top = number * (_SIZE + _LABEL)
        parts.append(f'<text x="4" y="{top + 12}" font-family="sans-serif" font-size="11">{escape(label)}</text>')
        for place, cloud in enumerate(clouds):
            parts += _draw_cloud(cloud, place * _SIZE, top + _LABEL, known)
    return "".join([*parts, "</svg>"])


def _draw_cloud(cloud: Tensor, left: int, top: int, known: int) -> list[str]:
    step = max(1, math.ceil(len(cloud) / _MOST_POINTS))
    points, given = cloud[::step].tolist(), -(-known // step)
    groups: dict[str, list[str]] = {_FAR: [], _NEAR: [], _KNOWN: []}
    reach = max([2.2, *(abs(value) for point in points for value in point if math.isfinite(value))])
    scale = (_SIZE / 2 - _MARGIN) / min(reach, 4.0) / 1.25
    for number, (x, y, z) in enumerate(points):
        if not all(map(math.isfinite, (x, y, z))):
            continue
        across, depth = (x - y) * math.sqrt(0.5), (x + y) * math.sqrt(0.5)
        right, down = left + _SIZE / 2 + across * scale, top + _SIZE / 2 - (0.9 * z - 0.4 * depth) * scale
        colour = _KNOWN if number < given else _FAR if depth < 0 else _NEAR
        groups[colour].append(f"M{right:.0f} {down:.0f}h0")
    shape = '<path d="{}" stroke="{}" stroke-width="2.4" stroke-linecap="round" fill="none"/>'
    return [shape.format("".join(drawn), colour) for colour, drawn in groups.items() if drawn]
