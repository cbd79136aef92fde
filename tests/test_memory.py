# SPDX-License-Identifier: Apache-2.0
"""Memory: training holds the inputs, outputs, gradients and little more."""

import pytest

MB = 2**20

# Prints how many bytes the process grew at its peak over one training step, after a small step has started everything.
# The peak is the system's own count, reset first, so that what importing torch took once does not hide it.
STEP = """
import sys, torch, rwkv6_ops
torch.set_num_threads(int(sys.argv[1]))

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def step(T):
    leaves = [torch.randn(1, T, 8, 64, requires_grad=True) for _ in range(4)] + [torch.randn(8, 64, requires_grad=True)]
    r, k, v, w, u = leaves
    with torch.no_grad():
        w.exp_().neg_()
    do = torch.randn(1, T, 8, 64)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS:")
    o, _ = rwkv6_ops.wkv6(r, k, v, w, u)
    o.backward(do)
    return status("VmHWM:") - before

step(64)
print(max(step(512) for _ in range(2)))
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_training_step_takes_its_outputs_its_gradients_and_4_megabytes(threads: int, python):
    """(1, 512, 8, 64) in float32: o and four gradients of 1 MB each, beyond the inputs that were there before."""
    run = python(STEP, str(threads))
    if "PermissionError" in run.stderr or "FileNotFoundError" in run.stderr:
        pytest.skip("not tested: peak memory, which this system does not let a process reset")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) <= 5 * MB + 4 * MB
