"""`kindred place` as an operator runs it: traffic files in, placement files out, and what it says to nonsense."""
import array
import collections
import importlib.util
import io
import json
import pickle
import subprocess
import sys
import types
import xml.etree.ElementTree
import zipfile

import pytest

from cluster import ROOT
from test_cli import run

LAYERS, SOURCES, EXPERTS = 2, 2, 8


def traffic():
    """Even experts are used by source 0, odd ones by source 1; linear placement suits neither."""
    return {"A": [[[100 + e if e % 2 == s else 3 for e in range(EXPERTS)] for s in range(SOURCES)]
                  for _ in range(LAYERS)], "source_names": ["code", "chat"]}


@pytest.fixture
def traffic_file(tmp_path):
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps(traffic()))
    return path


def place(*args):
    done = run("place", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*args):
    done = run("place", *args)
    assert done.returncode in (1, 2), done.stdout
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def test_report_and_files(traffic_file, tmp_path):
    out = json.loads(place("--input", traffic_file, "--ranks", 4, "--json", "--explain", 3, "--calibrate",
                           "--output", tmp_path / "placement.json", "--vllm", tmp_path / "vllm.json",
                           "--sglang", tmp_path / "sglang.json", "--plots", tmp_path))
    best = out["results"][0]
    assert best["solver"] == "flow"
    assert best["remote_tokens"] == LAYERS * EXPERTS * 3
    assert best["objective"] < out["before"]["objective"]
    assert 0 <= best["gap"] < 0.2
    assert len(out["explain"]) == 3 and "tokens come from 'c" in out["explain"][0]
    assert out["migration"]["steps"]
    assert 0 <= out["calibration"]["best"]["kept"] <= 1
    assert "of 8" in out["calibration"]["not_simulated"]
    placement = json.loads((tmp_path / "placement.json").read_text())
    assert (placement["layers"], placement["experts"], placement["ranks"]) == (LAYERS, EXPERTS, 4)
    for row in placement["placement"]:
        assert sorted(row) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert all((rank < 2) == (expert % 2 == 0) for expert, rank in enumerate(row))
    slots = json.loads((tmp_path / "vllm.json").read_text())
    assert json.loads((tmp_path / "sglang.json").read_text()) == {"physical_to_logical_map": slots}
    for layer, row in enumerate(slots):
        for slot, expert in enumerate(row):
            assert placement["placement"][layer][expert] == slot // 2
    for name in ("place-load.svg", "place-remote.svg"):
        xml.etree.ElementTree.parse(tmp_path / name)


def test_calibration_is_simulated(tmp_path):
    """Two sources that use different experts, of a size that a profile has."""
    rows = [[[9 if (e % 2 == s) else 1 for e in range(128)] for s in range(2)] for _ in range(2)]
    (tmp_path / "wide.json").write_text(json.dumps({"A": rows, "ranks": 4}))
    out = json.loads(place("--input", tmp_path / "wide.json", "--calibrate", "--json"))
    simulated = out["calibration"]["simulated"]
    for run_of in (simulated["best"], simulated["uncalibrated"]):
        assert 0 < run_of["tpot_s"] < 1 and 0 < run_of["ttft_s"] < 1
        assert run_of["remote_share"] < 0.3  # half of the copies, were it not for the placement
    unknown = json.loads(place("--input", tmp_path / "wide.json", "--calibrate", "--json", "--profile", "h100-gpt-oss-20b"))
    assert "32 experts" in unknown["calibration"]["not_simulated"]


def test_placed_already_stays(traffic_file, tmp_path):
    place("--input", traffic_file, "--ranks", 4, "--output", tmp_path / "placement.json")
    again = json.loads(place("--input", traffic_file, "--ranks", 4, "--placement", tmp_path / "placement.json", "--json"))
    assert again["results"][0]["moves"] == 0
    assert again["migration"]["pays"] is False


