"""The Triton code of `convolution`: products of the gradients of outputs with inputs that are read where they lie.

Inputs are (B, H, W, C) in memory, gradients of outputs (B, Ho, Wo, p). A gradient is a matrix of p rows and kh kw C
columns; column k is channel k % C under tap k // C of the window. A program forms BLOCK_P rows by BLOCK_C columns of
it, BLOCK_T positions at a time. Where BLOCK_C divides C it has one tap; a tile of several taps reads g once for all of
them, and three channels under 7 x 7 fill 147 columns rather than 49 tiles of three columns each.

SIZES is (H, W, C, p, Ho, Wo); WINDOW is kernel, stride, padding, dilation, each down before across.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _columns(start, SIZES: tl.constexpr, BLOCK_C: tl.constexpr):
    """The columns from `start` on, and the tap of each, which is one number where they all have the same."""
    C: tl.constexpr = SIZES[2]
    column = start + tl.arange(0, BLOCK_C)
    if C % BLOCK_C == 0:
        tap = start // C
        # Or every number is read by itself.
        channel = tl.multiple_of(start % C, BLOCK_C) + tl.arange(0, BLOCK_C)
    else:
        tap = (column // C)[None, :]
        channel = column % C
    return column[None, :], channel[None, :], tap


@triton.jit
def _outputs(g, place, inside, o, SIZES: tl.constexpr):
    """Gradients of outputs (BLOCK_T, BLOCK_P) at these places after g, zero where not inside."""
    p: tl.constexpr = SIZES[3]
    return tl.load(g + place[:, None] * p + o[None, :], mask=inside[:, None] & (o < p)[None, :], other=0.0)


@triton.jit
def _inputs(x, place, inside, column, channel, tap, SIZES: tl.constexpr, WINDOW: tl.constexpr):
    """What outputs at these places (of one sample) read (BLOCK_T, BLOCK_C), zero outside of the input."""
    H: tl.constexpr = SIZES[0]
    W: tl.constexpr = SIZES[1]
    C: tl.constexpr = SIZES[2]
    Wo: tl.constexpr = SIZES[5]
    kw: tl.constexpr = WINDOW[1]
    columns: tl.constexpr = WINDOW[0] * WINDOW[1] * SIZES[2]
    row = (place // Wo * WINDOW[2] - WINDOW[4])[:, None] + tap // kw * WINDOW[6]
    across = (place % Wo * WINDOW[3] - WINDOW[5])[:, None] + tap % kw * WINDOW[7]
    inside = inside[:, None] & (row >= 0) & (row < H) & (across >= 0) & (across < W)
    return tl.load(x + (row * W + across) * C + channel, mask=inside & (column < columns), other=0.0)


@triton.jit
def _gradient(x, g, sample, o, column, channel, tap, SIZES: tl.constexpr, WINDOW: tl.constexpr,
              BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """A tile of the gradient of one sample."""
    L: tl.constexpr = SIZES[4] * SIZES[5]
    x += sample.to(tl.int64) * (SIZES[0] * SIZES[1] * SIZES[2])
    g += sample.to(tl.int64) * (L * SIZES[3])
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for start in range(0, L, BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        left = _outputs(g, place, place < L, o, SIZES)
        right = _inputs(x, place, place < L, column, channel, tap, SIZES, WINDOW)
        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
    return total


@triton.jit
def squares_kernel(x, g, out, SIZES: tl.constexpr, WINDOW: tl.constexpr, TILES: tl.constexpr,
                   BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """out[b, tile] = sum of the squares of one of the tiles of sample b's gradient, TILES[0] by TILES[1] of them."""
    tiles: tl.constexpr = TILES[0] * TILES[1]
    sample, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    o = tile // TILES[1] * BLOCK_P + tl.arange(0, BLOCK_P)
    column, channel, tap = _columns(tile % TILES[1] * BLOCK_C, SIZES, BLOCK_C)
    value = _gradient(x, g, sample, o, column, channel, tap, SIZES, WINDOW, BLOCK_P, BLOCK_C, BLOCK_T)
    # Beyond the edge stand zeros times numbers that may be infinite.
    inside = (o < SIZES[3])[:, None] & (column < WINDOW[0] * WINDOW[1] * SIZES[2])
    value = tl.where(inside, value, 0.0)
    tl.store(out + tl.program_id(0), tl.sum(value * value))


@triton.jit
def gradients_kernel(x, g, out, SIZES: tl.constexpr, WINDOW: tl.constexpr, TILES: tl.constexpr,
                     BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """out[b] = the gradient of sample b, (p, kh, kw, C)."""
    tiles: tl.constexpr = TILES[0] * TILES[1]
    columns: tl.constexpr = WINDOW[0] * WINDOW[1] * SIZES[2]
    sample, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    o = tile // TILES[1] * BLOCK_P + tl.arange(0, BLOCK_P)
    column, channel, tap = _columns(tile % TILES[1] * BLOCK_C, SIZES, BLOCK_C)
    value = _gradient(x, g, sample, o, column, channel, tap, SIZES, WINDOW, BLOCK_P, BLOCK_C, BLOCK_T)
    out += sample.to(tl.int64) * (SIZES[3] * columns)
    place = o[:, None] * columns + column
    tl.store(out + place, value.to(out.dtype.element_ty), mask=(o < SIZES[3])[:, None] & (column < columns))


# Batches drawn at random have other numbers of rows each time: one code for all.
@triton.jit(do_not_specialize=["rows", "steps"])
def sum_kernel(x, g, out, rows, steps, SIZES: tl.constexpr, WINDOW: tl.constexpr, TILES: tl.constexpr,
               BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """out[part] (p, columns) = what the positions of one part add to the sum of all gradients.

    The positions of all samples are counted as one, `rows` in all; a part has `steps` times BLOCK_T of them.
    """
    tiles: tl.constexpr = TILES[0] * TILES[1]
    columns: tl.constexpr = WINDOW[0] * WINDOW[1] * SIZES[2]
    L: tl.constexpr = SIZES[4] * SIZES[5]
    part, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    o = tile // TILES[1] * BLOCK_P + tl.arange(0, BLOCK_P)
    column, channel, tap = _columns(tile % TILES[1] * BLOCK_C, SIZES, BLOCK_C)
    size: tl.constexpr = SIZES[0] * SIZES[1] * SIZES[2]
    here = tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for step in range(steps):
        start = (part * steps + step) * BLOCK_T
        inside = here < rows - start
        place = (start % L).to(tl.int32) + here
        left = _outputs(g + start * SIZES[3], here, inside, o, SIZES)
        at = x + start // L * size
        if L % BLOCK_T:  # a tile of several samples
            at += (place // L).to(tl.int64)[:, None] * size
            place = place % L
        right = _inputs(at, place, inside, column, channel, tap, SIZES, WINDOW)
        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
    out += part * (SIZES[3] * columns)
    tl.store(out + (o[:, None] * columns + column), total, mask=(o < SIZES[3])[:, None] & (column < columns))
