"""Counters and gauges."""

import threading

from kvweave.metrics import Metrics


def test_counters_add_over_labels_and_threads() -> None:
    metrics = Metrics()

    def work() -> None:
        for i in range(1000):
            metrics.count("kv_loads_total", tier="disk" if i % 2 else "host")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics.gauge("kv_tier_bytes", 7, tier="disk")
    assert metrics.value("kv_loads_total") == 4000
    assert metrics.value("kv_loads_total", tier="disk") == 2000
    assert metrics.value("nothing") == 0
    assert [s.name for s in metrics.snapshot()] == ["kv_loads_total"] * 2 + ["kv_tier_bytes"]
