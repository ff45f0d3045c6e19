"""A procedural multi-hop world: offline, of any size, reproducible from a seed."""

from retrieval_gym.datasets.synthetic.loading import load_synthetic
from retrieval_gym.datasets.synthetic.world import Entity, Fact, World, generate_world

__all__ = ["Entity", "Fact", "World", "generate_world", "load_synthetic"]
