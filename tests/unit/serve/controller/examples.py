"""Examples of every answer of the controller, as JSON on the wire."""

from __future__ import annotations

from typing import Any

TENANT: dict[str, Any] = {
    "name": "acme",
    "models": ["m", "shop*"],
    "rpm_limit": 5,
    "max_parallel_requests": None,
    "bytes_per_s": 1500.5,
    "tpm_limit": 6000,
    "weight": 2.0,
    "priority": -1,
    "is_operator": True,
    "is_suspended": False,
    "keys": [
        {"id": "0123456789ab", "made_at": 1.5, "expires_at": None},
        {"id": "ba9876543210", "made_at": 2.5, "expires_at": 9.5},
    ],
    "tokens_per_day": 1_000_000,
    "tokens_per_month": None,
    "suspension": "",
}

WORKER_REPORT: dict[str, Any] = {
    "queued": 1,
    "computing": 2,
    "probing": 0,
    "computing_s": 0.25,
    "waiting_for_next": 0,
    "handed": 0,
    "computed_s": 12.5,
    "counts": {"requests": 7},
    "batch_rows": [1, 2],
    "batch_seconds": [3],
    "upstream": [],
    "gateways": ["gateway/1"],
    "downstream": ["m/1/1"],
    "cpu_s": 4.5,
    "memory_bytes": 1000,
    "gpu_memory_bytes": 0,
    "kv_usage": 0.0,
    "kv_blocks": 0,
    "kv_block_tokens": 0,
    "phase": "",
    "machine_busy": 0.5,
}

GATEWAY_REPORT: dict[str, Any] = {
    "in_flight": 3,
    "load": {"m/0/1": 2},
    "waiting": {"m": 1},
    "pending": {"m": 1},
    "silent": [],
    "connected": ["m/0/1"],
    "counts": {"answered": 9},
    "arrived": {"m": 12},
    "attained": {"m": 8},
    "missed": {"m": 1},
    "refused": {},
    "completions": {},
    "prompt_tokens": {},
    "generated_tokens": {},
    "cpu_s": 1.5,
    "tenants": {"acme": [3, 1, 0, 40]},
    "models": {"m": [2, 40, 0]},
    "oldest_s": {"m": 0.5},
    "streams": [["r-1", 7, "acme", "m", 5, 2, 1.5, "computing", ["m/0/1"], 0, 0]],
    "chains": [[["m/0/1"], 1]],
}


def process(**changes: Any) -> dict[str, Any]:
    shown = {
        "name": "m/0/1",
        "model": "m",
        "version": "1",
        "stage": 0,
        "stage_name": "double",
        "phase": "ready",
        "since_s": 12.5,
        "pid": 123,
        "node": "here",
        "booked_cpus": 0.5,
        "booked_memory_bytes": 2000,
        "gpus": [],
        "crashes": 0,
        "log": "/logs/m-0-1.log",
        "restarts": 0,
    }
    return {**shown, **changes}


STATUS: dict[str, Any] = {
    "app": "under-test",
    "url": "http://127.0.0.1:8000",
    "store": "127.0.0.1:29500",
    "launcher": "local",
    "authentication": "none",
    "trouble": "",
    "operations": [
        {"number": 3, "at": 5.5, "kind": "scale", "text": "m: from 1 to 2", "name": ""}
    ],
    "is_ready": True,
    "controller": 42,
    "wanted": {
        "models": {
            "m": {
                "version": "1",
                "replicas": [1, 2],
                "max_queued_requests": 512,
                "max_ongoing_requests": 32,
                "deadline_s": 30.0,
                "objective_s": None,
                "on_demand": [],
                "generates": False,
                "ttft_s": None,
                "tpot_s": None,
                "start_s": None,
                "has_deadline": True,
                "spares": [],
            }
        },
        "gateways": 1,
        "gateway_options": "0123456789abcdef",
    },
    "active": {"m": "1"},
    "table": 4,
    "unplaced": {"m/1 (1)": "here: 2 cpus short"},
    "failing": [
        {
            "model": "m",
            "version": "1",
            "stage": 1,
            "failures": 2,
            "cause": "exit code 3",
            "next_in_s": 1.5,
        }
    ],
    "processes": [
        process(),
        process(
            name="gateway/1", model="", version="", stage_name="", node="", pid=None
        ),
    ],
    "dtypes": {"m": "float32 (dtype)"},
    "identities": {"m": {"1": "c0ffee"}},
}

