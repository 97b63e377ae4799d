"""The Triton code of `noisy`."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def log_inverse(x):
    """-log(u) of u = (x + 1/2) / 2^32 for 32 random bits: from 2^-33, and never 0, to 33 log 2."""
    u = (x.to(tl.float32) + 0.5) * 2.0**-32
    # Near u = 1 the device's logarithm is off by 2e-7, whatever it should be: of w = 1 - u, which has all its digits, a
    # series. Beyond the seventh power there is 2e-9 of it, and the logarithm is never asked above -0.06.
    w = ((~x).to(tl.float32) + 0.5) * 2.0**-32
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5 + w * (1 / 6 + w * (1 / 7)))))))
    return tl.where(w < 0.0625, series, -tl.log(u))


@triton.jit
def circle(y):
    """cos and sin of 2 pi y / 2^32 for 32 bits y: from the nearest quarter turn q on, by their series within pi / 4."""
    q = (y + 0x20000000) >> 30  # 4 wraps around to 0
    angle = (y - (q << 30)).to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    s = angle * angle
    sin = angle * (1 - s * (1 / 6 - s * (1 / 120 - s * (1 / 5040 - s * (1 / 362880)))))  # to 2e-9
    cos = 1 - s * (1 / 2 - s * (1 / 24 - s * (1 / 720 - s * (1 / 40320))))  # to 3e-8
    odd = (q & 1) != 0
    x, y = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((q + 1) & 2) != 0, -x, x), tl.where((q & 2) != 0, -y, y)


@triton.jit
def normals(x, y):
    """Two standard normals from 64 random bits, by Box and Muller."""
    radius = tl.sqrt(2.0 * log_inverse(x))
    cos, sin = circle(y)
    return radius * cos, radius * sin


@triton.jit
def four_normals(seed, offset, group):
    """(4 Q,) standard normals, four for each of the (Q,) groups: those of one group stand together."""
    zero = (group * 0).to(tl.uint32)
    c = offset.to(tl.uint64)
    a0, a1, a2, a3 = tl.philox(
        seed.to(tl.uint64), group.to(tl.uint32), (group >> 32).to(tl.uint32),
        zero + (c & 0xFFFFFFFF).to(tl.uint32), zero + (c >> 32).to(tl.uint32),
    )  # fmt: skip
    z0, z1 = normals(a0, a1)
    z2, z3 = normals(a2, a3)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


# What changes from call to call is no reason to compile again.
@triton.jit(do_not_specialize=["count", "unit", "deviation", "seed", "offset"])
def noisy_kernel(
    owner, layout, addresses, count, unit, deviation, seed, offset,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out[k] = unit * value[k] + deviation * z for BLOCK numbers k of one tensor.

    owner[program]: which tensor; layout[:, tensor]: how many numbers, the first group of four, the first program;
    addresses[:, tensor]: of value, 0 where there is none, and of out. `count` tensors in all.
    """
    program = tl.program_id(0)
    tensor = tl.load(owner + program)
    n = tl.load(layout + tensor)
    first = tl.load(layout + count + tensor)
    block = program - tl.load(layout + 2 * count + tensor)  # int64
    source = tl.load(addresses + tensor)
    value = source.to(tl.pointer_type(tl.float32))
    out = tl.load(addresses + count + tensor).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        value = tl.multiple_of(value, 16)
        out = tl.multiple_of(out, 16)
    place = block * BLOCK + tl.arange(0, BLOCK)
    # A mask that ends anywhere makes every access one of four bytes: only a tensor's last block has one.
    whole, inside = (block + 1) * BLOCK <= n, place < n
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if source != 0:  # first of all, so that it is on its way while the normals are computed
        if whole:
            total = tl.load(value + place)
        else:
            total = tl.load(value + place, mask=inside, other=0.0)
    group = first + block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    total = unit * total + deviation * four_normals(seed, offset, group)
    if whole:
        tl.store(out + place, total)
    else:
        tl.store(out + place, total, mask=inside)
