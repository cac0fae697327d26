"""Tests of the reader, which need neither PyTorch nor a GPU: python3 -m unittest discover -s tests"""
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from semmoe_shuffle import tables  # noqa: E402  (the path is set above)

PLACEMENT = {"ep_size": 2, "num_experts": 4, "slots_per_rank": 2, "layers": [{"layer": 1, "slots": [3, 0, 1, 2]}]}


def encode(tensors, metadata):
    """A safetensors file of tensors {name: (dtype, shape, bytes)}."""
    header, end = {"__metadata__": metadata}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values())


def digest(content):
    return hashlib.sha256(content).hexdigest()


class PlanFiles(unittest.TestCase):
    """A plan directory of two ranks, one MoE layer and three token ids."""

    def new_folder(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def setUp(self):
        self.new_folder()
        self.tensors = {
            "token_score": ("U16", [1, 3, 2], struct.pack("<6H", 40000, 25535, 65535, 0, 33000, 32535)),
            "transition_confidence": ("U16", [1, 2, 2], struct.pack("<4H", 50000, 1, 2, 3)),
            "token_rank": ("U8", [1, 3, 2], bytes([1, 0, 0, 1, 1, 0])),
            "transition_rank": ("U8", [1, 2, 2], bytes([0, 1, 1, 0])),
        }
        self.placement = json.dumps(PLACEMENT).encode()
        self.metadata = {"format": "semmoe-plan/1", "layout": digest(self.placement), "ep_size": "2", "score_scale": "65535"}

    def write(self):
        """Writes the directory, and returns the environment that names it."""
        content = encode(self.tensors, self.metadata)
        manifest = json.dumps({"files": {"placement.json": digest(self.placement), "tables.safetensors": digest(content)}}).encode()
        for name, data in (("tables.safetensors", content), ("placement.json", self.placement), ("manifest.json", manifest)):
            with open(os.path.join(self.folder, name), "wb") as file:
                file.write(data)
        return {"SEMMOE_TABLES": os.path.join(self.folder, "tables.safetensors"), "SEMMOE_PLACEMENT": os.path.join(self.folder, "placement.json"),
                "SEMMOE_PLAN_DIGEST": digest(manifest)}

    def load(self):
        environment = self.write()
        return tables.load(environment["SEMMOE_TABLES"], environment["SEMMOE_PLACEMENT"], environment["SEMMOE_PLAN_DIGEST"])

    def refused(self, part):
        with self.assertRaises(tables.Refused) as caught:
            self.load()
        self.assertIn(part, str(caught.exception))

    def test_reads_a_plan(self):
        plan = self.load()
        self.assertEqual((plan.ranks, plan.experts, plan.layers, plan.vocabulary, plan.best), (2, 4, [1], 3, 2))
        self.assertEqual(plan.rank_of, [[[0], [1], [1], [0]]])
        self.assertEqual(bytes(plan.token_rank.raw), bytes([1, 0, 0, 1, 1, 0]))
        self.assertEqual(struct.unpack("<H", plan.token_score.raw[:2]), (40000,))
        self.assertEqual(plan.transition_rank.shape, (1, 2, 2))

    def test_copies_of_experts(self):
        self.placement = json.dumps({**PLACEMENT, "slots_per_rank": 3, "layers": [{"layer": 1, "slots": [3, 0, 1, 1, 2, 3]}]}).encode()
        self.metadata["layout"] = digest(self.placement)
        self.assertEqual(self.load().rank_of, [[[0], [0, 1], [1], [0, 1]]])

    def test_a_plan_without_transitions(self):
        del self.tensors["transition_rank"], self.tensors["transition_confidence"]
        self.assertIsNone(self.load().transition_rank)

    def test_look_back(self):
        self.assertEqual((self.load().look_back, self.load().look_back_factor), (0, None))
        self.metadata["look_back_layers"] = "2"
        self.tensors["forecast.lookback.factor"] = ("F32", [1, 4, 2], struct.pack("<8f", *range(1, 9)))
        plan = self.load()
        self.assertEqual((plan.look_back, struct.unpack("<8f", plan.look_back_factor.raw)[7]), (2, 8))
        for depth in ("0", "5", "02", "three"):
            with self.subTest(depth):
                self.metadata["look_back_layers"] = depth
                self.refused(f"look_back_layers is '{depth}'; allowed is 1 to 4 for 2 ranks")
        self.metadata["look_back_layers"] = "3"
        self.refused("forecast.lookback.factor")
        del self.metadata["look_back_layers"]
        self.refused("look_back_layers is None")

    def test_look_back_depth(self):
        """As the solver's LookBackDepth."""
        for ranks, most in ((1, 4), (4, 4), (9, 4), (10, 3), (16, 3), (17, 2), (40, 2), (41, 1), (256, 1)):
            self.assertEqual(tables.look_back({"look_back_layers": str(most)}, ranks, "a file"), most)
            with self.assertRaises(tables.Refused):
                tables.look_back({"look_back_layers": str(most + 1)}, ranks, "a file")

    def test_refuses_other_metadata(self):
        for key, value in (("format", "semmoe-plan/2"), ("ep_size", "4"), ("score_scale", "255"), ("layout", "0" * 64)):
            with self.subTest(key):
                old = self.metadata[key]
                self.metadata[key] = value
                self.refused(value if key == "layout" else key)
                self.metadata[key] = old

    def test_refuses_other_tensors(self):
        for name, tensor in (("token_rank", ("U16", [1, 3, 2], bytes(12))), ("token_score", ("U16", [1, 2, 3], bytes(12))),
                             ("transition_rank", ("U8", [1, 4], bytes(4)))):
            with self.subTest(name):
                old = self.tensors[name]
                self.tensors[name] = tensor
                self.refused(name)
                self.tensors[name] = old
        del self.tensors["token_score"]
        self.refused("token_score")

    def test_refuses_a_placement_of_other_experts(self):
        self.placement = json.dumps({**PLACEMENT, "layers": [{"layer": 1, "slots": [0, 1, 2, 4]}]}).encode()
        self.metadata["layout"] = digest(self.placement)
        self.refused("slot 3 holds expert 4")

    def test_refuses_files_of_another_plan(self):
        environment = self.write()
        with self.assertRaises(tables.Refused):
            tables.load(environment["SEMMOE_TABLES"], environment["SEMMOE_PLACEMENT"], "0" * 64)
        with open(environment["SEMMOE_TABLES"], "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        with self.assertRaises(tables.Refused) as caught:
            tables.load(environment["SEMMOE_TABLES"], environment["SEMMOE_PLACEMENT"], environment["SEMMOE_PLAN_DIGEST"])
        self.assertIn("tables.safetensors has the digest", str(caught.exception))

    def test_refuses_damaged_headers(self):
        whole = encode(self.tensors, self.metadata)
        length, = struct.unpack_from("<Q", whole)
        for name, content in (("no length", whole[:5]), ("a long header", struct.pack("<Q", 1 << 40) + whole[8:]), ("no JSON", whole[:8] + b"[" * length + whole[8 + length:]),
                              ("a list", struct.pack("<Q", 2) + b"[]"), ("a part", whole[:-1]), ("a rest", whole + b"x")):
            with self.subTest(name), self.assertRaises(tables.Refused):
                tables.parse(content, "a file")
        with self.assertRaises(tables.Refused):
            tables.parse(encode({"x": ("F16", [1], b"ab")}, {}), "a file")

    def test_environment(self):
        environment = self.write()
        self.assertEqual(tables.from_environment(environment).ranks, 2)
        self.assertIsNone(tables.from_environment({}))

    def serves_without(self, environment, part):
        """from_environment returns None after exactly one warning."""
        with self.assertLogs(tables.log) as logged:
            self.assertIsNone(tables.from_environment(environment))
        self.assertEqual([record.levelname for record in logged.records], ["WARNING"])
        self.assertIn(part, logged.output[0])

    def test_new_tables_for_the_placement(self):
        environment = self.write()
        watcher = tables.Watcher(environment)
        first = watcher.plan.digest
        self.assertEqual((first, watcher.refused, watcher.poll()), (environment["SEMMOE_PLAN_DIGEST"], "", False))
        self.tensors["token_score"] = ("U16", [1, 3, 2], struct.pack("<6H", 1, 2, 3, 4, 5, 6))
        with self.assertLogs(tables.log) as logged:  # of another plan
            self.replace(None)
            self.assertFalse(watcher.poll() or watcher.poll())
        self.assertEqual((len(logged.output), watcher.plan.digest, watcher.refused), (1, first, "OtherPlan"))
        self.replace(first)
        self.assertTrue(watcher.poll())
        self.assertNotEqual(watcher.plan.digest, first)
        self.assertEqual((watcher.refused, bytes(watcher.plan.token_score.raw)[:2]), ("", b"\x01\x00"))

    def replace(self, layout):
        """Replaces the directory by one with the present tensors, for the layout of a plan."""
        path, self.folder = self.folder, tempfile.mkdtemp()
        self.write()
        manifest = os.path.join(self.folder, "manifest.json")
        with open(manifest) as file:
            content = json.load(file)
        with open(manifest, "w") as file:
            json.dump({**content, "layout": layout}, file)
        shutil.rmtree(path)
        os.rename(self.folder, path)
        self.folder = path

    def test_environment_with_damaged_files(self):
        def absent(path):
            os.unlink(path)

        def pipe(path):
            os.unlink(path)
            os.mkfifo(path)

        def folder(path):
            os.unlink(path)
            os.mkdir(path)

        def content(text):
            def write(path):
                with open(path, "wb") as file:
                    file.write(text)
            return write

        for name, damage, part in (
                ("absent", absent, "is missing"), ("pipe", pipe, "is not a regular file"), ("folder", folder, "is not a regular file"),
                ("empty", content(b""), "is empty"), ("no text", content(b"\xff\xfe\x00"), ""), ("a list", content(b"[]"), ""), ("null", content(b"null"), ""),
                ("deep", content(b"[" * 200_000), ""), ("pointer", content(b"version https://git-lfs.github.com/spec/v1\n"), "")):
            for variable, checked in (("SEMMOE_TABLES", False), ("SEMMOE_PLACEMENT", False), ("SEMMOE_TABLES", True), ("SEMMOE_PLACEMENT", True)):
                with self.subTest(name, file=variable, checked=checked):
                    self.new_folder()
                    environment = self.write()
                    if not checked:
                        del environment["SEMMOE_PLAN_DIGEST"]
                    damage(environment[variable])
                    self.serves_without(environment, part)
            with self.subTest(name, file="manifest.json"):
                self.new_folder()
                environment = self.write()
                damage(os.path.join(os.path.dirname(environment["SEMMOE_TABLES"]), "manifest.json"))
                self.serves_without(environment, part)

    def test_environment_with_a_damaged_placement(self):
        for name, placement in (
                ("a list", []), ("a number", 1), ("null", None), ("no layers", {**PLACEMENT, "layers": None}), ("layers of numbers", {**PLACEMENT, "layers": [1]}),
                ("slots of text", {**PLACEMENT, "layers": [{"layer": 1, "slots": ["0"]}]}), ("experts of text", {**PLACEMENT, "num_experts": "4"}),
                ("many experts", {**PLACEMENT, "num_experts": 10 ** 12}), ("no slots on a rank", {**PLACEMENT, "slots_per_rank": 0}),
                ("ranks of text", {**PLACEMENT, "ep_size": "2"}), ("ranks of a list", {**PLACEMENT, "ep_size": [2]})):
            with self.subTest(name):
                self.placement = json.dumps(placement).encode()
                self.metadata["layout"] = digest(self.placement)
                self.serves_without({key: value for key, value in self.write().items() if key != "SEMMOE_PLAN_DIGEST"}, "tokens are not shuffled")

    def test_environment_of_another_plan(self):
        environment = self.write()
        self.serves_without({**environment, "SEMMOE_PLAN_DIGEST": "0" * 64}, "has the digest")
        self.metadata["layout"] = 7
        self.serves_without(self.write(), "tokens are not shuffled")
        if os.geteuid() != 0:  # root reads any directory
            os.chmod(self.folder, 0)
            self.addCleanup(os.chmod, self.folder, 0o700)
            self.serves_without(environment, "Permission denied")


if __name__ == "__main__":
    unittest.main()
