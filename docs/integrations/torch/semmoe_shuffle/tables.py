"""Reads the files of a plan, and refuses what is damaged or of another plan. Plain Python: neither PyTorch nor a GPU is needed.

A plan is a hint. `from_environment` therefore never raises: it logs one warning, and the engine serves without shuffling.
"""
import hashlib
import json
import logging
import mmap
import os
import stat
import struct

FORMAT = "semmoe-plan/1"
SCORE_SCALE = 65535  # a stored score divided by it is a share of activations
LARGEST_HEADER = 100_000_000  # bytes; the bound of safetensors itself
MOST_EXPERTS = 1 << 16  # of a layer
MOST_LOOK_BACK, MOST_FACTORS = 4, 1 << 16  # layers before a layer that a look-back sees, and its factors for one layer, at most
ELEMENT_BYTES = {"U8": 1, "U16": 2, "I32": 4, "F32": 4, "I64": 8}
LOOK_BACK_FACTOR = "forecast.lookback.factor"
log = logging.getLogger(__name__)


class Refused(Exception):
    """A file that is damaged, or not of this plan. The reason is one of metrics.REASONS."""

    def __init__(self, message, reason="Damaged"):
        super().__init__(message)
        self.reason = reason


class Tensor:
    """A tensor of a file: its bytes are a view into the mapped file."""

    def __init__(self, dtype, shape, raw):
        self.dtype, self.shape, self.raw = dtype, tuple(shape), raw


