"""The manifest: what ranks report makes up a table of every element, and nothing else is taken for one."""

import errno
import json
import math
import re
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.cases import specs
from tests.checkpoint.hand import raw, tile_sums
from tests.checkpoint.make import tensor
from tests.errors import raises
from tests.examples import examples
from tilth.checkpoint import columns
from tilth.checkpoint import manifest as room
from tilth.checkpoint.manifest import (
    FileEntry,
    Report,
    assemble,
    intervals,
    load_manifest,
    parse_manifest,
    parse_report,
    report_of,
)
from tilth.checkpoint.planning import DTYPES, Spec, plan_group
from tilth.core.errors import CheckpointError
from tilth.core.layout import Layout, Mesh, RaggedShard, Replicate, Shard

SAVED = "2026-01-02T03:04:05+00:00"
FOLDER = "step-000007.tmp-1"


def write(group, tensors, plan, rank):
    """A rank's file of a group, and its report."""
    pieces = plan.pieces(rank)
    if not pieces:
        return b"", report_of(FOLDER, group, rank, plan)
    parts = [tensors[piece.name][piece.box.slices] for piece in pieces]
    header = plan.header(rank)
    data = header + b"".join(map(raw, parts))
    entry = FileEntry(
        group=group,
        nbytes=len(data),
        header_nbytes=len(header),
        header_checksum=xxhash.xxh3_64_intdigest(header),
        checksums=[s for part in parts for s in tile_sums(part)],
    )
    return data, report_of(FOLDER, group, rank, plan, f"{group}.{rank:05d}.safetensors", entry)


def reports_of(groups):
    """What all ranks report, after a journey as JSON; the files; the tensors."""
    reports, files, tensors = [], {}, {}
    for group, wanted in groups.items():
        plan = plan_group(wanted)
        whole = tensors[group] = {s.name: tensor(s.layout.shape, DTYPES[s.dtype], s.name) for s in wanted}
        for rank in plan.ranks or (0,):
            data, report = write(group, whole, plan, rank)
            reports.append(parse_report(report.model_dump_json(), "report"))
            files[report.file] = data
    return reports, files, tensors


def two_groups():
    mesh = Mesh(("dp", "fsdp"), (2, 2))
    w, b = Layout(mesh, (Replicate(), Shard(0)), (5, 3)), Layout(mesh, (Replicate(), Replicate()), (4,))
    model = [Spec("w", w, "float32"), Spec("b", b, "bfloat16")]
    return {"model": model, "critic": [Spec("v", Layout(Mesh(("dp",), (2,), (3, 9)), (Shard(0),), (3,)), "float64")]}


def made(groups=None, **more):
    reports, _, _ = reports_of(groups or two_groups())
    return assemble(FOLDER, 7, reports, {"seed": [1, 2.5, None]}, saved=SAVED, **more)


# ---- round trip ----


