"""Decode steps played from CUDA graphs: the logits and the answers of steps that are not.

Needs bare PyTorch with Triton, transformers and a CUDA device: `pytest -m gpu tests/gpu`. Without a
device the kernels run in Triton's interpreter (TRITON_INTERPRET=1), and nothing is recorded.
"""

import random
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.request import EngineRequest
from kvweave.engine.runner import Runner
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.recorded_decode import RecordedDecode, open_recorded
from kvweave.model.rows import Rows
from worlds.engine import ids, plain, tokens, with_chunks
from worlds.recordings import without_graphs
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
WIDE = {  # heads that the large models have
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
LONG = {"max_position_embeddings": 4096}
CFG = EngineConfig(
    page_tokens=16, pool_tokens=16 * 512, max_running=12, step_rows=48, alone_rows=128,
    share_chunks=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def recordable(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    if not ON_GPU:
        without_graphs(monkeypatch)


def make_decoder(
    root: Path, variant: str = "llama", dtype: str = "float32", **shape: int
) -> Decoder:
    folder = make_model_folder(root, variant, **shape)
    return load_decoder(folder, device=DEVICE, dtype=dtype)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return make_decoder(tmp_path_factory.mktemp("graphs"), **LONG)


class Sequences:
    """Sequences in shuffled pages of a pool that is NaN wherever nobody wrote."""

    def __init__(self, decoder: Decoder, page_tokens: int, lengths: Sequence[int]) -> None:
        self.decoder = decoder
        self.pool = KVPool(decoder.spec, 400, page_tokens, decoder.dtype, decoder.device)
        self.pool.keys.fill_(torch.nan)
        self.pool.values.fill_(torch.nan)
        self.free = random.Random(3).sample(range(400), 400)
        self.ids: list[list[int]] = []
        self.kvs: list[PagedKV] = []
        for length in lengths:
            self.join(length)

    def join(self, length: int) -> None:
        """One more sequence, its prompt computed the plain way."""
        prompt = random.Random(len(self.ids)).choices(range(97), k=length)
        kv = PagedKV(self.pool)
        self._grow(kv, length)
        rows = Rows(prompt, range(length), kv, [length - 1])
        prompt.append(int(self.decoder.forward([rows])[0].argmax()))
        self.ids.append(prompt)
        self.kvs.append(kv)

    def step(self, who: Sequence[int]) -> list[Rows]:
        """Their next rows."""
        for i in who:
            self._grow(self.kvs[i], len(self.ids[i]))
        return [
            Rows(self.ids[i][-1:], range(len(self.ids[i]) - 1, len(self.ids[i])), self.kvs[i], [0])
            for i in who
        ]

    def _grow(self, kv: PagedKV, num_tokens: int) -> None:
        while kv.capacity < num_tokens:
            kv.append([self.free.pop()])

    def unowned(self) -> torch.Tensor:
        return torch.tensor(sorted(self.free), device=self.pool.keys.device)


def poison() -> None:
    """Leave NaN wherever memory is free: a recording must not have lent any of it."""
    if ON_GPU:
        held = [
            torch.full((n,), torch.nan, device=DEVICE) for n in (1 << 8, 1 << 14, 1 << 20, 1 << 24)
        ]
        del held


def play_and_compare(
    sequences: Sequences, steps: int, most: int, near: float
) -> tuple[RecordedDecode, float]:
    """Some of the sequences decode, others at every step; logits of both ways must agree."""
    recorded = RecordedDecode(sequences.decoder, sequences.pool, 64)
    rng, worst, same, all_rows = random.Random(5), 0.0, 0, 0
    for step in range(steps):
        if step == steps // 2:
            sequences.join(
                70
            )  # a plain prefill in between, of memory that recordings know nothing of
        num = min(rng.choice([1, 2, 3, 5, most]), len(sequences.ids))
        who = rng.sample(range(len(sequences.ids)), num)
        batch = sequences.step(who)
        played = recorded.play(batch)
        got = None if played is None else (played.logits.clone(), played.likeliest.tolist())
        poison()
        wanted = sequences.decoder.forward(batch)
        if got is not None:
            assert bool(got[0].isfinite().all()), f"step {step}: {got[0].isnan().sum()} NaN"
            off = float((got[0] - wanted).norm() / wanted.norm())
            worst = max(worst, off)
            assert off < near, f"step {step}, rows {who}: logits are off by {off:.2g}"
            assert got[1] == got[0].argmax(-1).tolist()
            same += sum(a == b for a, b in zip(got[1], wanted.argmax(-1).tolist(), strict=True))
            all_rows += num
        for i, token in zip(who, wanted.argmax(-1).tolist(), strict=True):
            sequences.ids[i].append(token)
    lengths = [len(each) for each in sequences.ids]
    print(f"\nplayed {recorded.num_played} of {steps} steps, sizes {recorded.sizes}; {lengths}")
    print(f"logits off by {worst:.2g} at most, {same} of {all_rows} greedy tokens the same")
    assert recorded.num_played > steps // 2
    free = sequences.unowned()
    for part in (sequences.pool.keys, sequences.pool.values):
        assert bool(part[:, free].isnan().all()), "a page that nobody owns was written"
    return recorded, same / all_rows


@pytest.mark.parametrize("page_tokens", [4, 16, 64])
def test_played_steps_have_the_logits_of_plain_ones(decoder: Decoder, page_tokens: int) -> None:
    steps = 120 if ON_GPU else 25
    sequences = Sequences(decoder, page_tokens, [1, 15, 16, 100, 250, 64, 7])
    _, same = play_and_compare(sequences, steps, 7, 1e-4)
    assert same == 1.0
    scratch = sequences.pool.keys[:, sequences.pool.scratch_page]
    assert bool(scratch[:, 0].isfinite().all()), "padding has its own place"


@pytest.mark.parametrize("variant", ["llama-biases", "llama-yarn", "llama-mha", "qwen3"])
def test_families_are_recorded_as_they_are_computed(tmp_path: Path, variant: str) -> None:
    decoder = make_decoder(tmp_path, variant)
    _, same = play_and_compare(Sequences(decoder, 16, [1, 33, 60]), 24, 4, 1e-4)
    assert same == 1.0


@pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_long_sequences_in_each_precision(tmp_path: Path, dtype: str) -> None:
    decoder = make_decoder(tmp_path, dtype=dtype, **WIDE)
    near = {"bfloat16": 0.1, "float16": 0.02, "float32": 1e-4}[dtype]
    sequences = Sequences(decoder, 64, [3000, 1, 900, 64, 63, 65, 2000, 500, 128])
    _, same = play_and_compare(sequences, 90, 9, near)
    assert same > (0.9 if dtype == "bfloat16" else 0.98)


@pytest.mark.skipif(not ON_GPU, reason="graphs are CUDA's")
def test_sizes_share_memory_and_results_are_read_before_the_next_step(decoder: Decoder) -> None:
    sequences = Sequences(decoder, 16, [20] * 40)
    recorded = RecordedDecode(decoder, sequences.pool, 64)
    for count in (40, 1, 24, 2, 16, 4, 8, 32):
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            batch = sequences.step(range(count))
            played = recorded.play(batch)
            got = None if played is None else played.logits.clone()
            wanted = sequences.decoder.forward(batch)
            if got is not None:
                torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
        grown = (torch.cuda.memory_reserved() - before) / 2**20
        print(f"\n{count} rows: {grown:.1f} MiB more reserved", end="")
    assert recorded.sizes == [1, 2, 4, 8, 16, 24, 32, 40]
    made = [each for each in recorded._recordings.values() if each is not None]
    pools = {each.graph.memory_pool for each in made}
    assert len(pools) == 1, f"recordings in {len(pools)} pools of memory"


def answers(
    decoder: Decoder, cfg: EngineConfig, requests: Sequence[EngineRequest]
) -> tuple[list[list[int]], dict[str, float], RecordedDecode | None]:
    """All of them at once, half of them joining while the others decode."""
    pool = make_pool(cfg, decoder)
    opens = open_recorded if ON_GPU else RecordedDecode
    recorded = opens(decoder, pool, cfg.recorded_rows) if cfg.recorded_rows else None
    with Engine(decoder, cfg, pool=pool, runner=Runner(decoder, recorded)) as engine:
        first = [engine.submit(request) for request in requests[::2]]
        head = [next(iter(ticket)).token_id for ticket in first[:2]]
        late = [engine.submit(request) for request in requests[1::2]]
        found = [tokens(ticket) for ticket in first], [tokens(ticket) for ticket in late]
        for i, token in enumerate(head):
            found[0][i].insert(0, token)
        engine.run_alone(engine.check_integrity)
        stats = engine.stats()
        both = [each for pair in zip_longest(*found) for each in pair if each is not None]
        return both, stats, recorded


@pytest.mark.parametrize("pool_pages", [512, 14])
def test_the_engine_gives_the_same_greedy_answers_with_and_without_recordings(
    decoder: Decoder, pool_pages: int
) -> None:
    """Sequences grow over pages, leave, join, share a prefix; few pages: they are preempted."""
    rng = random.Random(1)
    preamble, chunk = ids(rng, 9), ids(rng, 21)
    most = 60 if ON_GPU else 12
    requests = [
        with_chunks(preamble, [chunk], ids(rng, 3), max_tokens=rng.randint(most // 2, most))
        if i % 3 == 0
        else plain(ids(rng, rng.randint(1, 60)), max_tokens=rng.randint(most // 2, most))
        for i in range(14)
    ]
    cfg = replace(CFG, pool_tokens=16 * pool_pages)
    wanted, _, none = answers(decoder, replace(cfg, recorded_rows=0), requests)
    got, stats, recorded = answers(decoder, cfg, requests)
    assert none is None
    assert recorded is not None
    print(f"\nplayed {recorded.num_played} steps, sizes {recorded.sizes}; {stats}")
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        at = next((j for j, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        assert mine == theirs, f"answer {i} of {len(theirs)} tokens differs first at {at}"
    assert recorded.num_played > (20 if ON_GPU else 4)
    if ON_GPU:
        assert (stats["preemptions"] > 0) == (pool_pages == 14)


@pytest.mark.skipif(not ON_GPU, reason="graphs are CUDA's")
def test_steps_are_recorded_while_other_threads_lock_and_copy_memory(decoder: Decoder) -> None:
    """As loading chunk KV does, on a stream of its own."""
    stop, errors = threading.Event(), []

    def copies() -> None:
        try:
            stream, size = torch.cuda.Stream(), 1
            while not stop.is_set():
                size = size % 64 + 1
                host = torch.ones(size << 14, pin_memory=True)
                with torch.cuda.stream(stream):
                    there = host.to(DEVICE, non_blocking=True)
                stream.synchronize()
                assert int(there.sum()) == size << 14
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=copies)
    thread.start()
    try:
        sequences = Sequences(decoder, 16, [5, 40, 17, 200, 3])
        recorded, same = play_and_compare(sequences, 40, 5, 1e-4)
    finally:
        stop.set()
        thread.join()
    assert not errors, errors[0]
    assert recorded.sizes
    assert same == 1.0


@pytest.mark.skipif(not ON_GPU, reason="a CPU waits for nobody")
def test_prefill_and_decode_steps_wait_for_the_device_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers: the tokens come to the host together, and nothing else does."""
    waits: list[tuple[int, list[str]]] = []  # rows of each step, and what waited
    run = Runner.run

    def counting(*given: object, **named: object) -> object:
        slices = given[1]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                ran = run(*given, **named)  # type: ignore[arg-type]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        told = [str(each.message) for each in seen]
        rows = max(each.num_rows for each in slices)  # type: ignore[attr-defined]
        waits.append((rows, [each for each in told if "synchronizing CUDA operation" in each]))
        return ran

    rng = random.Random(2)
    requests = [plain(ids(rng, n), max_tokens=12) for n in (90, 5, 40, 1)]
    answers(decoder, CFG, requests)  # what is made on first use is made
    monkeypatch.setattr(Runner, "run", counting)
    _, _, recorded = answers(decoder, CFG, requests)
    assert recorded is not None
    print(f"\n(rows, waits) of each step: {[(rows, len(told)) for rows, told in waits]}")
    assert any(rows > 1 for rows, _ in waits)
    assert recorded.num_played > 5
    for rows, told in waits:
        assert len(told) <= 1, f"a step of {rows} rows waited {len(told)} times: {told}"
