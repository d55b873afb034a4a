"""Second implementation of statistics, sketch and digest, written from docs/numerics.md alone; writes the golden vectors.

    python tests/stats/golden.py > tests/golden/stats.json

Plain Python integers and math.fsum: sums and sketches are correctly rounded, the rest is exact. It shares nothing with
the C++ code. The committed file is part of the specification; a change in it is a change of the format's version.
"""

from __future__ import annotations

import json
import math
import struct

M32 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15
SEED = 0x6173736179303031


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def mix32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & M32
    x = (x ^ (x >> 15)) * 0x846CA68B & M32
    return x ^ (x >> 16)


def salts(request: int, high: int) -> tuple[int, int]:
    z = mix64((request + (high + 1) * GOLDEN) & M64)
    return z & M32, z >> 32


def group_hash(group: int, salt: int) -> int:
    h = ((group ^ salt) & M32) * 0x9E3779B1 & M32
    return (h ^ (h >> 15)) * 0x85EBCA77 & M32


KEYS = [mix64((n + 1) * GOLDEN & M64) >> 32 for n in range(16)]


def make_table() -> tuple[list[list[int]], list[int]]:
    bucket = [[0] * 8 for _ in range(256)]
    minus = [0] * 256
    n = 0

    def draw() -> int:
        nonlocal n
        n += 1
        return mix64((SEED + n * GOLDEN) & M64)

    for octet in range(0, 256, 8):
        signs = draw()
        octet_flip = draw() & M32
        for quad in (octet, octet + 4):
            quad_flip = draw() & M32
            for pair in (quad, quad + 2):
                pair_flip = draw() & M32
                for slot in (pair, pair + 1):
                    residue = list(range(8))
                    bits = draw()
                    for k in range(7, 0, -1):
                        pick = (bits & 0xFF) * (k + 1) >> 8
                        bits >>= 8
                        residue[k], residue[pick] = residue[pick], residue[k]
                    for lane in range(8):
                        h = residue[lane]
                        h |= ((pair_flip >> h & 1) ^ (slot & 1)) << 3
                        h |= ((quad_flip >> h & 1) ^ (slot >> 1 & 1)) << 4
                        h |= ((octet_flip >> h & 1) ^ (slot >> 2 & 1)) << 5
                        bucket[slot][lane] = h
                    minus[slot] = signs >> 8 * (slot - octet) & 0xFF
    return bucket, minus


BUCKET, MINUS = make_table()

# bits, exponent bits, mantissa bits, bias, kind
FLOATS = {
    "f64": (64, 11, 52, 1023, "ieee"), "f32": (32, 8, 23, 127, "ieee"), "f16": (16, 5, 10, 15, "ieee"),
    "bf16": (16, 8, 7, 127, "ieee"), "f8_e5m2": (8, 5, 2, 15, "ieee"), "f8_e4m3fn": (8, 4, 3, 7, "fn"),
    "f8_e4m3fnuz": (8, 4, 3, 8, "fnuz"), "f8_e5m2fnuz": (8, 5, 2, 16, "fnuz"), "f4_e2m1": (4, 2, 1, 1, "finite"),
}
INTEGERS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u64": 64, "u32": 32, "u16": 16, "u8": 8}


def bits_of(dtype: str) -> int:
    return FLOATS[dtype][0] if dtype in FLOATS else INTEGERS.get(dtype, 8)


