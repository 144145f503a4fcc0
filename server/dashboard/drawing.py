"""SVG drawings of the pages: charts with two axes, layer maps, and bars per sub-layer; a shape is one path."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup, escape

from ...core.layer_sets import KINDS, Kind, LayerSet, SubLayer

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 240, 60, 24, 12, 42  # Size and margins of a chart in SVG units.
CLOCK_STEPS_S = (5, 10, 30, 60, 120, 300, 600, 1800, 3600)
BAR = 44  # Height of a bar in SVG units.
CELL, LABEL, ROW, RULER = 20, 68, 24, 16  # Sizes of a layer map in SVG units.
PER_BLOCK = 32  # Layers per row of a layer map.
MARKS = {  # SVG path of the mark for each state of a sub-layer.
    "int8": "M{x} {m}h10",
    "fp8": "M{x} {m}h4m2 0h4",
    "int4": "M{x} {a}h10M{x} {b}h10",
    "skipped": "M{x} {t}l10 10m0 -10l-10 10",
}
STATES = (
    "kept",
    "int8",
    "fp8",
    "int4",
    "skipped",
)  # States of a sub-layer, by the names that the style sheet and the legend use.
DOT, DIAMOND = "h0", "m0 -6l6 6l-6 6l-6 -6z"  # SVG paths. A dot is a line of length 0 with round caps.

Point = tuple[float, float]


def svg(
    kind: str,
    size: tuple[int, int],
    title: str,
    description: str,
    *elements: str,
    left_x: int = 0,
    role: str = "img",
) -> Markup:
    """Return an SVG of a width and height; `left_x` is the x of its left edge. One with links has the role "group"."""
    width, height = size
    return Markup(
        f'<svg class="{kind}" role="{role}" viewBox="{left_x} 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(elements)}</svg>"
    )


def path(kind: str, commands: Iterable[str]) -> str:
    """Return the parts as one path; an empty text without parts."""
    data = "".join(commands)
    return f'<path class="{kind}" d="{data}"/>' if data else ""


class LayerGrid:
    """The cells of a map: a row of height `row` per kind of sub-layer, in blocks of PER_BLOCK layers side by side.

    `labels` number the layers and name the rows; their text is `baseline` below the top of a row.
    """

    def __init__(self, n_layers: int, row: int, baseline: int) -> None:
        self._row, self._block = row, RULER + row * len(KINDS) + 4
        self.width = max(LABEL + CELL * min(n_layers, PER_BLOCK) + 2, 512)
        self.height = self._block * -(-n_layers // PER_BLOCK)
        self.labels = ""
        for i in range(n_layers):
            x, y = self.at(0, i)
            if i % 5 == 0 or n_layers <= 12:
                self.labels += f'<text x="{x + 9}" y="{y - 5}" text-anchor="middle">{i}</text>'
            for row_index, name in enumerate(KINDS.values() if i % PER_BLOCK == 0 else ()):
                self.labels += f'<text x="0" y="{y + row * row_index + baseline}">{name}</text>'

    def at(self, row: int, layer: int) -> tuple[int, int]:
        """Return the upper left corner of a cell."""
        return LABEL + CELL * (layer % PER_BLOCK), self._block * (layer // PER_BLOCK) + RULER + self._row * row


# --- layer maps


def state_of_part(layer_set: LayerSet, kind: Kind, layer: int) -> str:
    """Return how the draft runs a sub-layer: "kept", "skipped", or the format of its weights, such as "int4-64".

    "absent" is one that the model's layer does not have.
    """
    if not layer_set.has(kind, layer):
        return "absent"
    return "skipped" if layer_set.skips(kind, layer) else layer_set.format_of(kind, layer) or "kept"


def experts_of_part(layer_set: LayerSet, kind: Kind, layer: int) -> int | None:
    """Return the number of experts that the draft uses in a kept sub-layer; None: as many as the model."""
    return layer_set.experts_of(layer) if kind == "mlp" and not layer_set.skips(kind, layer) else None


def spans(layers: Iterable[int]) -> str:
    """Return numbers in words: 1–3, 7."""
    runs_of_layers: list[list[int]] = []
    for layer in sorted(layers):
        if runs_of_layers and runs_of_layers[-1][1] == layer - 1:
            runs_of_layers[-1][1] = layer
        else:
            runs_of_layers.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs_of_layers)


def map_words(layer_set: LayerSet) -> str:
    """Return a layer map as sentences."""
    sentences = []
    for kind, name in KINDS.items():
        by_state: dict[str, list[int]] = {}
        for layer in range(layer_set.n_layers):
            by_state.setdefault(state_of_part(layer_set, kind, layer), []).append(layer)
        phrases = [
            f"{state} in {'all layers' if len(layers) == layer_set.n_layers else spans(layers)}"
            for state, layers in sorted(by_state.items(), key=lambda pair: len(pair[1]))
        ]
        sentences.append(f"{name[0].upper()}{name[1:]}: {'; '.join(phrases)}.")
    by_number: dict[int, list[int]] = {}
    for layer in range(layer_set.n_layers):
        if (number := experts_of_part(layer_set, "mlp", layer)) is not None:
            by_number.setdefault(number, []).append(layer)
    if by_number:
        phrases = [f"{number} in {spans(layers)}" for number, layers in sorted(by_number.items())]
        sentences.append(f"Experts per token: {'; '.join(phrases)}.")
    return f"{' '.join(sentences)} Head: {layer_set.format_of('head') or 'kept'}."


def differing_parts(first: LayerSet, second: LayerSet) -> list[SubLayer]:
    """Return the sub-layers that two sets treat differently, within the depth of the shallower model."""
    n_layers = min(first.n_layers, second.n_layers)
    return [
        (kind, i)
        for kind in KINDS
        for i in range(n_layers)
        if state_of_part(first, kind, i) != state_of_part(second, kind, i)
        or experts_of_part(first, kind, i) != experts_of_part(second, kind, i)
    ]


def layer_map(layer_set: LayerSet, title: str, framed: Collection[SubLayer] = ()) -> Markup:
    """Draw attention and MLP by depth as SVG: kept, int8, fp8, int4 or skipped, by colour and by the mark in the cell.

    Sub-layers that the model's layers do not have get no cell.

    A number in a cell is the number of experts per token, if the draft uses fewer than the model. All cells of a
    state are one path, so a map has few elements whatever the depth. `framed` sub-layers get a frame.
    """
    grid = LayerGrid(layer_set.n_layers, ROW, 14)
    cells: dict[str, list[tuple[int, int]]] = {state: [] for state in STATES}
    frames, numbers = [], ""
    for row, kind in enumerate(KINDS):
        for i in range(layer_set.n_layers):
            x, y = grid.at(row, i)
            if (number := experts_of_part(layer_set, kind, i)) is not None:
                numbers += f'<text x="{x + 9}" y="{y + 15}" text-anchor="middle">{number}</text>'
            if (state := state_of_part(layer_set, kind, i)) != "absent":
                cells[state.partition("-")[0]].append((x, y))
            if (kind, i) in framed:
                frames.append(f"M{x - 1} {y - 1}h20v22h-20z")
    key_x, key_y, legend = LABEL, grid.height + 6, ""
    for state, corners in cells.items():
        if corners:
            corners.append((key_x, key_y))
            legend += f'<text x="{key_x + 24}" y="{key_y + 14}">{state}</text>'
            key_x += 84
    paths = [path(state, (f"M{x} {y}h18v20h-18z" for x, y in corners)) for state, corners in cells.items()]
    paths += [
        path(f"mark on-{state}", (mark.format(x=x + 4, t=y + 5, m=y + 10, a=y + 7, b=y + 13) for x, y in cells[state]))
        for state, mark in MARKS.items()
    ]
    size, description, labels = (grid.width, key_y + 22), map_words(layer_set), numbers + grid.labels
    return svg("map", size, title, description, *paths, labels, legend, path("differs", frames), left_x=-1)


def bar_map(whole: LayerSet, bars: Mapping[Kind, Sequence[float]], title: str, words: str, high: float) -> Markup:
    """Draw a bar per sub-layer of the model `whole`, attention above MLP, as high as its value (0 to 1).

    `words` describes, for the text alternative, a value of `high` or more.
    """
    grid = LayerGrid(whole.n_layers, BAR + 6, BAR // 2 + 4)
    frames, filled_bars, sentences = [], [], []
    for row, (kind, name) in enumerate(KINDS.items()):
        for i, value in enumerate(bars[kind]):
            if not whole.has(kind, i):
                continue
            (x, y), height = grid.at(row, i), round(BAR * value, 1)
            frames.append(f"M{x} {y}h18v{BAR}h-18z")
            filled_bars.append(f"M{x} {y + BAR}h18v{-height}h-18z" if height else "")
        high_layers = [i for i, value in enumerate(bars[kind]) if value >= high]
        sentences.append(f"{name[0].upper()}{name[1:]}: {words}: {spans(high_layers) or 'none'}.")
    size, elements = (grid.width, grid.height), (path("kept", frames), path("bar", filled_bars), grid.labels)
    return svg("map", size, title, " ".join(sentences), *elements, left_x=-1)


# --- charts


def ticks(lowest: float, highest: float) -> list[float]:
    """Return about five round numbers from `lowest` to `highest`."""
    if not highest > lowest:
        return [lowest]
    rough_step = (highest - lowest) / 5
    power_of_ten = 10.0 ** math.floor(math.log10(rough_step))
    step = next(factor * power_of_ten for factor in (1, 2, 5, 10) if factor * power_of_ten >= rough_step)
    return [n * step for n in range(math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9) + 1)]


def clock_ticks(first_s: float, last_s: float) -> list[float]:
    """Return at most seven times (seconds), whole minutes or hours if the span is long enough."""
    span_s = last_s - first_s
    step_s = next((step for step in CLOCK_STEPS_S if span_s / step <= 6), CLOCK_STEPS_S[-1])
    return [float(n * step_s) for n in range(math.ceil(first_s / step_s), math.floor(last_s / step_s) + 1)]


def clock_words(at: float) -> str:
    """Return a time (seconds since 1970) by the server's clock, with seconds unless it is a whole minute."""
    return time.strftime("%H:%M:%S" if at % 60 else "%H:%M", time.localtime(at))


