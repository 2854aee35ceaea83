"""Pictures as inline SVG, in the colours of the page around them."""

from __future__ import annotations

from functools import singledispatch

from markupsafe import Markup

from galvatron_fx.report.drawing import Band, Boxes, Line, Picture, Rect, Text
from galvatron_fx.report.palette import css_name

__all__ = ["inline_svg"]


def inline_svg(picture: Picture, name: str) -> Markup:
    """Return the picture as an ``<svg>`` element; ``name``: unlike those of the page's other pictures."""
    width, height = _n(picture.width + 4), _n(picture.height + 8)
    head = Markup('<svg role="img" aria-labelledby="{}-title" viewBox="-2 -4 {} {}" width="{}">\n').format(
        name, width, height, width
    )
    head += Markup('<title id="{}-title">{}</title>\n').format(name, picture.title)
    return head + Markup("\n").join(_element(shape) for shape in picture.shapes) + Markup("\n</svg>")


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
    path = "".join(f"M{_n(x)} {_n(boxes.y)}h{_n(width)}v{height}h-{_n(width)}z" for x, width in boxes.spans)
    return Markup('<path d="{}" fill="{}"/>').format(path, _colour(boxes.fill))


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
    return Markup('<path d="{}z" fill="{}">{}</path>').format("".join(path), _colour(band.fill), _title(band.title))


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