@pytest.mark.parametrize("long", [0, 64])
@settings(max_examples=examples(30), deadline=None)
@given(specs(), specs(most=2), st.randoms(use_true_random=False))
def test_every_piece_is_where_the_manifest_says(long, first, second, shuffled):
    """long: from how many numbers on columns are written once for all tensors that have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_LONG", long)
        room._planned_table.cache_clear()
        _check_all_pieces(first, second, shuffled)
    room._planned_table.cache_clear()


def _check_all_pieces(first, second, shuffled):
    reports, files, tensors = reports_of({"model": first, "optimizer": second})
    shuffled.shuffle(reports)
    manifest = assemble(FOLDER, 7, reports, {}, saved=SAVED, expected={
        "model": {r.rank for r in reports if r.group == "model"},
        "optimizer": {r.rank for r in reports if r.group == "optimizer"},
    })  # fmt: skip
    text = manifest.dump()
    loaded = parse_manifest(text, "m.json")
    assert loaded.dump() == text
    assert list(loaded.groups) == ["model", "optimizer"]
    assert {name: len(data) for name, data in files.items() if name} == {n: f.nbytes for n, f in loaded.files.items()}
    for group, wanted in (("model", first), ("optimizer", second)):
        assert list(loaded.groups[group]) == [spec.name for spec in wanted]
        for spec in wanted:
            entry, whole = loaded.entry(group, spec.name), tensors[group][spec.name]
            assert (entry.shape, entry.torch_dtype) == (spec.layout.shape, whole.dtype)
            assert manifest.entry(group, spec.name).boxes == entry.boxes and len(entry) == len(entry.boxes)
            count = np.zeros(entry.shape, int)
            for i, piece in enumerate(entry.boxes):
                count[piece.box.slices] += 1
                values = whole[piece.box.slices]
                assert files[piece.file][piece.byte0 : piece.byte0 + piece.nbytes] == raw(values)
                assert piece.checksums == tile_sums(values) and piece.nbytes == len(raw(values))
                assert entry.piece(i) == piece
                assert piece.offset == tuple(entry.offset[i]) and piece.size == tuple(entry.size[i])
            assert (count == 1).all()


def test_a_vector_in_two_boxes_may_have_the_sizes_of_a_matrix_in_one():
    mesh = Mesh(("fsdp",), (2,))
    matrix, vector = Layout(mesh, (Replicate(),), (4, 3)), Layout(mesh, (Shard(0),), (7,))
    _check_all_pieces([Spec("m", matrix, "float32"), Spec("v", vector, "float32")], [], Random(0))


def test_large_pieces_have_the_checksums_of_their_tiles():
    mesh = Mesh(("fsdp",), (3,))
    group = [
        Spec("wide", Layout(mesh, (Shard(0),), (70, 2048)), "float32"),
        Spec("flat", Layout(mesh, (RaggedShard((5, 1, 0)),), (6, 64, 100)), "float16"),
        Spec("none", Layout(mesh, (Shard(0),), (0, 9)), "int8"),
        Spec("all", Layout(mesh, (Replicate(),), (300_000,)), "int32"),
    ]
    reports, _, tensors = reports_of({"g": group})
    manifest = assemble(FOLDER, 7, reports, {}, saved=SAVED)
    pieces = [(name, piece) for name, entry in manifest.groups["g"].items() for piece in entry.boxes]
    assert all(piece.checksums == tile_sums(tensors["g"][name][piece.box.slices]) for name, piece in pieces)
    assert sum(len(piece.checksums) for _, piece in pieces) == sum(f.tiles for f in manifest.files.values()) == 26


def test_the_bytes_of_a_manifest_do_not_change_with_the_code():
    """Its digest names a checkpoint whose weights another run holds fixed; 80 boxes make a column that is named."""
    mesh = Mesh(("fsdp",), (80,))
    rows, ragged = Layout(mesh, (Shard(0),), (160, 3)), Layout(mesh, (RaggedShard((1, 3) * 40),), (8, 20))
    layouts = {"w": rows, '\u00e9"': rows, "r": ragged, "s": Layout(mesh, (Replicate(),), ())}
    reports, _, _ = reports_of({"model": [Spec(name, one, "float32") for name, one in layouts.items()], "none": []})
    text = assemble(FOLDER, 7, reports, {"seed": [1, None, "\u00e9"]}, saved=SAVED).dump()
    assert b'"offset": "w"' in text and parse_manifest(text, "m.json").dump() == text
    assert xxhash.xxh3_64_hexdigest(text) == "2437bde1ea922a53"


def test_the_file_is_json_with_a_line_for_each_tensor_and_file():
    text = made().dump().decode()
    lines = text.splitlines()
    assert re.fullmatch(r'\{"checksum": "[0-9a-f]{16}",', lines[0])
    assert xxhash.xxh3_64_hexdigest(text.partition("\n")[2].encode()) == lines[0][14:30]
    assert lines[1] == f'"format": "tilth-checkpoint", "version": 2, "step": 7, "saved": "{SAVED}",'
    assert [line for line in lines if line.startswith('"w"')] == [
        '"w": {"shape": [5, 3], "dtype": "float32", "offset": [0,0,3,0], "size": [3,3,2,3], '
        '"file": [0,1], "byte0": [0,0]},'
    ]  # fmt: skip
    assert [line for line in lines if line.startswith('"b"')] == [
        '"b": {"shape": [4], "dtype": "bfloat16", "offset": [0], "size": [4], "file": [2], "byte0": [0]}'
    ]
    assert sum(line.startswith('"model.0000') for line in lines) == 3
    body = json.loads(text)
    assert sorted(body) == [
        "checksum", "files", "format", "groups", "layout", "objects", "saved", "step", "total_bytes", "version",
    ]  # fmt: skip
    assert body["objects"] == {"seed": [1, 2.5, None]} and len(body["files"]) == 5
    entry = body["files"]["critic.00009.safetensors"]
    assert entry.keys() == {"group", "nbytes", "header_nbytes", "header_checksum", "checksums"}
    assert (
        entry["group"] == "critic" and entry["nbytes"] - entry["header_nbytes"] == 8 and len(entry["checksums"]) == 16
    )
    assert body["total_bytes"] == sum(file["nbytes"] for file in body["files"].values())
    assert Mesh.from_json(body["layout"]["mesh"]) == Mesh(("world",), (5,), (0, 1, 2, 3, 9))


def test_a_long_column_that_an_earlier_tensor_has_is_its_name():
    mesh = Mesh(("fsdp",), (65,))
    rows, all_of_them = Layout(mesh, (Shard(0),), (65,)), Layout(mesh, (Replicate(),), (130,))
    group = [Spec("a", rows, "int8"), Spec("b", all_of_them, "int8"), Spec("c", rows, "int8"), Spec("d", rows, "int16")]
    made_of_these = made({"g": group})
    table = json.loads(made_of_these.dump())["groups"]["g"]
    assert [table["c"][column] for column in ("offset", "size", "file")] == ["a", "a", "a"]
    assert [table["d"][column] for column in ("offset", "size", "file")] == ["a", "a", "a"]
    assert table["a"]["offset"] == list(range(65)) and table["b"]["offset"] == [0]
    assert table["d"]["byte0"] == [0] * 65 and table["c"]["byte0"] == [133] + [3] * 64  # b is on rank 0
    loaded = parse_manifest(made_of_these.dump(), "m")
    assert all(loaded.entry("g", s.name).boxes == made_of_these.entry("g", s.name).boxes for s in group)
    assert loaded.dump() == made_of_these.dump()


def test_objects_and_layout_are_kept_as_they_are():
    reports, _, _ = reports_of(two_groups())
    objects = {"a": {"ü\n": [0.1, 1e300, -0.0, True, None, "x"]}, "": 2**70}
    mesh = Mesh(("dp", "tp"), (2, 3))
    loaded = parse_manifest(assemble(FOLDER, 7, reports, objects, saved=SAVED, layout=mesh).dump(), "m")
    assert loaded.objects == objects and math.copysign(1, loaded.objects["a"]["ü\n"][2]) == -1
    assert loaded.layout == {"mesh": mesh.to_json()} and (loaded.step, loaded.saved) == (7, SAVED)


def test_no_groups_and_empty_groups():
    for groups in ({}, {"g": []}, {"g": [], "h": []}):
        reports, files, _ = reports_of(groups)
        loaded = parse_manifest(assemble(FOLDER, 7, reports, {}, saved=SAVED).dump(), "m")
        assert list(loaded.groups) == list(groups) and loaded.files == {} and loaded.total_bytes == 0
        assert not any(loaded.groups.values()) and set(files) <= {""}


def test_names_of_any_kind():
    names = ['say "hi"', "back\\slash", "ümlaut", "a b\n", "groups"]
    loaded = parse_manifest(made({"g": [Spec(n, Layout.single((2,)), "int8") for n in names]}).dump(), "m")
    assert list(loaded.groups["g"]) == names


def test_a_cached_table_makes_the_same_bytes():
    assert made().dump() == made().dump()


@given(st.sets(st.integers(0, 40)))
def test_intervals(ranks):
    found = intervals(ranks)
    assert {rank for start, stop in found for rank in range(start, stop)} == ranks
    assert all(a[1] < b[0] for a, b in pairwise(found)) and all(start < stop for start, stop in found)


def test_checksums_are_numbers_or_digits():
    numbers = [0, 1, 2**64 - 1]
    entry = FileEntry(group="g", nbytes=1, header_nbytes=0, header_checksum=0, checksums=numbers)
    assert entry.checksums == "0" * 16 + "0" * 15 + "1" + "f" * 16
    assert entry.tile_checksums.tolist() == numbers and entry.tiles == 3
    again = FileEntry.model_validate_json(entry.model_dump_json())
    assert again == entry and again.tile_checksums.tolist() == numbers


# ---- damage ----


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_no_flipped_bit_passes(data):
    text = bytearray(made().dump())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(bytes(text), "m.json")
    assert caught.value.key.removeprefix("manifest.json.") in ("syntax", "format", "version", "checksum")


def test_no_truncated_file_passes():
    text = made().dump()
    for length in (*range(0, len(text), 97), len(text) - 1, len(text) - 2):
        with raises(CheckpointError, "manifest.json.syntax" if length < len(text) - 1 else "manifest.json.checksum"):
            parse_manifest(text[:length], "m.json")
    with raises(CheckpointError, "manifest.json.checksum"):
        parse_manifest(text + b" ", "m.json")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"", "syntax"),
        (b"\xff\xfe\x00", "syntax"),
        (b"[" * 100_000, "syntax"),
        (b"{}", "format"),
        (b"[1]", "format"),
        (b'{"format": "pt"}', "format"),
        (b'{"format": "tilth-checkpoint", "version": 1}', "version"),
        (b'{"format": "tilth-checkpoint", "version": 3}', "version"),
        (b'{"format": "tilth-checkpoint"}', "version"),
        (b'{"format": "tilth-checkpoint", "version": 2}', "checksum"),
    ],
)
def test_what_is_no_manifest(text, field):
    with raises(CheckpointError, f"manifest.json.{field}") as caught:
        parse_manifest(text, "m.json")
    assert str(caught.value).startswith("m.json ") and "\n" not in str(caught.value)


def resealed(change):
    """A manifest with a change and the right checksum for it."""
    body = json.loads(made().dump())
    change(body)
    del body["checksum"]
    text = json.dumps(body)[1:].encode()
    return b'{"checksum": "%s",\n' % xxhash.xxh3_64_hexdigest(text).encode() + text


def put(*path):
    *path, value = path

    def change(body):
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


def drop(*path):
    def change(body):
        for key in path[:-1]:
            body = body[key]
        del body[path[-1]]

    return change


def test_a_change_with_its_checksum_is_read():
    assert parse_manifest(resealed(put("step", 9)), "m").step == 9


FILE = "model.00000.safetensors"
W = ("groups", "model", "w")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (put("step", "x"), "step"),
        (drop("step"), "step"),
        (put("more", 1), "more"),
        (put("saved", 3), "saved"),
        (put("objects", []), "objects"),
        (put("total_bytes", 5), "total_bytes.sum"),
        (drop("files", FILE, "nbytes"), f"files.{FILE}.nbytes"),
        (put("files", FILE, "nbytes", -1), f"files.{FILE}.nbytes"),
        (put("files", FILE, "nbytes", 37), f"files.{FILE}.nbytes.sum"),
        (put("files", FILE, "header_checksum", 1 << 64), f"files.{FILE}.header_checksum"),
        (put("files", FILE, "checksums", "0" * 15), f"files.{FILE}.checksums"),
        (put("files", FILE, "checksums", "G" * 16), f"files.{FILE}.checksums"),
        (put("files", FILE, "checksums", "é" * 16), f"files.{FILE}.checksums"),
        (put("files", FILE, "checksums", ""), f"files.{FILE}.checksums.count"),
        (put("files", FILE, "checksums", "0" * 32), f"files.{FILE}.checksums.count"),
        (put("files", FILE, "checksums", {}), f"files.{FILE}.checksums"),
        (put("files", FILE, "checksums", [-1]), f"files.{FILE}.checksums"),
        (put("files", FILE, "checksums", [1 << 64]), f"files.{FILE}.checksums"),
        (put("files", FILE, "checksums", [0.5]), f"files.{FILE}.checksums"),
        (put("groups", []), "groups"),
        (put("groups", "model", 3), "groups.model"),
        (put(*W, 3), "groups.model.w.fields"),
        (put(*W, "more", 3), "groups.model.w.fields"),
        (drop(*W, "file"), "groups.model.w.fields"),
        (put(*W, "dtype", "float31"), "groups.model.w.dtype"),
        (put(*W, "dtype", ["float32"]), "groups.model.w.dtype"),
        (put(*W, "dtype", "float64"), f"files.{FILE}.nbytes.sum"),
        (put(*W, "shape", [5]), "groups.model.w.offset.length"),
        (put(*W, "shape", [5, 4]), "groups.model.w.boxes.missing"),
        (put(*W, "shape", "53"), "groups.model.w.shape.type"),
        (put(*W, "offset", [0, 0, 3]), "groups.model.w.offset.length"),
        (put(*W, "offset", [0, 0, 4, 0]), "groups.model.w.boxes.outside"),
        (put(*W, "offset", [0, 0, 2, 0]), "groups.model.w.boxes.overlap"),
        (put(*W, "offset", [0, 0, 3, 0.5]), "groups.model.w.offset.type"),
        (put(*W, "offset", [[0, 0], [3, 0]]), "groups.model.w.offset.type"),
        (put(*W, "offset", [[0], [3, 0]]), "groups.model.w.offset.type"),
        (put(*W, "offset", [0, 0, 3, 1 << 70]), "groups.model.w.offset.most"),
        (put(*W, "offset", [0, 0, 3, (1 << 63) - 1]), "groups.model.w.offset.most"),
        (put(*W, "offset", [0, 0, -3, 0]), "groups.model.w.offset.least"),
        (put(*W, "size", [3, 3, 2, 2]), "groups.model.w.boxes.missing"),
        (put(*W, "size", [3, 3, 2, 3, 1]), "groups.model.w.size.length"),
        (put(*W, "size", None), "groups.model.w.size.type"),
        (put(*W, "file", [0, 5]), "groups.model.w.file"),
        (put(*W, "file", [0]), "groups.model.w.offset.length"),
        (put(*W, "file", [True, False]), "groups.model.w.file.type"),
        (put(*W, "byte0", [0]), "groups.model.w.byte0.length"),
        (put(*W, "byte0", [0, 4]), "groups.model.w.byte0.gap"),
        (put(*W, "file", [1, 1]), "groups.model.w.byte0.gap"),
        (put(*W, "offset", []), "groups.model.w.offset.length"),
        (put(*W, "offset", "u"), "groups.model.w.offset.reference"),
        (put(*W, "offset", "w"), "groups.model.w.offset.reference"),
        (put(*W, "file", "b"), "groups.model.w.file.reference"),
        (put("groups", "model", "b", "file", "w"), "groups.model.b.offset.length"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(change, field):
    with raises(CheckpointError, f"manifest.json.{field}") as caught:
        parse_manifest(resealed(change), "m.json")
    assert str(caught.value).startswith("m.json ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "place", "fault"),
    [
        (put(*W, "offset", [0, 0, 2, 0]), "groups.model.w.boxes", ".overlap"),
        (put(*W, "size", None), "groups.model.w.size", ".type"),
        (put(*W, "dtype", "float31"), "groups.model.w.dtype", ""),
    ],
)
def test_a_message_has_the_place_of_a_wrong_field_and_the_key_its_fault_too(change, place, fault):
    with raises(CheckpointError, f"manifest.json.{place}{fault}") as caught:
        parse_manifest(resealed(change), "m.json")
    assert str(caught.value).startswith(f"m.json is not a valid manifest: {place}: ")


class Shelf:
    """A storage with one thing on it."""

    where = "/runs/a"

    def __init__(self, found):
        self.found = found

    def read(self, path):
        assert path == "step-000007/manifest.json"
        if isinstance(self.found, bytes):
            return self.found
        raise self.found


def test_loading_from_a_storage():
    assert load_manifest(Shelf(made().dump()), "step-000007").step == 7
    for found, key, reason in (
        (FileNotFoundError(), "manifest.json", "no such file"),
        (OSError(errno.EIO, "Input/output error"), "manifest.json", "Input/output error"),
        (OSError("the store says no"), "manifest.json", "the store says no"),
        (b"", "manifest.json.syntax", "JSON"),
    ):
        with raises(CheckpointError, key) as caught:
            load_manifest(Shelf(found), "step-000007")
        assert str(caught.value).startswith("/runs/a/step-000007") and reason in str(caught.value)


# ---- reports that do not make up a checkpoint ----


def changed(report, **fields):
    return report.model_copy(update=fields)


def entry_of(report, **fields):
    return changed(report, entry=report.entry.model_copy(update=fields))


def at(group, rank):
    return lambda report: (report.group, report.rank) == (group, rank)


def replace(which, how):
    return lambda reports: [how(report) if which(report) else report for report in reports]


FIRST = at("model", 0)
OTHER = {"model": two_groups()["model"][:1]}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda r: [x for x in r if not at("model", 2)(x)], "model.rank2.missing"),
        (lambda r: [x for x in r if not FIRST(x)], "model.rank0.missing"),
        (lambda r: [x for x in r if not at("critic", 9)(x)], "critic.rank9.missing"),
        (lambda r: [*r, r[1]], "model.rank1.twice"),
        (
            replace(at("model", 1), lambda x: changed(x, folder="step-000006.tmp-1")),
            "model.rank1.folder",
        ),
        (
            replace(at("model", 3), lambda x: changed(x, digest="0" * 32)),
            "model.rank3.digest",
        ),
        (
            replace(FIRST, lambda x: changed(x, digest="0" * 32)),
            "model.rank0.digest",
        ),
        (replace(FIRST, lambda x: changed(x, table=None)), "model.rank0.table"),
        (replace(FIRST, lambda x: changed(x, table={})), "table"),
        (
            replace(FIRST, lambda x: changed(x, table=reports_of(OTHER)[0][0].table)),
            "model.rank0.digest",
        ),
        (
            replace(FIRST, lambda x: changed(x, file="", entry=None)),
            "model.rank0.file.missing",
        ),
        (
            lambda r: replace(at("model", 3), lambda x: changed(x, file="m3", entry=r[0].entry))(r),
            "model.rank3.file.unexpected",
        ),
        (
            replace(at("model", 1), lambda x: changed(x, file="model.00000.safetensors")),
            "model.00000.safetensors.writers",
        ),
        (
            replace(at("critic", 9), lambda x: changed(x, file="model.00000.safetensors")),
            "model.00000.safetensors.writers",
        ),
        (
            replace(FIRST, lambda x: entry_of(x, group="critic")),
            "model.00000.safetensors.group",
        ),
        (
            replace(FIRST, lambda x: entry_of(x, nbytes=x.entry.nbytes + 1)),
            "model.00000.safetensors.nbytes",
        ),
        (
            replace(FIRST, lambda x: entry_of(x, checksums="0" * 32)),
            "model.00000.safetensors.checksums",
        ),
        (lambda r: [*r, changed(r[1], rank=5)], "model.rank5.mesh"),
    ],
)
def test_reports_that_are_not_one_checkpoint(change, key):
    reports, _, _ = reports_of(two_groups())
    assemble(FOLDER, 7, reports, {}, saved=SAVED)
    with raises(CheckpointError, key) as caught:
        assemble(FOLDER, 7, change(reports), {}, saved=SAVED)
    assert "\n" not in str(caught.value)


def test_ranks_that_were_expected():
    reports, _, _ = reports_of(two_groups())
    right = {"critic": {3, 9}, "model": range(4)}
    manifest = assemble(FOLDER, 7, reports, {}, saved=SAVED, expected=right)
    assert list(manifest.groups) == ["critic", "model"]
    assert parse_manifest(manifest.dump(), "m").entry("model", "w").boxes[0].file == "model.00000.safetensors"
    for expected, key in (
        (right | {"model": range(5)}, "model.rank4.missing"),
        (right | {"more": [0]}, "more.rank0.missing"),
        (right | {"more": []}, "more.ranks"),
        (right | {"model": range(3)}, "model.rank3.unexpected"),
        ({"model": range(4)}, "critic.rank3.unexpected"),
    ):
        with raises(CheckpointError, key):
            assemble(FOLDER, 7, reports, {}, saved=SAVED, expected=expected)


def test_many_problems_are_one_line():
    wide = {"g": [Spec("w", Layout(Mesh(("d",), (64,)), (Shard(0),), (64,)), "int8")]}
    reports, _, _ = reports_of(wide)
    with raises(CheckpointError, "g.rank1.missing") as caught:
        assemble(FOLDER, 7, reports[:1], {}, saved=SAVED)
    assert "rank 20;" in str(caught.value) and str(caught.value).endswith("; and 43 more")


@pytest.mark.parametrize(
    ("text", "key"), [("", "report"), ("[]", "report"), ("{}", "report.folder"), (b"\xff", "report")]
)
def test_what_is_no_report(text, key):
    with raises(CheckpointError, key) as caught:
        parse_report(text, "report.json")
    assert str(caught.value).startswith("report.json ") and "\n" not in str(caught.value)


def test_only_the_lowest_rank_tells_the_table():
    reports, _, _ = reports_of(two_groups())
    assert [(r.group, r.rank) for r in reports if r.table] == [("model", 0), ("critic", 3)]
    assert all(isinstance(r, Report) and r.ranks in (((0, 4),), ((3, 4), (9, 10))) for r in reports)