WITH_REPORTS: dict[str, Any] = {
    **STATUS,
    "reports": {"m/0/1": WORKER_REPORT, "gateway/1": GATEWAY_REPORT},
}

NODE: dict[str, Any] = {
    "name": "here",
    "cpus": 4.0,
    "memory_bytes": 4000,
    "gpus": [{"index": 0, "kind": "H200", "memory_bytes": 100}],
    "address": "10.0.0.1",
    "key": "here",
    "price": 0.0,
    "bandwidth": None,
    "bfloat16": None,
    "free_cpus": 3.5,
    "free_memory_bytes": 2000,
    "free_gpu_memory_bytes": {"0": 60},
    "replicas": ["m/0/1"],
}

DECISION: dict[str, Any] = {
    "number": 1,
    "at": 5.5,
    "kind": "scaling",
    "about": "m",
    "what": "[1] → [2]",
    "facts": {"rate": 2.5, "scaling_plans": None, "needs": [[1, 2]]},
}

THOUGHT = {"kind": "scaling", "about": "m", "at": 6.5, "what": "enough"}

USAGE: dict[str, Any] = {
    "first_minute": 60,
    "last_minute": 120,
    "tenant": "acme",
    "model": "m",
    "requests": 9,
    "answered": 7,
    "failed": 1,
    "refused": 1,
    "rows": 7,
    "bytes_in": 100,
    "bytes_out": 200,
    "seconds": 3.5,
    "prompt_tokens": 0,
    "generated_tokens": 0,
}

AUDIT: dict[str, Any] = {
    "number": 1,
    "at": 7.5,
    "who": "root (multiworld)",
    "act": "POST /scale",
    "what": {"model": "m", "replicas": 2},
    "outcome": "done",
}

FACTS: dict[str, Any] = {
    "app": "under-test",
    "url": "http://127.0.0.1:8000",
    "at": 1.0,
    "is_ready": True,
    "controller": 1,
    "trouble": "",
    "models": {
        "m": {
            "version": "1",
            "stages": [{"name": "double", "wanted": 1, "replicas": ["m/0/1"]}],
            "requests_s": 2.5,
            "answers": {"p50": 0.012, "p99": 1.5},
            "bottleneck": "stage double computes 97% of the time",
        }
    },
    "replicas": {
        "m/0/1": {
            "model": "m",
            "version": "1",
            "stage": 0,
            "phase": "ready",
            "since_s": 12.0,
            "pid": 5,
            "node": "here",
            "slow": "a step takes 3 ms",
        }
    },
    "gateways": {},
    "tenants": {"acme": {"refused_s": {"rpm_limit": 3.0}}},
    "nodes": {},
    "events": [],
    "thoughts": [],
    "troubles": ["m, stage 1 keeps failing: exit code 3", "m/0/1 is slow: it waits"],
}

STREAMS: dict[str, Any] = {
    f"gateway/1/{n}": {
        "request": f"r-{n}",
        "gateway": "gateway/1",
        "tenant": tenant,
        "model": "m",
        "prompt": prompt,
        "made": made,
        "began_at": -41.5,
        "phase": phase,
        "chain": ["m/0/1"],
        "attempt": attempt,
        "losses": attempt,
        "longest_s": 0.5 * attempt,
    }
    for n, tenant, prompt, made, phase, attempt in (
        (1, "bolt", 1800, 0, "waiting", 0),
        (2, "acme", 5, 7, "computing", 1),
    )
}
