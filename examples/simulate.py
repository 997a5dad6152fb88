"""Simulates the built-in demo workload (forty jobs on 64 GPUs) under three policies."""

from stretto.core.cluster import gpu_nodes
from stretto.simulation.jobs import Setup, simulate
from stretto.worlds.synthetic import demo_workload


def main() -> None:
    workload = demo_workload()
    setup = Setup(nodes=gpu_nodes(16, 4))
    print(f"{len(workload.jobs)} jobs on {sum(node.gpus for node in setup.nodes)} GPUs")
    print(f"{'policy':10}{'completed':>10}{'mean JCT':>12}{'makespan':>10}")
    for policy in ("fifo", "tiresias", "pollux"):
        metrics = simulate(workload, policy, setup).metrics
        mean_min = (metrics.mean_jct_s or 0.0) / 60
        makespan_h = (metrics.makespan_s or 0.0) / 3600
        print(f"{policy:10}{metrics.completed:10}{mean_min:8.0f} min{makespan_h:8.0f} h")


if __name__ == "__main__":
    main()
