"""Parts of programs that mix places of a sequence or an image: attention of several kinds, convolutions, gathers."""

from __future__ import annotations

import itertools

from tests.fuzz.operators import Part, linear, norm
from tests.fuzz.source import Size, Value, Writer, sizes, spelled


def _heads(w: Writer, width: int) -> int:
    return w.random.choice([n for n in (1, 2, 3, 4) if width % n == 0])


def _query_key_value(w: Writer, x: Value, heads: int) -> list[Value]:
    """Three of [batch, heads, sequence, width of a head], in one of the usual ways."""
    b, s, d = x.shape
    head = d.value // heads
    shape = (b, Size.of(heads), s, Size.of(head))
    kind = w.random.randrange(6)
    if kind == 0:
        both = linear(w, x, 3 * d.value)
        packed = w.emit(
            f"{both}.reshape({b.text}, {s.text}, 3, {heads}, {head}).permute(2, 0, 3, 1, 4)", (Size.of(3), *shape)
        )
        if w.chance(0.5):
            return w.emit_several(f"{packed}.unbind(0)", [shape] * 3)
        return [w.emit(f"{packed}[{i}]", shape) for i in range(3)]
    if kind == 1:
        parts = w.emit_several(f"{linear(w, x, 3 * d.value)}.chunk(3, -1)", [x.shape] * 3)
    elif kind == 2:
        parts = w.emit_several(f"{linear(w, x, 3 * d.value)}.split({d.value}, -1)", [x.shape] * 3)
    elif kind == 3:
        all_three = linear(w, x, 3 * d.value)
        parts = [w.emit(f"{all_three}[..., {i * d.value} : {(i + 1) * d.value}]", x.shape) for i in range(3)]
    elif kind == 4 and heads % 2 == 0:
        return _grouped(w, x, heads)
    else:
        parts = [linear(w, x) for _ in range(3)]
    if w.chance(0.1):
        return [w.emit(f"{p}.unflatten(-1, ({heads}, {head})).transpose(1, 2)", shape) for p in parts]
    return [w.emit(f"{p}.view({b.text}, {s.text}, {heads}, {head}).transpose(1, 2)", shape) for p in parts]


def _grouped(w: Writer, x: Value, heads: int) -> list[Value]:
    """The same, where two heads of queries share one of keys and values."""
    b, s, d = x.shape
    few, head = d.value // 2, d.value // heads
    together = linear(w, x, 2 * d.value)
    if w.chance(0.5):
        shapes = [x.shape, *[(b, s, Size.of(few))] * 2]
        parts = w.emit_several(f"{together}.split([{d.value}, {few}, {few}], -1)", shapes)
    else:
        ends = (0, d.value, d.value + few, 2 * d.value)
        parts = [
            w.emit(f"{together}[..., {start}:{end}]", (b, s, Size.of(end - start)))
            for start, end in itertools.pairwise(ends)
        ]
    shape = (b, Size.of(heads), s, Size.of(head))
    q, *others = (f"{part}.unflatten(-1, (-1, {head})).transpose(1, 2)" for part in parts)
    return [w.emit(q, shape), *(w.emit(f"{each}.repeat_interleave(2, 1)", shape) for each in others)]


def _joined(w: Writer, y: Value, x: Value) -> Value:
    """[batch, heads, sequence, width of a head] back to the shape of ``x``, and the last projection."""
    b, s, d = x.shape
    if w.chance(0.3):
        y = w.emit(f"torch.einsum('bhsd->bshd', {y})", (b, s, y.shape[1], y.shape[3]))
        return linear(w, w.emit(f"{y}.flatten(2)", x.shape))
    return linear(w, w.emit(f"{y}.transpose(1, 2).reshape({b.text}, {s.text}, {d.text})", x.shape))


def _rotated(w: Writer, q: Value) -> Value:
    """Rotary positions."""
    half, s = q.width // 2, q.shape[2]
    angles = w.emit(f"torch.arange({s.text}).unsqueeze(-1) * {w.buffer(f'torch.rand({half})')}", (s, Size.of(half)))
    shape = (*q.shape[:-1], Size.of(half))
    if w.chance(0.5):
        first, second = w.emit_several(f"{q}.chunk(2, -1)", [shape] * 2)
    else:
        first, second = w.emit(f"{q}[..., :{half}]", shape), w.emit(f"{q}[..., {half}:]", shape)
    one, two = (
        f"{first} * {angles}.cos() - {second} * {angles}.sin()",
        f"{first} * {angles}.sin() + {second} * {angles}.cos()",
    )
    return w.emit(f"torch.cat([{one}, {two}], -1)", q.shape)


