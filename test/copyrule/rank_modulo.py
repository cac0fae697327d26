"""Counts the local activations of a plan with redundant experts under the copy rule of vllm-ascend.

This reimplements one rule of vllm-ascend as a reference for the Go implementation (solver/placement/copyrule.go).
Source: generate_log2phy_map in vllm_ascend/eplb/core/eplb_utils.py, v0.20.2rc1, v0.22.1rc1, v0.23.0 and v0.25.1rc1, without tensor
parallelism: the copies of an expert are numbered in the order of the devices in the map, and device d uses copy d mod n of n.

Usage: rank_modulo.py PLAN_DIR COUNTS.json

COUNTS.json holds the number of activations by MoE layer, rank of the token, and expert. The program prints one JSON object:
hosted counts activations on a rank with a copy of their expert. Of these, the rule sends elsewhere to another rank, and keeps local on
their rank. total counts all activations.
"""

import json
import pathlib
import sys


def devices_of_experts(layer):
    """Returns the devices with a copy of each expert, in the order of the engine."""
    found = {}
    for device in sorted(layer["device_list"], key=lambda d: d["device_id"]):
        for expert in dict.fromkeys(device["device_expert"]):
            found.setdefault(expert, []).append(device["device_id"])
    return found


def used_device(devices, asking):
    """Returns the device whose copy the asking device uses."""
    return devices[asking % len(devices)]


def count(plan, counts):
    """Sums the activations of all layers."""
    sums = dict.fromkeys(["total", "hosted", "local", "elsewhere"], 0)
    for layer, ranks in zip(plan["layer_list"], counts, strict=True):
        devices = devices_of_experts(layer)
        for rank, experts in enumerate(ranks):
            for expert, n in enumerate(experts):
                sums["total"] += n
                if rank not in devices[expert]:
                    continue
                sums["hosted"] += n
                sums["local" if used_device(devices[expert], rank) == rank else "elsewhere"] += n
    return sums


if __name__ == "__main__":
    plan_text = (pathlib.Path(sys.argv[1]) / "engine" / "vllm-ascend.json").read_text()
    counts_text = pathlib.Path(sys.argv[2]).read_text()
    print(json.dumps(count(json.loads(plan_text), json.loads(counts_text))))
