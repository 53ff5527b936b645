"""`auto` uses a tier that machines share: it is met, measured, and loaded from where that pays."""

import time
import uuid

from kvweave.kv.tiers.config import RedisTierConfig
from worlds.auto import QUESTION, TEXTS, World, ask, load_links, model, probed, world
from worlds.weaves import ingest_with_fronts

__all__ = ["model", "world"]  # fixtures


def test_a_default_question_is_fused_from_a_shared_server(world: World, redis_url: str) -> None:
    world.tier = RedisTierConfig(redis_url, prefix=f"{uuid.uuid4().hex}:")
    world.calibrate(("reuse", 0.0, 0.0))
    world.set_machine()
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        assert weave.library.store.flush()
    with world.open() as weave:  # knows nothing of the server's speed yet
        link = probed(weave, "redis/int8")["redis/int8"]
        assert time.time() - link.seen_s < 600
        plan = weave.plan(QUESTION)
        tiers = {span.tier for span in plan.spans if span.tier}
        assert tiers == {"redis"}
        assert plan.chosen.load_bytes > 0
        answer = ask(weave)
        assert answer.explain is not None
        assert answer.explain.counts["reused"] > 0
        assert answer.explain.loaded_bytes.keys() == {"redis"}
        assert {c.tier for c in answer.explain.chunks if c.why is None} <= {"redis", None}
        assert load_links(weave)["redis/int8"].seen_s >= link.seen_s