def _mask(w: Writer, s: Size) -> str:
    """[sequence, sequence] of what may be seen."""
    ways = (
        f"torch.ones({s.text}, {s.text}, dtype=torch.bool).tril()",
        f"(torch.arange({s.text})[None] <= torch.arange({s.text})[:, None])",
        f"((torch.arange({s.text})[None] - torch.arange({s.text})[:, None]).abs() < 3)",
    )
    return w.random.choice(ways)


def token_attention(w: Writer, x: Value) -> Value:
    """Attention over the places of [batch, sequence, width], by torch's kernel or by hand."""
    heads = _heads(w, x.width)
    q, k, v = _query_key_value(w, x, heads)
    b, h, s, d = q.shape
    if w.chance(0.25) and d.value % 2 == 0:
        q, k = _rotated(w, q), _rotated(w, k)
    if w.chance(0.2):
        q, k = norm(w, q), norm(w, k)
    kind = w.random.randrange(5)
    if kind == 0:
        return _joined(
            w, w.emit(f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={w.chance(0.5)})", q.shape), x
        )
    if kind == 1:
        return _joined(w, w.emit(f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={_mask(w, s)})", q.shape), x)
    square = (b, h, s, s)
    ways = (
        f"{q} @ {k}.transpose(-2, -1) * {d.value**-0.5}",
        f"torch.einsum('bhqd,bhkd->bhqk', {q}, {k}) / {d.value**0.5}",
        f"torch.matmul({q} * {d.value**-0.25}, {k}.transpose(2, 3))",
    )
    scores = w.emit(w.random.choice(ways), square)
    if w.chance(0.6):
        infinity = w.random.choice(("float('-inf')", "-1e9", "torch.finfo(torch.float64).min"))
        scores = w.emit(f"{scores}.masked_fill(~{_mask(w, s)}, {infinity})", square)
    if w.chance(0.3):
        table = w.module(f"nn.Embedding({2 * s.value + 1}, {heads})")
        places = (
            f"(torch.arange({s.text})[None] - torch.arange({s.text})[:, None]).clamp(-{s.value}, {s.value}) + {s.value}"
        )
        scores = w.emit(f"{scores} + {table}({places}).permute(2, 0, 1)", square)
    weights = w.emit(f"{scores}.softmax(-1)", square)
    return _joined(w, w.emit(f"{weights} @ {v}", q.shape), x)


def channel_attention(w: Writer, x: Value) -> Value:
    """Attention over the channels of [batch, places, width] (XCiT, Restormer): scores are [width of a head] squared."""
    b, s, d = x.shape
    heads = _heads(w, d.value)
    head = d.value // heads
    shape = (b, Size.of(heads), Size.of(head), s)
    if w.chance(0.5):
        both = linear(w, x, 3 * d.value)
        order = "2, 0, 3, 4, 1"
        packed = w.emit(
            f"{both}.reshape({b.text}, {s.text}, 3, {heads}, {head}).permute({order})", (Size.of(3), *shape)
        )
        q, k, v = w.emit_several(f"{packed}.unbind(0)", [shape] * 3)
    elif heads == 1 and w.chance(0.7):
        shape = (b, d, s)
        q, k, v = (w.emit(f"{linear(w, x)}.transpose(1, 2)", shape) for _ in range(3))
    else:
        q, k, v = (w.emit(f"{part}.transpose(-2, -1)", shape) for part in _query_key_value(w, x, heads))
    if w.chance(0.8):
        q, k = (w.emit(f"F.normalize({part}, dim=-1)", shape) for part in (q, k))
    scores = w.emit(f"{q} @ {k}.transpose(-2, -1)", (*shape[:-1], shape[-2]))
    if w.chance(0.6):
        scores = w.emit(f"{scores} * {w.parameter(heads, 1, 1) if len(shape) == 4 else w.parameter()}", scores.shape)
    out = w.emit(f"{scores}.softmax(-1) @ {v}", shape)
    if len(shape) == 3:
        out = w.emit(f"{out}.transpose(1, 2)", x.shape)
    else:
        out = w.emit(f"{out}.permute(0, 3, 1, 2).reshape({b.text}, {s.text}, {d.text})", x.shape)
    return linear(w, out) if w.chance(0.7) else out


def linear_attention(w: Writer, x: Value) -> Value:
    """Keys and values are summed over the places first."""
    heads = _heads(w, x.width)
    q, k, v = _query_key_value(w, x, heads)
    b, h, _, d = q.shape
    q, k = w.emit(f"{q}.softmax(-1)", q.shape), w.emit(f"{k}.softmax(-2)", k.shape)
    context = w.emit(f"torch.einsum('bhnd,bhne->bhde', {k}, {v})", (b, h, d, d))
    return _joined(w, w.emit(f"torch.einsum('bhde,bhnd->bhne', {context}, {q})", q.shape), x)


def grouped_attention(w: Writer, x: Value) -> Value:
    """Fewer heads of keys than of queries."""
    b, s, d = x.shape
    heads = w.random.choice([n for n in (2, 4) if d.value % n == 0] or [1])
    few, head = max(heads // 2, 1), d.value // heads
    q = w.emit(f"{linear(w, x)}.view({b.text}, {s.text}, {heads}, {head}).transpose(1, 2)", (b, *sizes(heads, s, head)))
    small = (b, *sizes(few, s, head))
    k, v = (
        w.emit(f"{linear(w, x, few * head)}.view({b.text}, {s.text}, {few}, {head}).transpose(1, 2)", small)
        for _ in range(2)
    )
    times = heads // few
    if w.chance(0.3):
        made = f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True, enable_gqa=True)"
        return _joined(w, w.emit(made, q.shape), x)
    if w.chance(0.5):
        k, v = (w.emit(f"{part}.repeat_interleave({times}, 1)", q.shape) for part in (k, v))
    else:
        wide = f"{b.text}, {few}, {times}, {s.text}, {head}"
        k, v = (
            w.emit(f"{part}[:, :, None].expand({wide}).reshape({b.text}, {heads}, {s.text}, {head})", q.shape)
            for part in (k, v)
        )
    return _joined(w, w.emit(f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True)", q.shape), x)


def learned_queries(w: Writer, x: Value) -> Value:
    """A few learned places attend to all, and all to them."""
    b, s, d = x.shape
    count = w.random.choice((1, 2, 4))
    queries = w.emit(f"{w.parameter(count, d.value)}.unsqueeze(0).expand({b.text}, -1, -1)", (b, Size.of(count), d))
    scores = w.emit(f"torch.bmm({queries}, {linear(w, x)}.transpose(1, 2)).softmax(-1)", (b, Size.of(count), s))
    summary = w.emit(f"torch.bmm({scores}, {x})", queries.shape)
    return w.emit(f"torch.bmm({scores}.transpose(1, 2), {linear(w, summary)})", x.shape)


def multi_head(w: Writer, x: Value) -> Value:
    """torch's own module."""
    made = w.module(f"nn.MultiheadAttention({x.width}, {_heads(w, x.width)}, batch_first=True)")
    return w.emit(f"{made}({x}, {x}, {x}, need_weights={w.chance(0.4)})[0]", x.shape)


def over_places(w: Writer, x: Value) -> Value:
    """Something simple along the sequence of [batch, sequence, width]."""
    b, s, d = x.shape
    width, text = d.value, s.text
    kind = w.random.randrange(11)
    if kind == 0:
        return w.emit(f"{x}.cumsum(1) / torch.arange(1, {text} + 1).unsqueeze(-1)", x.shape)
    if kind == 1:
        return w.emit(f"torch.cat([{x}[:, 1:], torch.zeros_like({x}[:, :1])], 1)", x.shape)
    if kind == 2:
        turned = w.emit(f"{x}.transpose(1, 2)", (b, d, s))
        conv = w.module(f"nn.Conv1d({width}, {width}, 3, padding=1, groups={w.random.choice((1, width))})")
        return w.emit(f"{conv}({turned}).transpose(1, 2)", x.shape)
    if kind == 3:
        pooled = w.emit(f"{x}.mean(1, keepdim=True)", (b, Size.of(1), d))
        return w.emit(f"{x} * torch.sigmoid({linear(w, pooled)})", x.shape)
    if kind == 4:
        places = w.emit(f"{x}[..., :1].argsort(1).expand_as({x})", x.shape, "int")
        return w.emit(f"{x}.gather(1, {places})", x.shape)
    if kind == 5:
        return w.emit(f"F.normalize({x}, dim=1)", x.shape)
    if kind == 6:
        pool = w.random.choice(("F.avg_pool1d({}, 3, 1, 1)", "F.max_pool1d({}, 3, 1, 1)"))
        return w.emit(pool.format(f"{x}.transpose(1, 2)") + ".transpose(1, 2)", x.shape)
    if kind == 7:
        place = w.emit(f"{x}.detach()[..., 0].argmax(1)", (b,), "int")
        return w.emit(f"{x} + {x}[torch.arange({b.text}), {place}].unsqueeze(1)", x.shape)
    if kind == 8:
        groups = w.random.choice([n for n in (1, 2, 4) if width % n == 0])
        return w.emit(f"{w.module(f'nn.GroupNorm({groups}, {width})')}({x}.transpose(1, 2)).transpose(1, 2)", x.shape)
    if kind == 9:
        places = f"(torch.arange({text}) // 2).view(1, -1, 1).expand({b.text}, -1, {width})"
        summed = w.emit(f"torch.zeros_like({x}).scatter_add(1, {places}, {x})", x.shape)
        return w.emit(f"{summed}.gather(1, {places})", x.shape)
    return w.emit(f"{x} - {x}.amax(1, keepdim=True)", x.shape)


def mixer(w: Writer, x: Value) -> Value:
    """Products along the sequence, which then has a fixed length."""
    b, s, d = x.shape
    turned = w.emit(f"{x}.transpose(1, 2)", (b, d, s))
    first, second = w.module(f"nn.Linear({s.value}, {2 * s.value})"), w.module(f"nn.Linear({2 * s.value}, {s.value})")
    return w.emit(f"{second}(F.gelu({first}({turned}))).transpose(1, 2)", x.shape)


def rows_and_columns(w: Writer, x: Value) -> Value:
    """Places as a grid [batch, rows, columns, width] with norms over its features, as hierarchical models have it."""
    b, s, d = x.shape
    rows = w.random.choice([n for n in (2, 3, 4) if s.value % n == 0] or [1])
    columns = Size.of(s.value // rows) if s.is_fixed else Size(s.value // rows, f"({s.text} // {rows})")
    shape = (b, Size.of(rows), columns, d)
    made = w.random.choice((f"{x}.view({spelled(shape)})", f"{x}.unflatten(1, ({rows}, -1))"))
    grid = norm(w, w.emit(made, shape))
    for _ in range(w.random.choice((0, 1, 1, 2))):
        kind = w.random.randrange(5)
        if kind == 0:
            grid = w.emit(f"torch.roll({grid}, (1, 1), (1, 2))", shape)
        elif kind == 1:
            grid = w.emit(f"{grid} + {grid}.mean({w.random.choice((1, 2))}, keepdim=True)", shape)
        elif kind == 2:
            turned = w.emit(f"{grid}.transpose(1, 2)", (b, columns, shape[1], d))
            grid = w.emit(f"{norm(w, turned)}.transpose(1, 2)", shape)
        else:
            grid = linear(w, grid) if kind == 3 else norm(w, grid)
    return w.emit(w.random.choice((f"{grid}.flatten(1, 2)", f"{grid}.reshape({spelled(x.shape)})")), x.shape)


TOKENS: tuple[Part, ...] = (
    token_attention,
    token_attention,
    token_attention,
    channel_attention,
    channel_attention,
    linear_attention,
    grouped_attention,
    learned_queries,
    multi_head,
    over_places,
    over_places,
    mixer,
    rows_and_columns,
    rows_and_columns,
)


# ---- images [batch, channels, height, width] -----------------------------------------------------------------------


def convolution(w: Writer, x: Value) -> Value:
    channels = x.shape[1].value
    size, groups = w.random.choice((1, 3)), w.random.choice((1, 1, channels))
    bias = w.random.choice(("", ", bias=False"))
    conv = w.module(f"nn.Conv2d({channels}, {channels}, {size}, padding={size // 2}, groups={groups}{bias})")
    return w.emit(f"{conv}({x})", x.shape)


def image_norm(w: Writer, x: Value) -> Value:
    channels = x.shape[1].value
    groups = w.random.choice([n for n in (1, 2, 4) if channels % n == 0])
    kinds = (f"nn.GroupNorm({groups}, {channels})", f"nn.BatchNorm2d({channels})", f"nn.InstanceNorm2d({channels})")
    return w.emit(f"{w.module(w.random.choice(kinds))}({x})", x.shape)


def pooling(w: Writer, x: Value) -> Value:
    ways = (
        "F.max_pool2d({x}, 3, 1, 1)",
        "F.avg_pool2d({x}, 3, 1, 1)",
        "{x} - F.avg_pool2d({x}, 3, 1, 1)",
        "{x} * torch.sigmoid(F.adaptive_avg_pool2d({x}, 1))",
        "{x} + {x}.amax((2, 3), keepdim=True)",
        "F.interpolate(F.max_pool2d({x}, 2), scale_factor=2.0)",
        "F.interpolate(F.avg_pool2d({x}, 2), scale_factor=2, mode='bilinear')",
        "F.pixel_shuffle(F.pixel_unshuffle({x}, 2), 2)",
    )
    return w.emit(w.random.choice(ways).format(x=x), x.shape)


def channels_last(w: Writer, x: Value) -> Value:
    """Norm and products over channels, as ConvNeXt has them."""
    b, c, height, width = x.shape
    last = w.emit(f"{x}.permute(0, 2, 3, 1)", (b, height, width, c))
    return w.emit(f"{linear(w, norm(w, last))}.permute(0, 3, 1, 2)", x.shape)


def as_tokens(w: Writer, x: Value) -> Value:
    """Places as a sequence, with attention over them or over the channels."""
    b, c, height, width = x.shape
    places = Size.of(height.value * width.value)
    tokens = w.emit(f"{x}.flatten(2).transpose(1, 2)", (b, places, c))
    mixed = w.random.choice((token_attention, channel_attention))(w, tokens)
    return w.emit(f"{mixed}.transpose(1, 2).reshape({spelled(x.shape)})", x.shape)


def windows(w: Writer, x: Value) -> Value:
    """Attention inside windows of 2 x 2, as Swin has it."""
    b, c, height, width = x.shape
    rows, columns = height.value // 2, width.value // 2
    shifted = w.emit(f"torch.roll({x}, (1, 1), (2, 3))", x.shape) if w.chance(0.4) else x
    view = f"{shifted}.view({b.text}, {c.text}, {rows}, 2, {columns}, 2).permute(0, 2, 4, 3, 5, 1)"
    many = Size(b.value * rows * columns, f"{b.text} * {rows * columns}")
    parts = w.emit(f"{view}.reshape(-1, 4, {c.text})", (many, Size.of(4), c))
    mixed = token_attention(w, parts)
    back = f"{mixed}.view({b.text}, {rows}, {columns}, 2, 2, {c.text}).permute(0, 5, 1, 3, 2, 4)"
    return w.emit(f"{back}.reshape({spelled(x.shape)})", x.shape)


def over_features(w: Writer, x: Value) -> Value:
    """Attention over channels of an image whose keys are convolutions (Restormer)."""
    b, c, height, width = x.shape
    places = Size.of(height.value * width.value)
    conv = w.module(f"nn.Conv2d({c.value}, {3 * c.value}, 1)")
    parts = w.emit_several(f"{conv}({x}).chunk(3, 1)", [x.shape] * 3)
    q, k, v = (w.emit(f"{part}.flatten(2)", (b, c, places)) for part in parts)
    q, k = (w.emit(f"F.normalize({part}, dim=-1)", part.shape) for part in (q, k))
    scores = w.emit(f"({q} @ {k}.transpose(1, 2) * {w.parameter()}).softmax(-1)", (b, c, c))
    return w.emit(f"({scores} @ {v}).reshape({spelled(x.shape)})", x.shape)


IMAGES: tuple[Part, ...] = (
    convolution,
    convolution,
    image_norm,
    image_norm,
    pooling,
    channels_last,
    as_tokens,
    windows,
    over_features,
)
