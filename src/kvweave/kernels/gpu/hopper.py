"""Sparse-row attention for Hopper (H100, H200), written in Gluon.

One program answers for a tile: some rows of one sequence times the G query heads that share a KV
head, so keys and values are read once for all of them. Three teams work at the same time:

    producer (1 warp)      keys and values, block by block, through the bulk copy engine
    two consumers (4 warps each, half of the tile): S = Q Kᵀ of block j runs on the matrix unit
        beside O += P V of block j - 1, and the softmax of one consumer beside both of the other's

A block of keys is fetched in boxes. The box in which the tile's keys end is fetched from further
left, so that it ends there too: nothing behind a row's keys is ever read, not even to be masked.

Needs float16 or bfloat16, head dims of 64 or 128, and 16-byte strides; `rows.py` does the rest.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvweave.kernels.gpu.quick import quick
from kvweave.kernels.gpu.row_plan import RowPlan
from kvweave.kernels.gpu.tiles import LOG2_E

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
BLOCK_M = 128  # rows times heads of a tile; each consumer has half
BLOCK_N = 128  # keys of a block
STAGES = 2
CHUNK = 64  # channels of a box: 128 bytes, what the copy engine swizzles
HIDDEN = gl.constexpr(float("-inf"))


@gluon.jit
def _where(key, hi, seq, pages_ptr, pages_stride, num_pages, BOX: gl.constexpr, PAGE: gl.constexpr):
    """Page and row of the box that starts at `key`. What lies outside is filled with zeros."""
    shift = gl.minimum(gl.maximum(key + BOX - hi, 0), BOX)  # BOX: nothing of it is there
    if PAGE > 0:
        page = gl.load(pages_ptr + seq * pages_stride + key // PAGE, mask=key < hi, other=0)
        row = key % PAGE - shift
    else:
        page = 0
        row = key - shift
    return gl.where(shift < BOX, page, num_pages), row


@gluon.jit
def _fetch(
    desc, smem, full, pages, rows, head,
    D: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, CH: gl.constexpr,
):  # fmt: skip
    """One block of keys or values, box by box."""
    boxes: gl.constexpr = BN // BOX
    view = smem._reinterpret(
        desc.dtype, [D // CH * boxes, 1, BOX, CH],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3),
    )  # fmt: skip
    mbarrier.expect(full, BN * D * 2)
    for box in gl.static_range(boxes):
        for c in gl.static_range(D // CH):
            at = [pages[box], rows[box], head * D + c * CH]
            tma.async_copy_global_to_shared(desc, at, full, view.index(c * boxes + box))


@gluon.jit
def _produce(
    kd, vd, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
    b0, b1, hi, head, seq, pages_ptr, pages_stride, num_pages,
    D: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr, CH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    for b in range(b0, b1):
        pages = ()  # looked up before the wait, which hides it; the same for keys and values
        rows = ()
        for box in gl.static_range(BN // BOX):
            page, row = _where(
                b * BN + box * BOX, hi, seq, pages_ptr, pages_stride, num_pages, BOX, PAGE
            )
            pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
        j = b - b0
        stage = j % STAGES
        phase = ((j // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), phase)
        _fetch(kd, k_smem.index(stage), k_full.index(stage), pages, rows, head, D, BN, BOX, CH)
        mbarrier.wait(v_empty.index(stage), phase)
        _fetch(vd, v_smem.index(stage), v_full.index(stage), pages, rows, head, D, BN, BOX, CH)


@gluon.jit
def _hide(s, first_key, hi, limit, BN: gl.constexpr, BOX: gl.constexpr, mma: gl.constexpr):
    """Scores of keys that a row does not see, or that lie in the shifted box a second time."""
    key = first_key + gl.arange(0, BN, gl.SliceLayout(0, mma))
    tail = (hi - 1) // BOX * BOX  # first key of the last box
    shifted = key - gl.where(key >= tail, tail + BOX - hi, 0)
    shifted = gl.where((key >= tail) & (shifted < tail), hi, shifted)  # of no box
    shifted = gl.where(key >= tail + BOX, hi, shifted)
    return gl.where(shifted[None, :] < limit[:, None], s, HIDDEN)


@gluon.jit
def _softmax(s, m, total, scale, MASKED: gl.constexpr):
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    base = m_new
    if MASKED:  # a row that has seen nothing yet keeps a sum of nothing
        base = gl.where(m_new == HIDDEN, 0.0, m_new)
    alpha = gl.exp2(m - base)
    p = gl.exp2(s * scale - base[:, None])
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _step(
    b, b0, o, m, total, p, limit, hi, scale, q_smem, k_smem, v_smem,
    k_full, v_full, k_empty, v_empty,
    BN: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    mma: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    j = b - b0
    ks = j % STAGES
    mbarrier.wait(k_full.index(ks), (j // STAGES) & 1)
    zero = gl.zeros([64, BN], gl.float32, mma)
    s = warpgroup_mma(q_smem, k_smem.index(ks).permute([1, 0]), zero, use_acc=False, is_async=True)
    vs = (j - 1) % STAGES
    mbarrier.wait(v_full.index(vs), ((j - 1) // STAGES) & 1)
    o = warpgroup_mma(p, v_smem.index(vs), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(ks))
    if MASKED:
        s = _hide(s, b * BN, hi, limit, BN, BOX, mma)
    p32, m, total, alpha = _softmax(s, m, total, scale, MASKED)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_empty.index(vs))
    o = o * alpha[:, None]
    p = gl.convert_layout(p32.to(q_smem.dtype), p_layout)
    return o, m, total, p


@gluon.jit
def _consume(
    q_ptr, out_ptr, part_ptr, lse_ptr, limits_ptr, q_smem, k_smem, v_smem,
    k_full, v_full, k_empty, v_empty,
    row0, num_rows, b0, b1, hi, free, slot, head, scale, q_row, q_head, out_row, out_head,
    HALF: gl.constexpr, G: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # one shape for both products, so that a row's numbers stay with their threads
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(0, mma, k_width=2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])

    mine = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
    q_at = (row0 + mine // G).to(gl.int64) * q_row + (head * G + mine % G) * q_head
    d = gl.arange(0, D, gl.SliceLayout(0, wide))
    here = mine // G < num_rows
    q = gl.load(q_ptr + q_at[:, None] + d[None, :], mask=here[:, None], other=0.0)
    q_smem.store(q)
    fence_async_shared()

    at = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, mma))
    limit = gl.load(limits_ptr + row0 + at // G, mask=at // G < num_rows, other=1)

    # the first block stands alone: there is no P V beside it yet
    mbarrier.wait(k_full.index(0), 0)
    zero = gl.zeros([64, BN], gl.float32, mma)
    s = warpgroup_mma(q_smem, k_smem.index(0).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0))
    s = _hide(s, b0 * BN, hi, limit, BN, BOX, mma)
    m = gl.full([64], HIDDEN, gl.float32, gl.SliceLayout(1, mma))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma))
    p32, m, total, _ = _softmax(s, m, total, scale, True)
    p = gl.convert_layout(p32.to(q_smem.dtype), p_layout)
    o = gl.zeros([64, D], gl.float32, mma)

    edge = gl.minimum(gl.maximum(free, b0 + 1), b1)
    for b in range(b0 + 1, edge):
        o, m, total, p = _step(
            b, b0, o, m, total, p, limit, hi, scale, q_smem, k_smem, v_smem,
            k_full, v_full, k_empty, v_empty, BN, BOX, STAGES, False, mma, p_layout,
        )  # fmt: skip
    for b in range(edge, b1):
        o, m, total, p = _step(
            b, b0, o, m, total, p, limit, hi, scale, q_smem, k_smem, v_smem,
            k_full, v_full, k_empty, v_empty, BN, BOX, STAGES, True, mma, p_layout,
        )  # fmt: skip
    last = b1 - b0 - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    o = warpgroup_mma(p, v_smem.index(last % STAGES), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])

    o = o / gl.where(total == 0.0, 1.0, total)[:, None]
    if slot < 0:
        o16 = gl.convert_layout(o.to(q_smem.dtype), wide)
        out_at = (row0 + mine // G).to(gl.int64) * out_row + (head * G + mine % G) * out_head
        gl.store(out_ptr + out_at[:, None] + d[None, :], o16, mask=here[:, None])
    else:
        base = (slot.to(gl.int64) * HK + head) * 128 + HALF * 64
        rows = gl.arange(0, 64, gl.SliceLayout(1, mma))
        cols = gl.arange(0, D, gl.SliceLayout(0, mma))
        gl.store(part_ptr + (base + rows)[:, None] * D + cols[None, :], o)
        gl.store(lse_ptr + base + at - HALF * 64, m + gl.log2(total))


@quick
@gluon.jit(do_not_specialize=["pages_stride", "num_pages"])
def _attend(
    kd, vd, q_ptr, out_ptr, part_ptr, lse_ptr, limits_ptr, items_ptr, pages_ptr,
    pages_stride, num_pages, scale, q_row, q_head, out_row, out_head,
    G: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr,
    PAGE: gl.constexpr, CH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(0) % HK
    item = items_ptr + gl.program_id(0) // HK * 8
    row0 = gl.load(item)
    num_rows = gl.load(item + 1)
    b0 = gl.load(item + 2)
    b1 = gl.load(item + 3)
    hi = gl.load(item + 4)
    free = gl.load(item + 5)
    seq = gl.load(item + 6)
    slot = gl.load(item + 7)

    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_smem = gl.allocate_shared_memory(kd.dtype, [2, 64, D], tile)
    k_smem = gl.allocate_shared_memory(kd.dtype, [STAGES, BN, D], tile)
    v_smem = gl.allocate_shared_memory(kd.dtype, [STAGES, BN, D], tile)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_consume, (
                q_ptr, out_ptr, part_ptr, lse_ptr, limits_ptr, q_smem.index(0), k_smem, v_smem,
                k_full, v_full, k_empty, v_empty, row0, num_rows, b0, b1, hi, free, slot, head,
                scale, q_row, q_head, out_row, out_head, 0, G, HK, D, BN, BOX, STAGES,
            )),
            (_consume, (
                q_ptr, out_ptr, part_ptr, lse_ptr, limits_ptr, q_smem.index(1), k_smem, v_smem,
                k_full, v_full, k_empty, v_empty, row0, num_rows, b0, b1, hi, free, slot, head,
                scale, q_row, q_head, out_row, out_head, 1, G, HK, D, BN, BOX, STAGES,
            )),
            (_produce, (
                kd, vd, k_smem, v_smem, k_full, v_full, k_empty, v_empty, b0, b1, hi, head, seq,
                pages_ptr, pages_stride, num_pages, D, BN, BOX, PAGE, CH, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def launch(
    q: Tensor,
    out: Tensor,
    parts: tuple[Tensor, Tensor],
    plan: RowPlan,
    keys: Tensor,
    values: Tensor,
    pages: Tensor | None,
    scale: float,
) -> None:
    """Fill `out` (and `parts`, where tiles are cut) by `plan`. keys [N, Hk, D], or with `pages`
    [sequences, n] int32 [P, page, Hk, D]."""
    kv_heads, head_dim = keys.shape[-2:]
    page = 0 if pages is None else keys.shape[1]
    box = min(page, BLOCK_N) if page else BLOCK_N
    descriptors = []
    for x in (keys, values):
        rows, stride = (x.shape[1], x.stride(1)) if page else (x.shape[0], x.stride(0))
        shape = [x.shape[0] if page else 1, rows, kv_heads * head_dim]
        strides = [x.stride(0) if page else rows * stride, stride, 1]
        descriptors.append(TensorDescriptor(x, shape, strides, [1, box, CHUNK], LAYOUT))
    _attend[(len(plan.items) * kv_heads,)](
        *descriptors, q, out, *parts, plan.limits, plan.items,
        plan.items if pages is None else pages, 0 if pages is None else pages.stride(0),
        keys.shape[0] if page else 1, scale * LOG2_E,
        *q.stride()[:2], *out.stride()[:2],
        G=q.shape[1] // kv_heads, HK=kv_heads, D=head_dim, BN=BLOCK_N, BOX=box, PAGE=page,
        CH=CHUNK, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
