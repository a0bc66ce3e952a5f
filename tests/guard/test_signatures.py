"""Ends of logs and texts of exceptions as classes of failure."""

import pytest

from tilth.guard.signatures import SIGNATURES, classify, with_cause
from tilth.guard.verdict import KINDS, Verdict

TRACE = 'Traceback (most recent call last):\n  File "/app/train.py", line 12, in <module>\n    main()\n'
CASES = [
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors ...", "crash", "device"),
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", "crash", "device"),
    (TRACE + "RuntimeError: CUDA error: device-side assert triggered", "error", "user"),
    (TRACE + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "crash", "device"),
    ("RuntimeError: CUDA error: unspecified launch failure", "crash", "device"),
    ("RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected", "crash", "device"),
    (TRACE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out-of-memory", "device"),
    ("node7:123:456 [0] NCCL WARN NET/IB : Got completion with error 12; IBV_WC_RETRY_EXC_ERR", "crash", "network"),
    ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error\n"
     "ncclRemoteError: A call failed possibly due to a network error", "crash", "network"),
    ("[rank3]:[E1122 Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, "
     "Timeout(ms)=600000) ran for 600012 milliseconds before timing out.", "hang", "network"),
    (TRACE + "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
     "1800000ms for recv operation to complete", "hang", "network"),
    (TRACE + "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:35754", "crash", "network"),
    (TRACE + "RuntimeError: [alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory", "out-of-memory", "memory"),
    ("[12.3] Out of memory: Killed process 4711 (python) total-vm:1kB", "out-of-memory", "memory"),
    ("MemoryError", "out-of-memory", "memory"),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
     "out-of-memory", "memory"),
    ("Fatal Python error: Bus error", "out-of-memory", "memory"),
    (TRACE + "OSError: [Errno 28] No space left on device", "storage", "storage"),
    (TRACE + "OSError: [Errno 122] Disk quota exceeded: '/data/ckpt'", "storage", "storage"),
    (TRACE + "OSError: [Errno 30] Read-only file system: '/data/ckpt'", "storage", "storage"),
    (TRACE + "OSError: [Errno 24] Too many open files", "files", "host"),
    (TRACE + "RuntimeError: can't start new thread", "error", "host"),
    (TRACE + "OSError: [Errno 98] Address already in use", "error", "host"),
    (TRACE + "ImportError: /lib/libc.so.6: version `GLIBC_2.34' not found", "error", "environment"),
    (TRACE + "ModuleNotFoundError: No module named 'flash_attn'", "error", "environment"),
    ("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):", "crash", "host"),
    ("tilth.core.errors.NonFiniteError: the loss of step 3 is nan", "not-finite", "user"),
    (TRACE + "TypeError: forward() got an unexpected keyword argument 'mask'", "error", "user"),
    (TRACE + "IndexError: index 5 is out of range", "error", "user"),
    (TRACE + "mine.rewards.ShapeError: odd", "error", "user"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind", "layer"), CASES, ids=[text.strip().splitlines()[-1][:40] for text, _, _ in CASES]
)
def test_the_class_of_a_log(text, kind, layer):
    found = classify("step 11 loss 2.3\nstep 12 loss 2.2\n" + text)
    assert (found.kind, found.details["layer"]) == (kind, layer), found
    assert found.details["line"] in found.evidence


def test_an_error_of_the_users_code_counts_before_what_follows_from_it():
    log = (
        TRACE
        + "IndexError: index 5 is out of range\n"
        + "RuntimeError: Connection closed by peer\nSegmentation fault\n"
    )
    assert classify(log).details["layer"] == "user" and classify(log).kind == "error"


def test_the_first_sign_counts():
    assert classify("CUDA error: uncorrectable ECC error\nncclSystemError: call failed").details["layer"] == "device"


@pytest.mark.parametrize("text", ["", "step 1 loss 2.0\nsaved checkpoint", "0 errors, no exception", "loss is fine"])
def test_a_log_without_a_sign_has_no_class(text):
    assert classify(text) is None


def test_every_row_is_of_a_known_class_and_is_used():
    assert {row.kind for row in SIGNATURES} <= set(KINDS)
    seen = {classify(text).details["sentence"] for text, _, _ in CASES}
    missing = {row.sentence for row in SIGNATURES} - seen
    assert not missing


def caused(kind, text):
    found = with_cause(Verdict(kind, (2,), text, {"key": "policy.update"}))
    return found.kind, found.details.get("cause", {}).get("layer"), found


def test_the_cause_is_in_the_first_line_and_what_the_code_raised_stays_an_error():
    kind, layer, found = caused("error", "role policy, rank 2, update: KeyError: 'x'\n" + TRACE + "KeyError: 'x'")
    assert (kind, layer, found.ranks) == ("error", "user", (2,))
    assert found.evidence.splitlines()[0].endswith("; cause: the code raised an exception (user)")


def test_an_error_of_a_device_is_a_crash_and_one_of_the_network_blames_nobody():
    device = "role policy, rank 2, update: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert caused("error", device)[:2] == ("crash", "device")
    peer = "role policy, rank 2, update: RuntimeError: [pair.cc:553] Connection closed by peer"
    assert caused("error", peer)[:2] == ("error", "network")


def test_a_dead_worker_s_log_tells_the_cause_and_its_kind_stays():
    lost = "rank 2, update: the worker (process 7) was killed by SIGABRT; its log ends:\n    {}"
    assert caused("crash", lost.format("terminate called after throwing std::bad_alloc"))[:2] == ("crash", "memory")
    assert caused("crash", lost.format("double free or corruption"))[:2] == ("crash", "host")
    assert caused("crash", "rank 2, update: the worker (process 7) was killed by SIGKILL between calls")[1] is None


def test_a_verdict_that_has_its_own_evidence_stays():
    hang = Verdict("hang", (1,), "rank 1 stopped\n  KeyError: 'x'")
    assert with_cause(hang) is hang


def test_what_ray_guesses_of_a_dead_worker_is_no_cause():
    lost = "rank 1, update: the worker (process 7) has died; its log ends:\n    (raylet) A worker died. {} SIGSEGV"
    assert caused("crash", lost.format("Some common causes include: (1) the OOM killer, (2)"))[1] is None
    assert caused("crash", lost.format("It was ended by"))[1] == "host"
