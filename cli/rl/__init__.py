"""Reinforcement learning on a verifiable task: a tensor-parallel learner, and rollouts that sample for it."""
