"""Bar charts: as Unicode text for a terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FILLS = "█▓▒░"
_BAR, _STACKED_BAR = 40, 60  # characters
_PICTURE = 720  # width in pixels


class Chart(msgspec.Struct, frozen=True):
    """Bars from 0 to the largest value."""

    title: str
    rows: tuple[tuple[str, float], ...]  # label and value
    unit: str = ""


def bar(share: float, width: int) -> str:
    """A bar of `share` of `width` characters, in steps of an eighth of a character."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def text_chart(chart: Chart) -> str:
    most = max((value for _, value in chart.rows), default=0.0) or 1.0
    label_width = max((len(label) for label, _ in chart.rows), default=0)
    lines = [chart.title]
    for label, value in chart.rows:
        lines.append(f"  {label:<{label_width}} {value:>12.2f} {chart.unit:<6} {bar(value / most, _BAR)}".rstrip())
    return "\n".join(lines)


def stacked_bar(parts: Sequence[tuple[str, float]]) -> tuple[str, str]:
    """One bar of all parts, and its legend. Small parts are joined to "other"."""
    total = sum(value for _, value in parts) or 1.0
    shown = sorted((part for part in parts if part[1] >= 0.04 * total), key=lambda part: -part[1])[: len(_FILLS) - 1]
    rest = total - sum(value for _, value in shown)
    if rest > 0:
        shown.append(("other", rest))
    ends, line = 0.0, ""
    for (_, value), fill in zip(shown, _FILLS, strict=False):
        ends += value
        line += fill * (round(ends / total * _STACKED_BAR) - len(line))
    legend = "  ".join(f"{fill} {name} {value / total:.0%}" for (name, value), fill in zip(shown, _FILLS, strict=False))
    return line, legend


def svg_charts(charts: Sequence[Chart]) -> str:
    """A picture of all charts, one below the other."""
    from html import escape  # only needed here

    left, height, y = 150, 20, 30
    parts: list[str] = []
    for chart in charts:
        parts.append(f'<text x="10" y="{y}" font-weight="bold">{escape(chart.title)}</text>')
        y += 12
        most = max((value for _, value in chart.rows), default=0.0) or 1.0
        for label, value in chart.rows:
            length = value / most * (_PICTURE - left - 130)
            text = f"{value:,.2f} {chart.unit}".strip()
            parts.append(f'<text x="10" y="{y + 14}">{escape(label)}</text>')
            parts.append(f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{height - 5}" fill="#0a7f83"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{escape(text)}</text>')
            y += height
        y += 30
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    size = f'width="{_PICTURE}" height="{y}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_PICTURE} {y}" {style}>'
    back = f'<rect {size} fill="white"/>'
    return "\n".join([opening, back, *parts, "</svg>", ""])
