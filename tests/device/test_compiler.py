"""Workers of the compiler outlive signals that ask a run to stop."""

import os
import signal
import subprocess
import sys
import textwrap

SCRIPT = """
    import os, signal, sys
    import torch._dynamo, torch._inductor.async_compile, torch.utils._triton
    torch.utils._triton.has_triton_package = lambda: True  # the workers need torch alone
    from megatrain.device.compiler import start_workers
    from torch._inductor.async_compile import AsyncCompile

    os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: print("asked to stop", flush=True))
    start_workers()
    pool = AsyncCompile.process_pool()
    assert pool.submit(os.getpid).result(timeout=100) != os.getpid()  # they are there
    os.killpg(0, signal.SIGTERM)
    assert pool.submit(os.getpid).result(timeout=100) != os.getpid(), "the workers have died"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the run itself is deaf"
    print("still working", flush=True)
"""


def test_workers_survive_sigterm_to_the_whole_group():
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "TORCHINDUCTOR_WORKER_START": "subprocess"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.stdout.split("\n")[:2] == ["asked to stop", "still working"], done.stdout + done.stderr
    assert done.returncode == 0, signal.Signals(-done.returncode)