def decode(bits: int, dtype: str) -> tuple[float, bool]:
    """Value, and whether it is subnormal."""
    if dtype == "bool":
        return float(bits != 0), False
    if dtype == "f8_e8m0":
        return (math.nan if bits == 255 else 2.0 ** (bits - 127)), False
    if dtype in INTEGERS:
        width = INTEGERS[dtype]
        return float(bits - (1 << width) if dtype[0] == "i" and bits >> (width - 1) else bits), False
    width, e_bits, m_bits, bias, kind = FLOATS[dtype]
    sign = -1.0 if bits >> (width - 1) else 1.0
    e = bits >> m_bits & ((1 << e_bits) - 1)
    m = bits & ((1 << m_bits) - 1)
    if kind == "ieee" and e == (1 << e_bits) - 1:
        return (sign * math.inf if m == 0 else math.nan), False
    if kind == "fn" and e == (1 << e_bits) - 1 and m == (1 << m_bits) - 1:
        return math.nan, False
    if kind == "fnuz" and bits == 1 << (width - 1):
        return math.nan, False
    if e == 0:
        return sign * math.ldexp(m, 1 - bias - m_bits), m != 0
    return sign * math.ldexp((1 << m_bits) + m, e - bias - m_bits), False


def digest(elements: list[tuple[int, int]], dtype: str, request: int) -> int:
    """elements: (logical index, bits)."""
    width = bits_of(dtype)
    groups: dict[int, tuple[list[int], set[int]]] = {}
    for index, bits in elements:
        words, present = groups.setdefault(index >> 3, ([0] * 16, set()))
        at = (index & 7) * width
        for k in range(max(1, width // 32)):
            words[at // 32 + k] |= (bits >> 32 * k & M32) << at % 32
            present.add(at // 32 + k)
    total = 0
    for number, (words, present) in groups.items():
        g = group_hash(number & M32, salts(request, number >> 32)[1])
        for pair in {w // 2 for w in present}:
            even = words[2 * pair] + g + KEYS[2 * pair] & M32
            odd = words[2 * pair + 1] + g + KEYS[2 * pair + 1] & M32
            total += even * odd
    return total & M64


def place(index: int, request: int) -> tuple[int, int]:
    """Bucket, and sign."""
    number, lane = index >> 3, index & 7
    salt_block, salt_group = salts(request, number >> 32)
    group = number & M32
    slot = (group & 0xFF) ^ (mix32(group >> 8 ^ salt_block) & 0xFF)
    minus = (group_hash(group, salt_group) >> 31) ^ (MINUS[slot] >> lane & 1)
    return BUCKET[slot][lane], -1 if minus else 1


def histogram(rows: list[list[float]]) -> tuple[int, list[list[int]]]:
    cols = len(rows[0]) if rows else 0
    per_row = (cols + 7) // 8
    groups = per_row * len(rows)
    shift = 0
    while groups >> shift > 64:
        shift += 1
    counts: dict[int, int] = {}
    samples = 0
    k = 0
    while k << shift < groups:
        group = (k << shift) + (mix64(k + 1) & ((1 << shift) - 1))
        k += 1
        if group >= groups:
            break
        row, q = divmod(group, per_row)
        for x in rows[row][8 * q:8 * q + 8]:
            samples += 1
            if x != 0 and math.isfinite(x):
                exponent = math.frexp(x)[1] - 1
                counts[exponent] = counts.get(exponent, 0) + 1
    return samples, [[e, counts[e]] for e in sorted(counts)]


def measure(case: dict, patterns: list[int]) -> list[dict]:
    shape, dtype = case["shape"], case["dtype"]
    row_axis = case["row_axis"] if case["row_axis"] >= 0 else (0 if len(shape) >= 2 else -1)
    n_rows = shape[row_axis] if row_axis >= 0 else 1
    cols = math.prod(s for a, s in enumerate(shape) if a != row_axis)
    head_axis = case["head_axis"]
    inner = math.prod(s for a, s in enumerate(shape) if a != row_axis and a > head_axis) if head_axis >= 0 else 1
    full = case["full_cols"] or cols
    pitch = (full + 7) // 8 * 8
    # rows[r] = list of (bits, row-major number)
    rows: list[list[tuple[int, int]]] = [[] for _ in range(n_rows)]
    for number, bits in enumerate(patterns):
        rest, row = number, 0
        for a in reversed(range(len(shape))):
            rest, i = divmod(rest, shape[a])
            if a == row_axis:
                row = i
        rows[row].append((bits, number))
    if case["row_axis"] < 0:
        spans = [dict(request=0, first_row=0, n=n_rows, t=case["row_offset"], position=0, n_rows=0, padding=False)]
    else:
        spans = []
        for run in case["runs"]:
            done = 0
            while done < run["n_rows"]:
                position = run["first_position"] + done
                n = min(run["n_rows"] - done, (position // case["segment_rows"] + 1) * case["segment_rows"] - position)
                spans.append(dict(request=run["request"], first_row=run["first_row"] + done, n=n, t=position,
                                  position=position, n_rows=n, padding=run["padding"]))
                done += n
    segments = []
    for span in spans:
        counts = dict(count=0, nan=0, pos_inf=0, neg_inf=0, zero=0, subnormal=0)
        finite: list[tuple[float, int]] = []
        buckets: list[list[float]] = [[] for _ in range(64)]
        all_elements: list[tuple[int, int]] = []
        row_cells, heads = [], {}
        for r in range(span["n"]):
            row = rows[span["first_row"] + r]
            row_values: list[float] = []
            row_buckets: list[list[float]] = [[] for _ in range(4)]
            row_elements, row_bad = [], 0
            for c, (bits, number) in enumerate(row):
                column = case["col_offset"] + c
                index = ((span["t"] + r) * pitch + column) & M64
                all_elements.append((index, bits))
                row_elements.append((column, bits))
                x, subnormal = decode(bits, dtype)
                head = heads.setdefault(c // inner % shape[head_axis], ([], [[] for _ in range(16)], [0])) \
                    if head_axis >= 0 else ([], [[] for _ in range(16)], [0])
                counts["count"] += 1
                if not math.isfinite(x):
                    counts["nan" if math.isnan(x) else "pos_inf" if x > 0 else "neg_inf"] += 1
                    row_bad += 1
                    head[2][0] += 1
                    continue
                counts["zero"] += x == 0
                counts["subnormal"] += subnormal
                finite.append((x, number))
                bucket, sign = place(index, span["request"])
                buckets[bucket].append(sign * x)
                row_values.append(x)
                row_buckets[bucket & 3].append(sign * x)
                head[0].append(x)
                head[1][bucket & 15].append(sign * x)
            row_cells.append(dict(sum_sq=math.fsum(x * x for x in row_values),
                                  sketch=[math.fsum(b) for b in row_buckets],
                                  digest=str(digest(row_elements, dtype, 0)), nonfinite=row_bad))
        samples, bins = histogram([[decode(b, dtype)[0] for b, _ in rows[span["first_row"] + r]]
                                   for r in range(span["n"])])
        largest = max((abs(x) for x, _ in finite), default=None)
        end = case["col_offset"] + cols
        segments.append(dict(
            request=str(span["request"]), first_position=span["position"], n_rows=span["n_rows"],
            first_row=span["first_row"] if case["row_axis"] >= 0 else 0, padding=span["padding"], **counts,
            min=min((x for x, _ in finite), default=None), max=max((x for x, _ in finite), default=None),
            abs_max=largest,
            abs_max_index=min((n for x, n in finite if abs(x) == largest), default=0),
            sum=math.fsum(x for x, _ in finite), sum_abs=math.fsum(abs(x) for x, _ in finite),
            sum_sq=math.fsum(x * x for x, _ in finite),
            digest=str(digest(all_elements, dtype, span["request"])),
            digest_split=bool(counts["count"] and (case["col_offset"] % 8 or (end % 8 and end != full))),
            histogram_samples=samples, histogram=bins, sketch=[math.fsum(b) for b in buckets],
            rows=row_cells if case["row_axis"] >= 0 else [],
            heads=[dict(sum_sq=math.fsum(x * x for x in heads[h][0]), sketch=[math.fsum(b) for b in heads[h][1]],
                        nonfinite=heads[h][2][0]) for h in sorted(heads)] if head_axis >= 0 else []))
    return segments


def make_patterns(dtype: str, n: int, seed: int, modest: bool) -> list[int]:
    state, out = seed, []
    for _ in range(n):
        state = state * 6364136223846793005 + 1442695040888963407 & M64
        bits = mix64(state)
        if not modest or dtype not in ("f64", "f32", "bf16"):
            out.append(bits & ((1 << bits_of(dtype)) - 1))
            continue
        x = (bits >> 40) / 2**22 - 2.0
        if dtype == "f64":
            out.append(struct.unpack("<Q", struct.pack("<d", x))[0])
        else:
            f32 = struct.unpack("<I", struct.pack("<f", x))[0]
            out.append(f32 if dtype == "f32" else f32 >> 16)
    return out


def to_hex(patterns: list[int], dtype: str) -> str:
    width = bits_of(dtype)
    if width == 4:
        padded = patterns + [0] * (len(patterns) % 2)
        return bytes(padded[k] | padded[k + 1] << 4 for k in range(0, len(padded), 2)).hex()
    return b"".join(p.to_bytes(width // 8, "little") for p in patterns).hex()


def main() -> None:
    base = dict(row_axis=-1, head_axis=-1, full_cols=0, col_offset=0, row_offset=0, segment_rows=64, runs=[])

    def run(request: int, first_row: int, n_rows: int, first_position: int, padding: bool = False) -> dict:
        return dict(request=request, first_row=first_row, n_rows=n_rows, first_position=first_position,
                    padding=padding)

    key = 0x0123456789ABCDEF
    cases = []
    for dtype in [*FLOATS, "f8_e8m0", *INTEGERS, "bool"]:
        cases.append(dict(base, name=f"every kind of value, {dtype}", dtype=dtype, shape=[37], modest=dtype == "f64"))
    cases += [
        dict(base, name="rank 0", dtype="f32", shape=[], modest=True),
        dict(base, name="empty", dtype="f32", shape=[0], modest=True),
        dict(base, name="weight with a row offset", dtype="bf16", shape=[5, 40], row_offset=1000, modest=True),
        dict(base, name="tokens and heads", dtype="f32", shape=[6, 3, 16], row_axis=0, head_axis=1, modest=True,
             runs=[run(key, 0, 4, 62), run(5, 4, 2, 0, True)]),
        dict(base, name="shard of a row", dtype="bf16", shape=[4, 2, 24], row_axis=0, head_axis=1, modest=True,
             full_cols=192, col_offset=96, runs=[run(key, 0, 4, 64)]),
        dict(base, name="cut groups", dtype="f32", shape=[3, 5, 6], row_axis=0, head_axis=1, modest=True,
             full_cols=70, col_offset=11, runs=[run(M64, 0, 3, 7)]),
        dict(base, name="heads before rows", dtype="f16", shape=[2, 5, 24], row_axis=1, head_axis=0, modest=False,
             runs=[run(1, 1, 4, 3)]),
        dict(base, name="beyond 32 bits of groups", dtype="f32", shape=[3, 40], row_axis=0, modest=True,
             full_cols=1 << 34, col_offset=1 << 33, runs=[run(key, 0, 3, 9)]),
        dict(base, name="many blocks", dtype="f32", shape=[2, 2600], row_axis=0, modest=True,
             runs=[run(key, 0, 2, 128)]),
    ]
    out = []
    for number, case in enumerate(cases):
        n = math.prod(case["shape"])
        patterns = make_patterns(case["dtype"], n, 1000 + number, case.pop("modest"))
        segments = measure(case, patterns)
        case["runs"] = [dict(r, request=str(r["request"])) for r in case["runs"]]
        out.append(dict(case, data=to_hex(patterns, case["dtype"]), segments=segments))
    print(json.dumps(dict(schema="assay.golden.stats/1", cases=out), separators=(",", ":")))


if __name__ == "__main__":
    main()