class Plot:
    """A chart with two axes and room for the points; every series is one path, with its name as CSS class.

    Args:   top: maximum end of the y axis, such as 1 for a share. bottom: its start; None: below the lowest point.
            times: start and end of the x axis in seconds since 1970; None: the x axis has no times. width: in SVG
            units.
    """

    def __init__(
        self,
        title: str,
        description: str,
        x_label: str,
        y_label: str,
        points: Sequence[Point],
        top: float = math.inf,
        bottom: float | None = None,
        times: Point | None = None,
        width: int = WIDTH,
    ) -> None:
        self._title, self._description = title, description
        self._x_label, self._y_label = x_label, y_label
        xs, ys = [x for x, _ in points], [y for _, y in points]  # `zip(*points)` is slow: it makes an object per point.
        self._x_range, (low, high) = _with_margin(xs) if times is None else times, _with_margin(ys)
        self._y_range = low if bottom is None else bottom, high if max(ys) > top else min(high, top)
        self._is_counted = all(x % 1 == 0 for x in xs)  # Between numbers of trials there is nothing to label.
        self._has_times, self._width = times is not None, width
        self._paths: list[str] = []
        self._keys: list[str] = []
        self._has_links = False

    def _at(self, point: Point) -> str:
        (x_low, x_high), (y_low, y_high) = self._x_range, self._y_range
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (self._width - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f} {y:.1f}"

    def marks(self, name: str, points: Iterable[Point], mark_path: str) -> None:
        """Add a mark, a separate path, at each point."""
        self._paths.append(path(name, (f"M{self._at(point)}{mark_path}" for point in points)))

    def links(
        self, name: str, points: Sequence[Point], mark_path: str, links: Sequence[str], titles: Sequence[str]
    ) -> None:
        """Add a mark at each point that links to an address. Tab skips the marks; for the keyboard there are tables."""
        self._has_links = self._has_links or bool(points)
        for point, link, title in zip(points, links, titles, strict=True):
            x, _, y = (at := self._at(point)).partition(" ")
            # A line of length 0 has no area that a pointer could be over.
            is_dot = mark_path == DOT
            mark = f'<circle class="{name}" cx="{x}" cy="{y}" r="4"/>' if is_dot else path(name, [f"M{at}{mark_path}"])
            self._paths.append(f'<a href="{escape(link)}" tabindex="-1" aria-label="{escape(title)}">{mark}</a>')

    def line(self, name: str, points: Sequence[Point], ending: str = "") -> None:
        """Add a line; with the end "z" the area that it encloses."""
        self._paths.append(path(name, ["M", "L".join(map(self._at, points)), ending] if points else []))

    def steps(self, name: str, points: Sequence[Point]) -> None:
        """Add a line that keeps each value until the next point."""
        corners = [(following[0], previous[1]) for previous, following in pairwise(points)]
        step_points = [point for pair in zip(points, corners, strict=False) for point in pair]
        self.line(name, [*step_points, *points[-1:]])

    def key(self, name: str, words: str) -> None:
        """Explain a line below the x axis, in place of the axis label."""
        x, y = LEFT + 110 * len(self._keys), HEIGHT - 10
        self._keys.append(f'{path(name, [f"M{x} {y}h24"])}<text x="{x + 30}" y="{y + 4}">{escape(words)}</text>')

    def draw(self) -> Markup:
        """Return the SVG."""
        lines, labels = [], list(self._keys)
        for tick in ticks(*self._y_range):
            y = self._at((self._x_range[0], tick)).partition(" ")[2]
            lines.append(f"M{LEFT} {y}H{self._width - RIGHT}")
            labels.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
        for tick in (clock_ticks if self._has_times else ticks)(*self._x_range):
            if self._is_counted and tick != round(tick):
                continue
            x = self._at((tick, self._y_range[0])).partition(" ")[0]
            words = clock_words(tick) if self._has_times else f"{tick:.6g}"
            labels.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{escape(words)}</text>')
        middle_x, middle_y = (LEFT + self._width - RIGHT) // 2, (HEIGHT - BOTTOM) // 2
        labels.append(f'<text x="{middle_x}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self._x_label)}</text>')
        rotation = f'text-anchor="middle" transform="rotate(-90 12 {middle_y})"'
        labels.append(f'<text x="12" y="{middle_y}" {rotation}>{escape(self._y_label)}</text>')
        size, axis = (self._width, HEIGHT), path("axis", lines)
        role = "group" if self._has_links else "img"
        return svg("graph", size, self._title, self._description, axis, *self._paths, *labels, role=role)


def _with_margin(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin
