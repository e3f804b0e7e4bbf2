"""Templates for schedulers: a job script for Slurm, a RayCluster or RayJob for KubeRay.

They are built from a validated file and checked options, with every value quoted for its context. Pure.
"""
