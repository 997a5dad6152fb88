"""The file of jobs that `stretto init jobs` writes."""

from __future__ import annotations

EXAMPLE_JOBS = """\
# Jobs that share a machine. Run them: stretto run jobs.toml --policy pollux; on a Ray cluster, add --on ray

[machine]
# slots = 2                  # workers at once; left out: one for every GPU, or else for every core
usd_per_slot_hour = 0        # what a slot costs you

[[job]]
name = "small"               # its files go to runs/jobs/jobs/small
entry = "train.py:train"     # def train(config, run), in this folder
epochs = 10                  # train no further than this
config = { lr = 0.1, width = 64 }   # what train is given

[[job]]
name = "large"
entry = "train.py:train"     # or command = ["python", "train.py", "--lr", "{lr}"]: all jobs one or the other
epochs = 30
submit_at = "30s"            # when it comes, after the run's start; now if left out
gpus = { min = 1, max = 2 }  # workers it can have; 1 to all slots if left out
tier = "adaptive"            # the policy may change workers and batch; "elastic": workers; "rigid": nothing
batch = { max = 1024, per_gpu = [16, 256] }   # within what the training code allows, which else holds
config = { lr = 0.1, width = 256 }   # its own values
"""
