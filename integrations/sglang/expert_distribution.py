#!/usr/bin/env python3
"""SGLang's recorded expert distribution as traffic for `kindred place`.

    python3 expert_distribution.py /tmp/expert_distribution_recorder_*.pt -o traffic.json

Record with `--expert-distribution-recorder-mode per_pass` (or per_token): POST /start_expert_distribution_record,
traffic, then /stop_expert_distribution_record and /dump_expert_distribution_record. Each rank writes a file of its
own, of what *it* routed, so ranks become sources. Mode `stat` writes one file, summed over ranks: there is then one
source only, and only load can be balanced.

Needs no torch: of what torch.save writes (a zip of a pickle and the tensors' bytes) it reads numbers, texts, lists,
dictionaries and tensors of whole numbers, and refuses anything else, so a file cannot run code.

What the files hold (sglang/srt/eplb/expert_distribution.py):
  per_pass, per_token: {"records": [{"forward_pass_id", "rank", "global_physical_count" [L, P], ...}, ...],
                        "last_physical_to_logical_map" [L, P]}
  stat:                {"rank", "logical_count" [buffered steps, L, E], ...}

Layers that have no experts are rows of zeros, and stay, so that layer numbers remain SGLang's.
"""

import argparse
import array
import collections
import json
import pickle
import sys
import zipfile

# torch's storages of whole numbers, by the codes of `array`.
STORAGES = {"CharStorage": "b", "ByteStorage": "B", "ShortStorage": "h", "IntStorage": "i", "LongStorage": "q"}


def nested(values, offset, size, stride):
    """Lists of what a tensor of that size and stride shows of its storage."""
    if not size:
        return values[offset]
    if len(size) == 1 and stride[0] > 0:
        return values[offset : offset + size[0] * stride[0] : stride[0]].tolist()
    return [nested(values, offset + i * stride[0], size[1:], stride[1:]) for i in range(size[0])]


def rebuild_tensor(storage, offset, size, stride, *_):
    numbers = [offset, *size, *stride]
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min(numbers) < 0 or (min(size, default=1) > 0 and last >= len(storage)):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    return nested(storage, offset, tuple(size), tuple(stride))


class DumpReader(pickle.Unpickler):
    """Tensors become nested lists."""

    def __init__(self, archive, folder):
        super().__init__(archive.open(f"{folder}/data.pkl"))
        self._archive, self._folder, self._storages = archive, folder, {}

    def find_class(self, module, name):
        known = {("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor, ("collections", "OrderedDict"): collections.OrderedDict}
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it has a {module}.{name}; accepted: tensors of whole numbers, and plain values")

    def persistent_load(self, pid):
        _, code, key, *_ = pid
        if key not in self._storages:
            values = array.array(code)
            values.frombytes(self._archive.read(f"{self._folder}/data/{key}"))
            self._storages[key] = values
        return self._storages[key]


def load(path):
    """What torch.save wrote to that file."""
    try:
        with zipfile.ZipFile(path) as archive:
            folder = next((name[: -len("/data.pkl")] for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if folder is None:
                raise ValueError(f"{path}: no data.pkl in it: not a file of torch.save")
            order = f"{folder}/byteorder"
            if sys.byteorder != "little" or (order in archive.namelist() and archive.read(order) != b"little"):
                raise ValueError(f"{path}: only little-endian files on little-endian machines are read")
            return DumpReader(archive, folder).load()
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from error



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
    """`dumps`: what load(), or torch.load, gave for each file. Returns the object that `kindred place --input` reads."""
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
    try:
        traffic = traffic_of([load(path) for path in arguments.files])
    except (KeyError, IndexError, OSError, ValueError, TypeError) as error:
        sys.exit(f"expert_distribution.py: {error}")
    with open(arguments.output, "w", encoding="utf-8") as out:
        json.dump(traffic, out)


if __name__ == "__main__":
    main()