def parse(content, name):
    """The tensors and the metadata of a safetensors file, given its bytes; `name` is what errors call it."""
    if len(content) < 8:
        raise Refused(f"{name} has {len(content)} bytes; a safetensors file has at least 8")
    length, = struct.unpack_from("<Q", content)
    if length > min(LARGEST_HEADER, len(content) - 8):
        raise Refused(f"{name}: the header of {length} bytes is longer than the file or the format allows")
    try:
        header = json.loads(bytes(content[8:8 + length]))
        metadata = header.pop("__metadata__", {})
        entries = {key: (value["dtype"], [int(n) for n in value["shape"]], [int(n) for n in value["data_offsets"]]) for key, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{name}: the header is no safetensors header: {error!r}") from None
    data, tensors, end = memoryview(content)[8 + length:], {}, 0
    for key, (dtype, shape, (first, last)) in sorted(entries.items(), key=lambda entry: entry[1][2]):
        if dtype not in ELEMENT_BYTES:
            raise Refused(f"{name}: tensor {key!r} has type {dtype}; allowed is {', '.join(ELEMENT_BYTES)}")
        size = ELEMENT_BYTES[dtype]
        for n in shape:
            size *= n
        if first != end or last - first != size or min(shape, default=1) < 0 or last > len(data):
            raise Refused(f"{name}: tensor {key!r} of shape {shape} and type {dtype} does not fit the bytes {first} to {last}")
        end = last
        tensors[key] = Tensor(dtype, shape, data[first:last])
    if end != len(data):
        raise Refused(f"{name}: {len(data) - end} bytes follow the last tensor")
    return tensors, metadata


def mapped(path):
    """Maps a regular file that is not empty. A named pipe would block its reader: O_NONBLOCK keeps open from waiting for a writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Refused(f"{path} is not a regular file")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path} is not a regular file")
        if found.st_size == 0:
            raise Refused(f"{path} is empty")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class Plan:
    """What the consumer needs of a plan.

    ranks: the EP size. layers: for each MoE layer its index in the model, ascending. rank_of: for each MoE layer the lists of ranks that
    hold an expert, by expert. token_rank, token_score [MoE layers, vocabulary, m]: the m best ranks of a token id, the best first, and
    their shares times SCORE_SCALE. transition_rank, transition_score [MoE layers, ranks, ranks]: None in a plan without them.
    look_back_factor [MoE layers, ranks^look_back, ranks]: the factors of forecast lookback, where look_back is how many layers before a
    layer it sees; None and 0 in a plan of another forecast. digest: the digest of the plan; empty if it was read without one.
    """

    def __init__(self, placement, tables, metadata, name):
        self.digest = ""
        try:
            self.ranks, self.experts, slots_per_rank = placement["ep_size"], placement["num_experts"], placement["slots_per_rank"]
            if not 1 <= self.experts <= MOST_EXPERTS:
                raise Refused(f"placement.json: num_experts is {self.experts}; allowed is 1 to {MOST_EXPERTS}")
            self.layers = [layer["layer"] for layer in placement["layers"]]
            self.rank_of = [holders(layer["slots"], self.experts, slots_per_rank) for layer in placement["layers"]]
        except (KeyError, TypeError, IndexError, ZeroDivisionError) as error:
            raise Refused(f"placement.json is no placement: {error!r}") from None
        for key, want in (("format", FORMAT), ("ep_size", str(self.ranks)), ("score_scale", str(SCORE_SCALE))):
            if metadata.get(key) != want:
                raise Refused(f"{name}: {key} is {metadata.get(key)!r}; this plan needs {want!r}")
        kind = "U8" if self.ranks <= 256 else "U16"
        self.token_rank = expect(tables, "token_rank", kind, name, (len(self.layers), None, None))
        self.token_score = expect(tables, "token_score", "U16", name, self.token_rank.shape)
        self.vocabulary, self.best = self.token_rank.shape[1:]
        if not 1 <= self.best <= self.ranks:
            raise Refused(f"{name}: token_rank keeps {self.best} ranks of a token; allowed is 1 to {self.ranks}")
        self.transition_rank = self.transition_score = None
        if "transition_rank" in tables:
            shape = (len(self.layers), self.ranks, self.ranks)
            self.transition_rank = expect(tables, "transition_rank", kind, name, shape)
            self.transition_score = expect(tables, "transition_confidence", "U16", name, shape)
        self.look_back, self.look_back_factor = 0, None
        if LOOK_BACK_FACTOR in tables:
            self.look_back = look_back(metadata, self.ranks, name)
            self.look_back_factor = expect(tables, LOOK_BACK_FACTOR, "F32", name, (len(self.layers), self.ranks ** self.look_back, self.ranks))


def look_back(metadata, ranks, name):
    """How many layers before a layer the look-back of a plan sees."""
    most = 0
    while most < MOST_LOOK_BACK and ranks ** (most + 2) <= MOST_FACTORS:
        most += 1
    stored = metadata.get("look_back_layers")
    if stored not in [str(depth) for depth in range(1, most + 1)]:
        raise Refused(f"{name}: look_back_layers is {stored!r}; allowed is 1 to {most} for {ranks} ranks")
    return int(stored)


def holders(slots, experts, slots_per_rank):
    """The ranks that hold each expert, given the experts in slot order."""
    ranks = [[] for _ in range(experts)]
    for slot, expert in enumerate(slots):
        if not 0 <= expert < experts:
            raise Refused(f"placement.json: slot {slot} holds expert {expert}; allowed is 0 to {experts - 1}")
        ranks[expert].append(slot // slots_per_rank)
    return ranks


def expect(tables, key, dtype, name, shape):
    """A tensor of that type and shape, where None stands for any number."""
    if key not in tables:
        raise Refused(f"{name} has no tensor {key!r}: the plan is not for attention tp")
    tensor = tables[key]
    if tensor.dtype != dtype or len(tensor.shape) != len(shape) or any(want not in (None, n) for want, n in zip(shape, tensor.shape)):
        raise Refused(f"{name}: tensor {key!r} is {tensor.dtype} {list(tensor.shape)}; this plan needs {dtype} {['any' if n is None else n for n in shape]}")
    return tensor


def load(tables_path, placement_path, digest=""):
    """The plan in these files. With the digest of the plan that the engine serves under, every file must be the one that manifest.json
    next to the tables names, and the manifest must have the digest, or name it as its layout: new tables for the same placement. The
    tables must be made for the placement always."""
    tables, placement = mapped(tables_path), mapped(placement_path)
    layout, found_digest = sha256(placement), ""
    if digest:
        manifest = mapped(os.path.join(os.path.dirname(tables_path), "manifest.json"))
        found_digest = sha256(manifest)
        try:
            described = json.loads(bytes(manifest))
            if found_digest != digest and described.get("layout") != digest:
                raise Refused(f"manifest.json has the digest {found_digest}, and not {digest}", "OtherPlan")
            listed = {name: described["files"][name] for name in ("tables.safetensors", "placement.json")}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"manifest.json does not name the plan's files: {error!r}") from None
        for name, found in (("tables.safetensors", sha256(tables)), ("placement.json", layout)):
            if listed[name] != found:
                raise Refused(f"{name} has the digest {found}; manifest.json names {listed[name]}")
    tensors, metadata = parse(tables, tables_path)
    if metadata.get("layout") != layout:
        raise Refused(f"{tables_path} is made for layout {metadata.get('layout')}, and {placement_path} is {layout}")
    try:
        plan = Plan(json.loads(bytes(placement)), tensors, metadata, tables_path)
        plan.digest = found_digest
        return plan
    except ValueError as error:
        raise Refused(f"{placement_path} is no JSON: {error}") from None


class Watcher:
    """Follows the plan that SEMMOE_TABLES, SEMMOE_PLACEMENT and SEMMOE_PLAN_DIGEST name. The operator replaces the directory as a whole
    when there are new tables for the placement. A plan that cannot be read is logged once, and the plan in use stays.

    plan: the plan in use; None if tokens are not shuffled. refused: the reason why the present files are not used; empty if they are.
    """

    def __init__(self, environment=os.environ):
        self.paths = environment.get("SEMMOE_TABLES"), environment.get("SEMMOE_PLACEMENT")
        self.digest, self.plan, self.refused = environment.get("SEMMOE_PLAN_DIGEST", ""), None, ""
        self._seen = self._logged = None
        self.poll()

    def poll(self):
        """Reads the plan if its directory has changed, and returns True if another plan is in use since."""
        if not all(self.paths):
            return False
        seen = self._identity()
        if seen is not None and seen == self._seen:
            return False
        try:
            self.plan, self.refused, self._seen, self._logged = load(*self.paths, self.digest), "", seen, None
            return True
        except FileNotFoundError as error:
            self._refuse("Absent", f"{error.filename} is missing")
        except Refused as error:
            self._refuse(error.reason, str(error))
            self._seen = seen
        except OSError as error:
            self._refuse("Unreadable", str(error))
        except Exception as error:  # a damage that no check above expects
            self._refuse("Damaged", f"the plan in {os.path.dirname(self.paths[0])} is damaged: {error!r}")
            self._seen = seen
        return False

    def _identity(self):
        """What changes with the directory: it is replaced, and its files do not change."""
        try:
            return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in map(os.stat, (os.path.dirname(self.paths[0]) or ".", *self.paths))]
        except OSError:
            return None

    def _refuse(self, reason, message):
        self.refused = reason
        if message != self._logged:
            self._logged = message
            log.warning("%s: %s", "tokens are not shuffled" if self.plan is None else "new tables are not used", message)


def from_environment(environment=os.environ):
    """Returns the plan that SEMMOE_TABLES, SEMMOE_PLACEMENT and SEMMOE_PLAN_DIGEST name. It returns None if they name none. It logs one
    warning and returns None if the plan cannot be read, whatever the cause: serving does not depend on a plan."""
    return Watcher(environment).plan
