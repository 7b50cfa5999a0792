"""Plans for `engine: mesh`: which layouts fit a cluster, how fast each is, and why; by simulation, before anything is
started."""

from megatrain.planner.cluster.plan import ClusterPlan, plan_cluster
from megatrain.planner.cluster.run import plan_cluster_run

__all__ = ["ClusterPlan", "plan_cluster", "plan_cluster_run"]
