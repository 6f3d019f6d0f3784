"""The quick half of benchmarks/chaos.py: one run of two engines, fault after fault, and not a prompt is lost or learned twice."""

import pytest
from test_runs import start  # noqa: F401 (a fixture)

from benchmarks import chaos


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_a_run_gets_over_fault_after_fault(start, tmp_path, monkeypatch):  # noqa: F811
    for name, value in chaos.within(tmp_path).items():
        monkeypatch.setenv(name, value)
    job = start(  # at this learning rate it never solves its task, and so never runs out of groups
        "chaos", "train.lr=1e-6", "train.steps=100000", *chaos.OVERRIDES, "run.checkpoint_every=5", command=chaos.TORCHRUN
    )
    run = chaos.Run(job, tmp_path, seed=0)
    job.wait_for_step(2)
    for fault in chaos.QUICK:
        print(fault, chaos.disturb(run, fault))
    job.process.terminate()
    job.wait_gone()
    account, problems = chaos.audit(job.dir)
    print(account)
    assert not problems
    assert account.waiting + account.redone > 0, "SIGTERM came between two prompts: nothing was in flight"
