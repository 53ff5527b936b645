"""How much of full causal attention does a share of its rows cost on a GPU?

Random rows of one sequence (32 query heads, 8 KV heads of 128, bfloat16 unless told otherwise)
against cuDNN's full causal attention in the same run; beside it what PyTorch offers for the same
rows: SDPA with a mask, FlexAttention. Contiguous keys and keys in shuffled pages. Every answer is
checked against float64 on some rows before it is timed.

    python bench/gpu/attention.py --out bench/results/gpu_attention-h200.json
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.results import finish, result_header
from kvweave.kernels.attention import attend
from kvweave.kernels.paged_attention import attend_paged
from kvweave.kernels.types import PagedSegment, Segment

SHARES = (5, 15, 30, 50, 100)


def main() -> None:
    args = parse_args()
    import triton  # comes with PyTorch for CUDA; options can be asked for without it

    torch.manual_seed(args.seed)
    results: dict[str, Any] = {}
    for tokens in args.tokens:
        case = Case(args, tokens)
        full = timed(case.full, args.repeats)
        results[f"full_cudnn_{tokens // 1024}k_ms"] = round(full, 4)
        print(f"\n{tokens} tokens: cuDNN, all rows, causal: {full:.3f} ms")
        print(f"{'rows':>6}{'ours':>9}{'÷':>7}{'paged':>9}{'+%':>6}{'mask':>9}{'flex':>9}")
        for share in SHARES:
            row = case.measure(share, full)
            results[f"rows_{share}_{tokens // 1024}k"] = row
            print(
                f"{share:>5}%{row['ms']:>9.3f}{row['speedup']:>7.2f}{row['paged_ms']:>9.3f}"
                f"{row['paged_over_pct']:>6.1f}{row['sdpa_mask_ms'] or 0:>9.3f}"
                f"{row['flex_ms'] or 0:>9.3f}",
                flush=True,
            )
            if share == 15:
                results[f"speedup_15_{tokens // 1024}k"] = row["speedup"]
                results[f"paged_over_15_{tokens // 1024}k_pct"] = row["paged_over_pct"]
    results["decode"] = [measure_decode(args, *shape) for shape in ((1, 32768), (16, 8192))]
    for row in results["decode"]:
        print(row)
    config = {k: v for k, v in vars(args).items() if k != "out"}
    header = {**result_header("gpu_attention", "cuda"), "triton": triton.__version__}
    finish(__doc__, {**header, "config": config, **results}, args.out)


class Case:
    """One prompt length."""

    def __init__(self, args: argparse.Namespace, tokens: int) -> None:
        self.args, self.tokens = args, tokens
        self.k, self.v = random_heads(args, 2, tokens, args.kv_heads)
        self.q = random_heads(args, 1, tokens, args.heads)[0]
        count = -(-tokens // args.page)
        self.table = torch.randperm(count).tolist()
        pages = (count, args.page, args.kv_heads, args.head_dim)
        self.k_pages, self.v_pages = self.k.new_empty(2, *pages)
        at = torch.arange(tokens, device="cuda")
        number = torch.tensor(self.table, device="cuda")[at // args.page]
        self.k_pages[number, at % args.page] = self.k
        self.v_pages[number, at % args.page] = self.v

    def full(self) -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return sdpa(self.q, self.k, self.v, is_causal=True)

    def measure(self, share: int, full_ms: float) -> dict[str, Any]:
        num = self.tokens * share // 100
        rows = torch.randperm(self.tokens)[:num].sort().values
        rows[-1] = self.tokens - 1
        q, on_device = self.q[rows.cuda()], rows.cuda()
        ours = [Segment(0, num, self.k, self.v)]
        paged = [PagedSegment(0, num, self.table)]
        runs: dict[str, Callable[[], Tensor]] = {
            "ms": lambda: attend(q, rows, ours),
            "paged_ms": lambda: attend_paged(q, rows, paged, self.k_pages, self.v_pages),
        }
        if not self.args.brief and share < 100:
            runs["sdpa_mask_ms"] = self.masked(q, on_device)
            if share == 15:  # it compiles for seconds
                runs["flex_ms"] = self.flex(q, on_device)
        found: dict[str, Any] = {"rows": num, "sdpa_mask_ms": None, "flex_ms": None}
        for name, run in runs.items():
            try:
                self.check(run(), q, rows)
                found[name] = round(timed(run, self.args.repeats), 4)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                if name in ("ms", "paged_ms"):
                    raise
                found[f"{name[:-3]}_failed"] = str(error).splitlines()[0][:120]
        found["speedup"] = round(full_ms / found["ms"], 3)
        found["paged_over_pct"] = round(100 * (found["paged_ms"] / found["ms"] - 1), 2)
        found["tflops"] = round(
            4e-9 * float((rows + 1).sum()) * self.args.heads * self.args.head_dim / found["ms"], 1
        )
        return found

    def masked(self, q: Tensor, rows: Tensor) -> Callable[[], Tensor]:
        """SDPA with a boolean mask, built outside the timing; cuDNN takes it."""
        mask = torch.arange(self.tokens, device="cuda")[None, :] <= rows[:, None]

        def run() -> Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return sdpa(q, self.k, self.v, mask)

        return run

    def flex(self, q: Tensor, rows: Tensor) -> Callable[[], Tensor]:
        """FlexAttention; its block mask is built outside the timing."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention)
        block_mask = None

        def run() -> Tensor:
            nonlocal block_mask
            if block_mask is None:
                block_mask = create_block_mask(
                    lambda b, h, i, j: j <= rows[i], None, None, len(rows), self.tokens, "cuda"
                )
            heads = (x.transpose(0, 1)[None] for x in (q, self.k, self.v))
            found = compiled(*heads, block_mask=block_mask, enable_gqa=True)
            return found[0].transpose(0, 1)

        return run

    def check(self, found: Tensor, q: Tensor, rows: Tensor) -> None:
        """Some rows against float64; a wrong answer is not worth timing."""
        group = self.args.heads // self.args.kv_heads
        for i in torch.linspace(0, len(rows) - 1, 5).long().tolist():
            seen = int(rows[i]) + 1
            k, v = (x[:seen].double().repeat_interleave(group, 1) for x in (self.k, self.v))
            scores = torch.einsum("hd,nhd->hn", q[i].double(), k) / self.args.head_dim**0.5
            exact = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
            off = float((found[i].double() - exact).norm() / exact.norm())
            assert off < 1e-2, f"row {i} is off by {off:.2g}"