def test_all_solvers_and_csv(tmp_path):
    rows = ["layer,source,expert,tokens"]
    for layer, sources in enumerate(traffic()["A"]):
        for source, experts in enumerate(sources):
            rows += [f"{layer},{source},{expert},{tokens}" for expert, tokens in enumerate(experts)]
    path = tmp_path / "traffic.csv"
    path.write_text("\n".join(rows) + "\n")
    out = json.loads(place("--input", path, "--ranks", 4, "--compare", "--json"))
    objectives = {row["solver"]: row["objective"] for row in out["results"]}
    assert set(objectives) >= {"flow", "linear", "round-robin", "eplb", "greedy", "moetuner", "sem-moe"}
    assert objectives["flow"] == min(objectives.values())
    assert "as it is" in place("--input", path, "--ranks", 4)
    with_copies = json.loads(place("--input", path, "--ranks", 4, "--redundant", 4, "--json"))
    assert with_copies["slots"] == 3
    assert with_copies["results"][0]["remote_tokens"] < out["results"][0]["remote_tokens"]


def test_vllm_load(tmp_path):
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 0, 1]], "expert_load": [[9, 1, 1, 1, 8, 1]]}))
    out = json.loads(place("--input", path, "--ranks", 2, "--json"))
    assert out["slots"] == 3
    assert out["results"][0]["max_over_mean_load"] < 1.1


def test_sglang_records():
    spec = importlib.util.spec_from_file_location("recorder", ROOT / "integrations/sglang/expert_distribution.py")
    recorder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)
    mapping = [[0, 1, 2, 0]]

    def dump(rank, *counts):
        return {"last_physical_to_logical_map": mapping,
                "records": [{"forward_pass_id": i, "rank": rank, "global_physical_count": [row]}
                            for i, row in enumerate(counts)]}
    got = recorder.traffic_of([dump(1, [0, 5, 0, 1]), dump(0, [1, 2, 3, 4], [1, 0, 0, 0])])
    assert got == {"A": [[[6, 2, 3], [1, 5, 0]]], "source_names": ["rank 0", "rank 1"]}
    assert recorder.traffic_of([{"rank": 0, "logical_count": [[[1, 2], [0, 0]], [[3, 4], [0, 0]]]}]) == {
        "A": [[[4, 6]], [[0, 0]]]}
    with pytest.raises(ValueError, match="different placements"):
        recorder.traffic_of([dump(0, [1, 1, 1, 1]),
                             {"last_physical_to_logical_map": [[2, 1, 0, 0]], "records": []}])


class Tensor:
    """As torch.save pickles one of int32."""

    def __init__(self, rows):
        self.size = (len(rows), len(rows[0]))
        self.storage = Storage(array.array("i", [value for row in rows for value in row]))

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (self.storage, 0, self.size, (self.size[1], 1), False, collections.OrderedDict())


class Storage:
    def __init__(self, values):
        self.values = values


def save(path, value):
    """The zip that torch.save (1.6 and later) writes; `torch` is a stand-in with the two names that are in it."""
    storages, out = [], io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing):
            if not isinstance(thing, Storage):
                return None
            storages.append(thing)
            return "storage", sys.modules["torch"].IntStorage, str(len(storages) - 1), "cuda:0", len(thing.values)

    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    exec("class IntStorage: pass", torch.__dict__)  # each belongs to its module
    exec("def _rebuild_tensor_v2(*_): pass", utils.__dict__)
    torch.IntStorage.__module__, utils._rebuild_tensor_v2.__module__ = "torch", "torch._utils"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)
        Pickler(out, protocol=2).dump(value)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", out.getvalue())
        archive.writestr("archive/byteorder", "little")
        for i, storage in enumerate(storages):
            archive.writestr(f"archive/data/{i}", storage.values.tobytes())
        archive.writestr("archive/version", "3\n")


def convert(*args):
    return subprocess.run([sys.executable, ROOT / "integrations/sglang/expert_distribution.py", *args], capture_output=True, text=True, check=False)


