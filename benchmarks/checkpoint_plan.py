"""What planning a checkpoint costs from 64 to 8,192 ranks, beside the planner of torch.distributed.checkpoint (DCP).

    python benchmarks/checkpoint_plan.py [--quick] [--every] [--json PATH]

A decoder of 8B parameters with the moments of Adam, 873 tensors, in the layouts of a run: fsdp alone, copies of it
(hsdp), and fsdp with tp of 8. Ranks are simulated, plans and layouts are real.

Tilth: no rank waits for another's plan. ``rank`` is what the busiest does by itself: the plans of both groups, its
pieces and the headers of its files. ``controller`` is what comes when data are written: the reports of all ranks read
(with a checksum for every tile) and held against the plan, the manifest made. ``again`` is the same for a second save.
Each first time is in a new process, so that nothing is cached; seconds are medians. ``cpu`` is processor time: all of
this is one thread that waits for nothing, so on a machine that does nothing else it is the same.

DCP: all ranks send their plans to one, which removes copies, checks, makes the metadata and sends plans back; later it
gets all results and writes the metadata. Timed is what that one rank does: ``plan`` is ``create_global_plan``,
``received`` and ``sent`` are reading the plans of all ranks and making messages of theirs, ``metadata`` is adding the
results and writing it. Ranks' own plans are made here from the same boxes; for one rank they are compared with what DCP
makes of real DTensors. With ``enable_plan_caching`` a second save can leave out all but ``metadata``.

Both plans are checked first: every element of every tensor once. Goals: under 0.3 s in all for 512 ranks; where there
are copies, so that what one holds others can write (hsdp), the busiest rank writes at most 1.1 of the mean.
"""

import math
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from driver import benchmark_parser, write_rows

from tilth.checkpoint.manifest import FileEntry, assemble, parse_manifest, parse_report, report_of
from tilth.checkpoint.planning import DTYPES, GroupPlan, Spec, plan_group, tiling_problem
from tilth.core.layout import Box, Layout, Mesh, Shard
from tilth.models.config import DecoderConfig
from tilth.plan.layout import layouts

LLAMA_8B = DecoderConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
DTYPE = "float32"
GOAL_RANKS, GOAL_S, GOAL_BUSIEST = 512, 0.3, 1.1
FOLDER = "step-000001.tmp-1"

Groups = dict[str, list[Spec]]
T = TypeVar("T")


