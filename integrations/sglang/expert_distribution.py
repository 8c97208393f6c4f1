#!/usr/bin/env python3
"""SGLang's recorded expert distribution as traffic for `kindred place`.

    python3 expert_distribution.py /tmp/expert_distribution_recorder_*.pt -o traffic.json

Record with `--expert-distribution-recorder-mode per_pass` (or per_token): POST /start_expert_distribution_record,
traffic, then /stop_expert_distribution_record and /dump_expert_distribution_record. Each rank writes a file of its
own, of what *it* routed, so ranks become sources. Mode `stat` writes one file, summed over ranks: there is then one
source only, and only load can be balanced.

What the files hold (sglang/srt/eplb/expert_distribution.py), read by torch.load:
  per_pass, per_token: {"records": [{"forward_pass_id", "rank", "global_physical_count" [L, P], ...}, ...],
                        "last_physical_to_logical_map" [L, P]}
  stat:                {"rank", "logical_count" [buffered steps, L, E], ...}

Layers that have no experts are rows of zeros, and stay, so that layer numbers remain SGLang's.
"""

import argparse
import json
import sys


def as_lists(array):
    """Nested lists of a torch tensor, a numpy array, or what is lists already."""
    return array.tolist() if hasattr(array, "tolist") else array


def add_into(total, counts):
    for total_row, row in zip(total, counts, strict=True):
        for i, count in enumerate(row):
            total_row[i] += count


def zeros(layers, experts):
    return [[0] * experts for _ in range(layers)]


def logical_counts(physical, physical_to_logical, experts):
    """[L][P] counts of slots to [L][E] counts of experts."""
    counts = zeros(len(physical), experts)
    for layer, (row, experts_of) in enumerate(zip(physical, physical_to_logical, strict=True)):
        for count, expert in zip(row, experts_of, strict=True):
            counts[layer][expert] += count
    return counts


def traffic_of(dumps):
    """`dumps`: what torch.load gave for each file. Returns the object that `kindred place --input` reads."""
    if any("logical_count" in dump for dump in dumps):
        if len(dumps) != 1:
            raise ValueError("mode stat: one file at a time, as each is a sum over all ranks")
        steps = as_lists(dumps[0]["logical_count"])
        total = zeros(len(steps[0]), len(steps[0][0]))
        for step in steps:
            add_into(total, step)
        return {"A": [[row] for row in total]}
    by_rank = {}
    first_map, experts = None, 0
    for dump in dumps:
        if "records" not in dump:
            raise ValueError(f"neither 'records' nor 'logical_count' among {sorted(dump)}")
        mapping = as_lists(dump["last_physical_to_logical_map"])
        if first_map is not None and mapping != first_map:
            raise ValueError("the files were recorded with different placements of experts")
        first_map = mapping
        experts = max(max(row) for row in mapping) + 1
        for record in dump["records"]:
            counts = logical_counts(as_lists(record["global_physical_count"]), mapping, experts)
            add_into(by_rank.setdefault(record["rank"], zeros(len(mapping), experts)), counts)
    if not by_rank:
        raise ValueError("no records")
    ranks = sorted(by_rank)
    return {
        "A": [[by_rank[rank][layer] for rank in ranks] for layer in range(len(first_map))],
        "source_names": [f"rank {rank}" for rank in ranks],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="*.pt of SGLang's recorder")
    parser.add_argument("-o", "--output", required=True, help="JSON file to write")
    arguments = parser.parse_args()
    import torch  # only here: what is above works without

    dumps = [torch.load(path, weights_only=True, map_location="cpu") for path in arguments.files]
    try:
        traffic = traffic_of(dumps)
    except (KeyError, ValueError, TypeError) as error:
        sys.exit(f"expert_distribution.py: {error}")
    with open(arguments.output, "w", encoding="utf-8") as out:
        json.dump(traffic, out)


if __name__ == "__main__":
    main()
