"""A plain search for drafts in a text."""

from __future__ import annotations

from slipstream.ops.sampling import MatchRule


def search(text: list[int], rule: MatchRule, num: int, first: int = 0) -> list[int]:
    """Tokens after the longest earlier match of the end of `text`, the newest of equally long ones."""
    best = (0, 0)
    for end in range(first, len(text) - 1):
        length = 0
        while length < rule.longest and end - length >= first and text[end - length] == text[-1 - length]:
            length += 1
        best = max(best, (length, end))
    if best[0] < rule.shortest:
        return [-1] * num
    longer = list(text)
    for place in range(num):
        longer.append(longer[best[1] + 1 + place])
    return [token if place < best[0] * rule.reach else -1 for place, token in enumerate(longer[len(text) :])]