def test_sglang_from_dump_to_init_expert_location(tmp_path):
    """The recorder's files of two ranks, of which each uses its own half of the experts; layer 0 has none."""
    mapping = [[0, 1, 2, 3, 4, 5, 6, 7]] * 3
    for rank in range(2):
        of_own = [100 if expert % 2 == rank else 1 for expert in range(8)]
        records = [{"forward_pass_id": i, "rank": rank, "gatherer_key": "primary", "global_physical_count": Tensor([[0] * 8, of_own, of_own])}
                   for i in range(2)]
        save(tmp_path / f"expert_distribution_recorder_1.5_{rank}.pt", {"records": records, "last_physical_to_logical_map": Tensor(mapping)})
    dumps = sorted(tmp_path.glob("*.pt"))
    done = convert(*dumps, "-o", tmp_path / "traffic.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "traffic.json").read_text())["A"][1] == [[200, 2] * 4, [2, 200] * 4]
    place("--input", tmp_path / "traffic.json", "--ranks", 4, "--sglang", tmp_path / "location.json")
    location = json.loads((tmp_path / "location.json").read_text())
    assert list(location) == ["physical_to_logical_map"] and len(location["physical_to_logical_map"]) == 3
    for row in location["physical_to_logical_map"]:
        assert sorted(row) == list(range(8))
    for row in location["physical_to_logical_map"][1:]:  # the first four slots are those of source 0's ranks
        assert {expert % 2 for expert in row[:4]} == {0} and {expert % 2 for expert in row[4:]} == {1}


def test_sglang_dumps_that_are_none(tmp_path):
    path, good = tmp_path / "dump.pt", {"rank": 0, "logical_count": Tensor([[1, 2]])}
    save(path, good)
    data = path.read_bytes()
    for bad, expected in ((b"", "not a zip"), (data[:200], "not a zip"), (b"{}", "not a zip")):
        path.write_bytes(bad)
        done = convert(path, "-o", tmp_path / "out.json")
        assert done.returncode == 1 and expected in done.stderr and "Traceback" not in done.stderr, done.stderr
    save(path, {"records": print})  # code, as any other global
    assert "accepted: tensors of whole numbers" in convert(path, "-o", tmp_path / "out.json").stderr
    save(path, {"neither": 1})
    assert "neither 'records' nor 'logical_count'" in convert(path, "-o", tmp_path / "out.json").stderr


def test_nonsense(traffic_file, tmp_path):
    assert "--input" in refused("--ranks", 4)
    assert "--ranks is missing" in refused("--input", traffic_file)
    assert "at most one rank per expert" in refused("--input", traffic_file, "--ranks", 16)
    assert "redundant slots that do: 1" in refused("--input", traffic_file, "--ranks", 3)
    assert "annealing" in refused("--input", traffic_file, "--ranks", 4, "--solver", "annealing")
    assert "under it" in refused("--input", traffic_file, "--ranks", 8, "--load-cap", 1)
    assert "traffic.jsn" in refused("--input", tmp_path / "traffic.jsn", "--ranks", 4)
    bad = tmp_path / "bad.json"
    for text, expected in (("{}", "accepted"), ('{"A": [[[1, -1]]]}', "expert 1"), ('{"A": [[[0, 0]]]}', "no tokens"),
                           ('{"A": [[[1e300, 1e300]]]}', "2^53"), ('{"A": [[[1, 2], [3]]]}', "equal lengths")):
        bad.write_text(text)
        assert expected in refused("--input", bad, "--ranks", 2)
    placement = {"layers": LAYERS, "experts": EXPERTS, "ranks": 4, "placement": [[0, 0, 1, 1, 2, 2, 3, 3]] * LAYERS}
    for entry, expected in ((0, "holds 3 experts"), (7, "accepted: a rank below 4"), ([], "accepted: a rank below 4")):
        placement["placement"] = [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, entry, 1, 2, 2, 3, 3]]
        bad.write_text(json.dumps(placement))
        assert expected in refused("--input", traffic_file, "--ranks", 4, "--placement", bad)
