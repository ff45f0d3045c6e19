"""How do I play an episode? A random agent that picks by the action mask.

python examples/play_random.py
"""

import gymnasium as gym

import retrieval_gym  # noqa: F401 - registers the environments

env = gym.make("ChainRetrieval-Synthetic-v0", split="dev", render_mode="human")
env.action_space.seed(0)
for episode in range(3):
    observation, info = env.reset(seed=episode)
    terminated, episodic_return = False, 0.0
    while not terminated:
        action = env.action_space.sample(info["action_mask"])
        observation, reward, terminated, _, info = env.step(action)
        episodic_return += float(reward)
    print(f"episode {episode}: return {episodic_return:g}\n")
env.close()
