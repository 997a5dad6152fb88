"""The study file that `stretto init study` writes."""

from __future__ import annotations

EXAMPLE_STUDY = """\
# A study: many trials of one training script, of which the best model is wanted.
# Look at what it will take:     stretto plan study.toml
# Try policies on it, simulated: stretto simulate --study study.toml --policy hypersched,asha,rubberband
# Train it on this machine:      stretto tune study.toml train.py:train --deadline 10m
# Train it on a Ray cluster:     stretto tune study.toml train.py:train --deadline 10m --on ray

[study]
name = "resnet-cifar"        # what runs of it are called
metric = "accuracy"          # what a trial reports after every epoch
direction = "max"            # "max" or "min": which way the metric is better
trials = 64                  # at most so many are drawn
sampler = "random"           # or tpe, qmc, cmaes, gp: these need pip install 'stretto[search]'
# entry = "train.py:train"   # what `stretto tune` trains, in this folder; or any command:
# command = ["python", "train.py", "--lr", "{lr}", "--momentum", "{momentum}"]

[halving]                    # at some epochs, the rungs, trials are compared; the best go on
rungs = "additive"           # each stage eta times as long as the last: epochs 1-4, 5-12, 13-28, ..
                             # "geometric": 4, 8, 16, ..; or a list, without min_epochs: [4, 12, 28]
min_epochs = 4               # the first rung
eta = 2                      # the best 1/eta of the trials pass a rung
max_epochs = 508             # a trial is fully trained after this many

[space]                      # a line for each hyperparameter: { float = [low, high] }, { int = [low, high] },
lr = { log = [1e-4, 1.0] }   # { log = [low, high] } on a logarithmic scale, { choice = [..] }
momentum = { choice = [0.9, 0.95, 0.99] }   # all as likely

[limits]                     # flags override them; leave both out to see what is possible
deadline = "2h"              # seconds, or 90s, 20m, 1h30m
budget_usd = 120             # what all of it may cost
q = 0.9                      # the probability with which a plan must keep the limits

# [machine]                  # where `stretto tune` trains; it needs no [cluster] and no [profile]
# slots = 2                  # workers at once; left out: one for every GPU, or else for every core
# usd_per_slot_hour = 0      # what a slot costs you, also one of a cluster of your own

[cluster]                    # what could be rented, for plans and simulations; really, where there is a [ray]
instances = ["p3.8xlarge"]   # names of the catalogue, here 4 V100 for 12.24 USD an hour (2024)
# prices = "prices.csv"      # a price list of your own: instance,gpus,usd_per_hour
max_nodes = 16               # nodes held at any one time
nodes = 4                    # the cluster of policies that do not rent; max_nodes if left out
billing = "instance"         # every second a node is held; "function": only the GPU time of trials
minimum_s = 60               # the least time that is charged for a node
granularity_s = 1            # time is charged in steps of this
dataset_gb = 0               # data that every new node must be given,
usd_per_gb = 0               # and what moving it costs
queue_s = { mean = 40, sd = 10 }   # how long a request for nodes waits
init_s = { mean = 30, sd = 8 }     # how long a new node then takes to be of use

# [[cluster.instance]]       # a type of your own
# name = "our-box"
# gpus = 8
# usd_per_hour = 4.0
# speed = 1.5                # of one of its GPUs, relative to those of [profile]

# [ray]                      # with --on ray and a policy that rents: who brings up the nodes of [cluster]
# autoscaler = true          # Ray's, whose node types have a label stretto-instance; or commands:
# launch = "./up {number} {address} {slots} {name} {instance}"   # docs/cluster.md has one that uses ssh
# release = "./down {number}"
# start_timeout = "10m"      # a node that is not there by then is not waited for
# slot = "gpu"               # what of a node is a slot: "gpu" or "cpu"

[profile]                    # what you believe of the speed of a trial
# file = "profile.json"      # as `stretto profile` measured it, instead of all that follows
epoch_s = { mean = 35, sd = 3 }    # seconds of an epoch on one GPU; or { mean, trial_sd, node_sd, epoch_sd }:
                             # how much it varies between trials, between nodes, from epoch to epoch
speedup = { "1" = 1.0, "2" = 1.87, "4" = 3.42, "8" = 5.6 }   # by GPUs, on as few nodes as hold them
spanning = 0                 # share of its speed a trial loses on more nodes than it needs
start_s = 60                 # every start and resize of a trial takes this long

[world]                      # what is really so; simulations alone read it
curves = "builtin:resnet"    # where learning curves come from
# epoch_s = { mean = 40, sd = 6 }  # also speedup, spanning, start_s, queue_s, init_s: as believed if left out
"""