def meshes(ranks: int) -> dict[str, Mesh]:
    """Layouts by name."""
    sizes = {"fsdp": (1, ranks, 1), "hsdp": (ranks // 32, 32, 1), "fsdp x tp": (1, ranks // 8, 8)}
    return {name: Mesh(("dp", "fsdp", "tp"), size) for name, size in sizes.items()}


def groups_over(mesh: Mesh) -> Groups:
    """Model and optimizer, as a policy saves them."""
    found = layouts(LLAMA_8B, mesh)
    moments = [(f"{kind}.{name}", layout) for name, layout in found.items() for kind in ("exp_avg", "exp_avg_sq")]
    return {
        "model": [Spec(name, layout, DTYPE) for name, layout in found.items()],
        "optimizer": [Spec(name, layout, DTYPE) for name, layout in moments],
    }


class Took(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float
    """Of this process alone: does not grow when others use the machine."""


def timed(call: Callable[[], T]) -> tuple[Took, T]:
    """How long it took, and what it returned."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = call()
    return Took(time.perf_counter() - wall, time.process_time() - cpu), found


def seconds(**took: Took) -> dict[str, float]:
    """Wall seconds by name, and all together also as processor time."""
    found = {f"{name}_s": each.wall for name, each in took.items()}
    return found | {"all_s": sum(found.values()), "all_cpu_s": sum(each.cpu for each in took.values())}


def in_new_process(call: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Its answer from a fork of this process, which has planned nothing."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(call(*given)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit(f"{call.__name__} failed in its process") from None
    finally:
        process.join()


# ---- Tilth ----


def own_plan(groups: Groups, rank: int) -> dict[str, GroupPlan]:
    """What one rank does before it writes."""
    plans = {group: plan_group(specs) for group, specs in groups.items()}
    for plan in plans.values():
        plan.header(rank)
    return plans


def reports_of(plans: dict[str, GroupPlan]) -> list[bytes]:
    """What all ranks would report, with arbitrary checksums."""
    found = []
    for group, plan in plans.items():
        for rank, writes, nbytes, tiles in zip(plan.ranks, plan.writes, plan.nbytes, plan.tiles):
            sums = os.urandom(8 * tiles).hex()
            entry = FileEntry(group=group, nbytes=nbytes + 64, header_nbytes=64, header_checksum=1, checksums=sums)
            named = (f"{group}.{rank:05d}.safetensors", entry) if writes else ("", None)
            found.append(report_of(FOLDER, group, rank, plan, *named).model_dump_json().encode())
    return found


def commit(reports: Sequence[bytes]) -> bytes:
    """What the controller does when all reports are there."""
    parsed = [parse_report(report, "report") for report in reports]
    return assemble(FOLDER, 1, parsed, {}, saved="").dump()


def plan_and_report(groups: Groups, rank: int, path: Path) -> dict[str, Any]:
    """The rank's part, twice; the reports of all go to a file."""
    first, plans = timed(lambda: own_plan(groups, rank))
    again, _ = timed(lambda: own_plan(groups, rank))
    path.write_bytes(pickle.dumps(reports_of(plans)))
    return {"first": first, "again": again}


def commit_twice(path: Path, checked: bool) -> dict[str, Any]:
    """The controller's part, twice."""
    reports = pickle.loads(path.read_bytes())
    first, text = timed(lambda: commit(reports))
    again, same = timed(lambda: commit(reports))
    assert same == text
    if checked:
        parse_manifest(text, "manifest")  # every rule of a manifest holds
    return {"first": first, "again": again, "manifest_mb": len(text) / 1e6}


def tilth_row(kind: str, mesh: Mesh, repeats: int, path: Path) -> dict[str, Any]:
    """Medians of some new processes each."""
    groups = groups_over(mesh)
    facts = in_new_process(check_tilth, groups)
    runs = []
    for i in range(repeats):
        rank = in_new_process(plan_and_report, groups, facts["busiest"], path)
        controller = in_new_process(commit_twice, path, i == 0)
        first = seconds(rank=rank["first"], controller=controller["first"])
        again = seconds(rank_again=rank["again"], controller_again=controller["again"])
        again = {name.replace("all_", "all_again_"): value for name, value in again.items()}
        runs.append({**first, **again, "manifest_mb": controller["manifest_mb"]})
    row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {"planner": "Tilth", "layout": kind, "ranks": len(mesh), **row, "imbalance": facts["imbalance"]}


def check_tilth(groups: Groups) -> dict[str, Any]:
    """Every element once; the rank with the most to write, and how much more than the mean that is."""
    load = np.zeros(len(groups["model"][0].layout.mesh))
    for specs in groups.values():
        plan = plan_group(specs)
        load += np.array(plan.nbytes)
        for spec, columns in zip(specs, plan.rows(np.arange(len(plan.ranks))).values()):
            problem = tiling_problem(spec.layout.shape, columns.offset, columns.size)
            assert not problem, (spec.name, problem)
    total = sum(DTYPES[s.dtype].itemsize * int(np.prod(s.layout.shape)) for specs in groups.values() for s in specs)
    assert load.sum() == total, "not all bytes are written, or some twice"
    return {"busiest": int(load.argmax()), "imbalance": float(load.max() / load.mean())}


# ---- DCP ----


def dcp_plans(groups: Groups) -> list[Any]:
    """The local plans of all ranks, from the same boxes."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=DTYPES[DTYPE])
    specs = [spec for group in groups.values() for spec in group]
    boxes: dict[Layout, list[Any]] = {}
    for layout in {id(spec.layout): spec.layout for spec in specs}.values():
        if layout not in boxes:
            held = [box_of(layout, rank) for rank in layout.mesh.ranks]
            boxes[layout] = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.size)) for b in held]
    columns = [(spec.name, torch.Size(spec.layout.shape), boxes[spec.layout]) for spec in specs]

    def item(name: str, shape: torch.Size, chunk: Any) -> Any:
        data = TensorWriteData(chunk=chunk, properties=properties, size=shape)
        return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)

    ranks = range(len(specs[0].layout.mesh))
    return [SavePlan([item(n, s, chunks[rank]) for n, s, chunks in columns], planner_data={}) for rank in ranks]


def box_of(layout: Layout, rank: int) -> Box:
    """What a rank holds; if nothing, an empty box behind the last, as DCP has it."""
    boxes, rows = layout.boxes(rank), layout.shape[0]
    zeros = (0,) * (len(layout.shape) - 1)
    return boxes[0] if boxes else Box((rows, *zeros), (0, *layout.shape[1:]))


def placements_of(layout: Layout) -> tuple[Any, ...]:
    """Torch's placements of a layout without copied pieces."""
    from torch.distributed.tensor import placement_types as torch_types

    found: list[Any] = []
    for i, placement in enumerate(layout.placements):
        if not isinstance(placement, Shard):
            found.append(torch_types.Replicate())
            continue
        earlier = [j for j in layout.order[: layout.order.index(i)] if j > i and layout.placements[j] == placement]
        factor = math.prod(layout.mesh.sizes[j] for j in earlier)
        strided = torch_types._StridedShard(placement.dim, split_factor=factor)
        found.append(strided if factor > 1 else torch_types.Shard(placement.dim))
    return tuple(found)


def dcp_own_items(groups: Groups, rank: int) -> dict[str, Any]:
    """What DCP itself plans for a rank, of DTensors without data over a process group that does not communicate."""
    from torch.distributed import init_process_group
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = groups["model"][0].layout.mesh
    init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(mesh))
    devices = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    state = {}
    for spec in (spec for group in groups.values() for spec in group):
        shape, local = spec.layout.shape, box_of(spec.layout, rank).size
        whole, part = torch.empty(shape, device="meta"), torch.empty(local, device="meta")
        placed = placements_of(spec.layout)
        state[spec.name] = DTensor.from_local(
            part, devices, placed, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=rank == 0)
    took, plan = timed(planner.create_local_plan)
    return {"local_s": took.wall, "items": _told(plan)}


def _told(plan: Any) -> list[tuple[Any, ...]]:
    return sorted(
        (i.index.fqn, tuple(i.tensor_data.chunk.offsets), tuple(i.tensor_data.chunk.sizes), tuple(i.tensor_data.size))
        for i in plan.items
    )


def dcp_row(kind: str, mesh: Mesh) -> dict[str, Any]:
    """One row: what the coordinator does, once."""
    return {"planner": "DCP", "layout": kind, "ranks": len(mesh), **in_new_process(dcp_coordinator, groups_over(mesh))}


def dcp_coordinator(groups: Groups) -> dict[str, Any]:
    """Seconds of its parts; every element once."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    local = dcp_plans(groups)
    messages = [pickle.dumps(plan) for plan in local]
    received_in, received = timed(lambda: [pickle.loads(message) for message in messages])
    planned_in, (final, metadata) = timed(lambda: DefaultSavePlanner().create_global_plan(received))
    sent_in, _ = timed(lambda: [pickle.dumps(plan) for plan in final])
    load = check_dcp(groups, final)
    results = dcp_results(final)
    written_in, size = timed(lambda: dcp_metadata(metadata, results))
    found = seconds(plan=planned_in, received=received_in, sent=sent_in, metadata=written_in)
    return found | {"manifest_mb": size / 1e6, "imbalance": float(load.max() / load.mean())}


def check_dcp(groups: Groups, final: Sequence[Any]) -> np.ndarray:
    """Every element once; bytes of each rank."""
    boxes: dict[str, list[tuple[Any, Any]]] = {}
    load = np.zeros(len(final))
    for rank, plan in enumerate(final):
        for item in plan.items:
            chunk = item.tensor_data.chunk
            if not chunk.sizes.numel():
                continue
            boxes.setdefault(item.index.fqn, []).append((tuple(chunk.offsets), tuple(chunk.sizes)))
            load[rank] += chunk.sizes.numel() * DTYPES[DTYPE].itemsize
    for spec in (spec for specs in groups.values() for spec in specs):
        offset, size = (np.array(column, np.int64) for column in zip(*boxes.pop(spec.name)))
        assert not tiling_problem(spec.layout.shape, offset, size), spec.name
    assert not boxes
    return load


def dcp_results(final: Sequence[Any]) -> list[list[Any]]:
    """What all ranks tell of what they wrote."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    def result(rank: int, item: Any) -> Any:
        nbytes = item.tensor_data.chunk.sizes.numel() * DTYPES[DTYPE].itemsize
        return WriteResult(item.index, nbytes, _StorageInfo(f"__{rank}_0.distcp", 0, nbytes))

    return [[result(rank, item) for item in plan.items] for rank, plan in enumerate(final)]


def dcp_metadata(metadata: Any, results: Sequence[Sequence[Any]]) -> int:
    """As its FileSystemWriter finishes, without the disk; bytes."""
    metadata.storage_data = {result.index: result.storage_data for ours in results for result in ours}
    return len(pickle.dumps(metadata))


def check_dcp_items(mesh: Mesh) -> float:
    """That the plans made here are DCP's own, for one rank; seconds that it takes to make its own."""
    groups, rank = groups_over(mesh), len(mesh) - 1
    own = in_new_process(dcp_own_items, groups, rank)
    assert own["items"] == _told(dcp_plans(groups)[rank]), "DCP plans something else"
    return own["local_s"]


# ---- all ----

WIDTHS = {"planner": 8, "layout": 11, "ranks": 7}
COLUMNS = {
    "Tilth": ("rank_s", "controller_s", "all_s", "all_cpu_s", "all_again_s", "all_again_cpu_s"),
    "DCP": ("received_s", "plan_s", "sent_s", "metadata_s", "all_s", "all_cpu_s"),
}


def show(row: dict[str, Any]) -> None:
    """A line."""
    start = "".join(f"{row[name]!s:{width}}" for name, width in WIDTHS.items())
    cells = "  ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {row[name]:.3f}" for name in COLUMNS[row["planner"]]
    )
    print(f"{start}{cells}  |  {row['manifest_mb']:.1f} MB, busiest {row['imbalance']:.3f} of the mean", flush=True)


def measure(quick: bool, path: Path, every: bool = False) -> list[dict[str, Any]]:
    """All rows. every: of DCP at 512 ranks each layout, which takes minutes, not the first alone."""
    print(f"DCP's own plan of one rank: {check_dcp_items(meshes(512)['fsdp']):.3f} s")
    rows = []
    for ranks in (64, 512) if quick else (64, 512, 2048, 8192):
        for number, (kind, mesh) in enumerate(meshes(ranks).items()):
            rows.append(tilth_row(kind, mesh, 1 if quick or ranks > 512 else 5, path))
            show(rows[-1])
            if ranks <= 64 or (ranks == 512 and not quick and (every or number == 0)):
                rows.append(dcp_row(kind, mesh))
                show(rows[-1])
    return rows


def main() -> None:
    """Measure and print."""
    import tempfile

    parser = benchmark_parser(__doc__, "64 and 512 ranks")
    parser.add_argument("--every", action="store_true", help="DCP at 512 ranks for every layout, not the first alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given.quick, Path(folder) / "reports", given.every)
    for row in rows:
        if row["planner"] == "Tilth" and row["ranks"] == GOAL_RANKS:
            verdict = "under" if row["all_s"] < GOAL_S else "NOT under"
            took = f"{row['all_s']:.3f} s in all ({row['all_cpu_s']:.3f} s of processor time)"
            print(f"{GOAL_RANKS} ranks, {row['layout']}: {took}, {verdict} {GOAL_S} s")
        if row["planner"] == "Tilth" and row["layout"] == "hsdp":
            verdict = "at most" if row["imbalance"] <= GOAL_BUSIEST else "NOT at most"
            print(f"{row['ranks']} ranks, hsdp: the busiest writes {row['imbalance']:.3f}, {verdict} {GOAL_BUSIEST}")
    write_rows(given.json, rows)


if __name__ == "__main__":
    main()
