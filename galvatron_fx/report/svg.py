"""Pictures as inline SVG, in the colours of the page around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import singledispatch

from markupsafe import Markup

from galvatron_fx.report.drawing import Band, Boxes, Line, Picture, Rect, Shape, Text, TimeAxis
from galvatron_fx.report.palette import css_name

__all__ = ["inline_svg"]


def inline_svg(picture: Picture, name: str) -> Markup:
    """Return the picture as an ``<svg>`` element; ``name``: unlike those of the page's other pictures.

    What happens over time lies in an ``<svg>`` inside of it, class "time", which shows less of it where its ``viewBox``
    is made narrower. Names in there stay outside, lest they be stretched.
    """
    width, height = _n(picture.width + 4), _n(picture.height + 8)
    head = Markup('<svg role="img" aria-labelledby="{}-title" viewBox="-2 -4 {} {}" width="{}">\n').format(
        name, width, height, width
    )
    head += Markup('<title id="{}-title">{}</title>\n').format(name, picture.title)
    parts: dict[bool, list[Shape]] = {True: [], False: []}
    for shape in picture.shapes:
        parts[_is_over_time(picture.time, shape)].append(shape)
    lines = [*(_time(picture.time, parts[True]) if picture.time else ()), *map(_element, parts[False])]
    return head + Markup("\n").join(lines) + Markup("\n</svg>")


def _time(axis: TimeAxis, shapes: Sequence[Shape]) -> Iterator[Markup]:
    at = _n(axis.left), _n(axis.right - axis.left), _n(axis.bottom + 8)
    form = (
        '<svg class="time" x="{0}" y="-4" width="{1}" height="{2}" viewBox="{0} -4 {1} {2}" preserveAspectRatio="none"'
    )
    yield Markup(form + ' data-seconds="{3}">').format(*at, f"{axis.end_s:.6g}")
    yield from map(_element, shapes)
    yield Markup("</svg>")


def _is_over_time(axis: TimeAxis | None, shape: Shape) -> bool:
    if axis is None or isinstance(shape, Text):
        return False
    if isinstance(shape, Line):
        return axis.holds(min(shape.x1, shape.x2), max(shape.x1, shape.x2), min(shape.y1, shape.y2))
    if isinstance(shape, Rect):
        return axis.holds(shape.x, shape.x + shape.width, shape.y)
    return True


@singledispatch
def _element(shape: object) -> Markup:
    raise AssertionError(f"no SVG for {shape}")


@_element.register
def _(rect: Rect) -> Markup:
    attributes = (_n(rect.x), _n(rect.y), _n(rect.width), _n(rect.height), _colour(rect.fill))
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" fill="{}">{}</rect>').format(
        *attributes, _title(rect.title)
    )


@_element.register
def _(boxes: Boxes) -> Markup:
    height = _n(boxes.height)
    path = "".join(f"M{x:.2f} {_n(boxes.y)}h{width:.2f}v{height}h-{width:.2f}z" for x, width in boxes.spans)
    form = '<path d="{}" fill="{}" data-lane="{}" data-name="{}"/>'
    return Markup(form).format(path, _colour(boxes.fill), boxes.lane, boxes.fill)


@_element.register
def _(band: Band) -> Markup:
    (x, y), *rest = band.corners
    path = [f"M{_n(x)} {_n(y)}"]
    for next_x, next_y in rest:
        if _n(next_x) != _n(x):
            path.append(f"H{_n(next_x)}")
        if _n(next_y) != _n(y):
            path.append(f"V{_n(next_y)}")
        x, y = next_x, next_y
    said = "".join(path), _colour(band.fill), band.fill, f"{band.pixel:.4g}", _title(band.title)
    return Markup('<path d="{}z" fill="{}" data-name="{}" data-pixel="{}">{}</path>').format(*said)


@_element.register
def _(line: Line) -> Markup:
    dashes = Markup(' stroke-dasharray="5 3"') if line.is_dashed else Markup("")
    ends = (_n(line.x1), _n(line.y1), _n(line.x2), _n(line.y2))
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="{}" stroke-width="{}"{}/>').format(
        *ends, _colour(line.colour), _n(line.width), dashes
    )


@_element.register
def _(text: Text) -> Markup:
    weight = Markup(' font-weight="600"') if text.is_bold else Markup("")
    form = '<text x="{}" y="{}" dy=".35em" text-anchor="{}" font-size="{}" fill="{}"{}>{}</text>'
    return Markup(form).format(
        _n(text.x), _n(text.y), text.anchor, _n(text.size), _colour(text.colour), weight, text.text
    )


def _title(text: str) -> Markup:
    return Markup("<title>{}</title>").format(text) if text else Markup("")


def _colour(name: str) -> str:
    return f"var({css_name(name)})"


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
