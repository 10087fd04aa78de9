"""Records steps, checks plans, replays them, writes timelines."""
