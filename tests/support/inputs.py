"""A small valid workload file and snapshot, for tests that use or spoil them."""

from __future__ import annotations

from typing import Any

WORKLOAD = """name,time,application,num_replicas,batch_size
cifar10-0,10,cifar10,6,2048
ncf-1,20,ncf,1,32768
bert-2,95,bert,6,384
"""

SNAPSHOT: dict[str, Any] = {
    "nodes": {"a": 4, "b": 4},
    "jobs": [
        {
            "key": "one",
            "base": ["a", "a"],
            "perf_params": [0.1, 0.01, 0.5, 0.02, 0.05, 0.005, 1.6],
            "grad_params": [0.001, 0.02],
            "init_batch_size": 128,
            "max_batch_size": 4096,
            "atomic_bsz_range": [32, 256],
            "max_replicas": 8,
            "age": 600,
        },
        {"key": "two", "max_replicas": 1, "age": 30},
    ],
}
