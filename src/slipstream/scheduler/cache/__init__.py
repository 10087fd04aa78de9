"""Pages, states, tiers and the hashes that find them."""