def measure_decode(args: argparse.Namespace, batch: int, tokens: int) -> dict[str, Any]:
    """One new token per sequence over pages: bytes per second."""
    from kvweave.kernels.gpu.decode import DecodeTables, attend_decode

    count = batch * -(-tokens // args.page)
    pages = (count, args.page, args.kv_heads, args.head_dim)
    k, v = torch.randn(2, *pages, device="cuda", dtype=getattr(torch, args.dtype))
    order = torch.randperm(count).view(batch, -1).tolist()
    tables = DecodeTables(
        batch,
        len(order[0]),
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        dtype=k.dtype,
        device=k.device,
    )
    tables.update([tokens] * batch, order)
    q = random_heads(args, 1, batch, args.heads)[0]
    ms = timed(lambda: attend_decode(q, tables, k, v), args.repeats)
    read = 2 * batch * tokens * args.kv_heads * args.head_dim * k.element_size()
    return {"batch": batch, "tokens": tokens, "ms": round(ms, 4), "tb_s": round(read / ms / 1e9, 2)}


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = F.scaled_dot_product_attention(*heads, mask, is_causal=is_causal, enable_gqa=True)
    return o[0].transpose(0, 1)


def random_heads(args: argparse.Namespace, count: int, tokens: int, heads: int) -> Tensor:
    shape = (count, tokens, heads, args.head_dim)
    return torch.randn(shape, device="cuda").to(getattr(torch, args.dtype))


def timed(run: Callable[[], object], repeats: int, inner: int = 4) -> float:
    """Milliseconds on the device, median of `repeats`.

    The device sleeps while launches pile up, so that the host's part stays outside.
    """
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=64, help="tokens of a page")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--brief", action="store_true", help="leave out SDPA masks and Flex")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
