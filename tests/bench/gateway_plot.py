"""CPU time as bars, in SVG that reads on light and dark pages. Pure; knows nothing of how the figures came about."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from bench.gateway_figures import number_text
from bench.gateway_peers import Name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Bar = tuple[Name, float, float]
    """Whose, CPU time in all, and what of it the kernel took."""

_WIDTH = 820
_NUM_COLUMNS = 2
_PANEL_WIDTH = _WIDTH / _NUM_COLUMNS
_MARGIN = 12
_LABEL_WIDTH = 112
_VALUE_WIDTH = 78
_BAR_WIDTH = _PANEL_WIDTH - 2 * _MARGIN - _LABEL_WIDTH - _VALUE_WIDTH
_BAR_HEIGHT = 16
_LINE_HEIGHT = 23
_TITLE_HEIGHT = 34
_LEGEND_HEIGHT = 34
_OFF_THE_SCALE = 4.0
"""A bar this many times as long as the next one is cut, or the others could not be told apart."""
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.value { font-variant-numeric: tabular-nums; }
.minor { fill: #59636e; }
.ours .user, .ours .kernel { fill: #0969da; }
.user { fill: #6e7781; }
.kernel { fill: #6e7781; fill-opacity: 0.45; }
.ours .kernel { fill-opacity: 0.45; }
.cut { stroke: #ffffff; stroke-width: 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .minor { fill: #9198a1; }
  .user { fill: #9198a1; }
  .kernel { fill: #9198a1; }
  .ours .user, .ours .kernel { fill: #4493f8; }
  .cut { stroke: #0d1117; }
}
"""


def svg_of(panels: Mapping[str, Sequence[Bar]]) -> str:
    """One panel for each thing that was done, and a bar in it for each gateway."""
    panel_height = _TITLE_HEIGHT + _LINE_HEIGHT * max(len(bars) for bars in panels.values()) + _MARGIN
    num_rows = -(-len(panels) // _NUM_COLUMNS)
    height = _LEGEND_HEIGHT + num_rows * panel_height
    drawn = []
    for index, (title, bars) in enumerate(panels.items()):
        x, y = index % _NUM_COLUMNS * _PANEL_WIDTH, _LEGEND_HEIGHT + index // _NUM_COLUMNS * panel_height
        drawn.append(f'<g transform="translate({x + _MARGIN:g} {y:g})">{_panel(title, bars)}</g>')
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="CPU time of gateways">'
    )
    return "\n".join([opening, f"<style>{_STYLE}</style>", _legend(), *drawn, "</svg>\n"])


def scale_of(bars: Sequence[Bar]) -> float:
    """The time that a bar of full length stands for: the longest, or the one after it where that is out of all proportion."""
    *others, longest_us = sorted(cpu_us for _, cpu_us, _ in bars)
    return others[-1] if others and longest_us > others[-1] * _OFF_THE_SCALE else longest_us


def _legend() -> str:
    parts = ["CPU time, µs", "in the gateway's own code", "in the kernel"]
    return (
        f'<g transform="translate({_MARGIN} 10)"><text y="12" class="minor">{parts[0]}</text>'
        f'<rect class="user" x="106" y="1" width="14" height="13"/><text x="126" y="12" class="minor">{parts[1]}</text>'
        f'<rect class="kernel" x="322" y="1" width="14" height="13"/><text x="342" y="12" class="minor">{parts[2]}</text></g>'
    )


def _panel(title: str, bars: Sequence[Bar]) -> str:
    longest_us = scale_of(bars)
    lines = [f'<text class="title" y="18">{escape(title)}</text>']
    for index, bar in enumerate(bars):
        lines.append(_bar(bar, _TITLE_HEIGHT + index * _LINE_HEIGHT, longest_us))
    return "".join(lines)


def _bar(bar: Bar, y: float, longest_us: float) -> str:
    name, cpu_us, kernel_us = bar
    is_cut = cpu_us > longest_us
    width = min(1.0, cpu_us / longest_us) * _BAR_WIDTH
    user = width * (1 - kernel_us / cpu_us) if cpu_us else 0.0
    base = y + _BAR_HEIGHT - 4
    cut = f'<path class="cut" d="M{_LABEL_WIDTH + width - 18:.1f} {y + _BAR_HEIGHT + 2:g}l8 -20"/>' if is_cut else ""
    return (
        f'<g class="{"ours" if name is Name.OURS else "theirs"}">'
        f'<text x="{_LABEL_WIDTH - 8}" y="{base:g}" text-anchor="end">{escape(name)}</text>'
        f'<rect class="user" x="{_LABEL_WIDTH}" y="{y:g}" width="{user:.1f}" height="{_BAR_HEIGHT}"/>'
        f'<rect class="kernel" x="{_LABEL_WIDTH + user:.1f}" y="{y:g}" width="{width - user:.1f}" height="{_BAR_HEIGHT}"/>'
        f'{cut}<text class="value" x="{_LABEL_WIDTH + width + 8:.1f}" y="{base:g}">{number_text(cpu_us)}</text></g>'
    )
