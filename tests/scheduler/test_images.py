"""Images are encoded once, in time, within bounds, and their requests get the tokens that they get alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from repeats import seeds
from scripted_bench import Bench, make_images, with_images
from scripted_tokens import VOCAB
from slipstream.base.errors import RequestTooLarge, UserError
from slipstream.contracts.images import PromptImages, positions_of
from slipstream.contracts.request import Request, Status
from slipstream.scheduler.cache.matching import extend_hashes
from slipstream.scheduler.images import ImageSlots


def submit_all(bench: Bench, parts: list[int | tuple[int, int, int]], **params: object) -> list[Request]:
    prompt, images = with_images(parts)
    return bench.submit(prompt, images=images, **params)


def submit(bench: Bench, parts: list[int | tuple[int, int, int]], **params: object) -> Request:
    return submit_all(bench, parts, **params)[0]


def encoded(bench: Bench) -> list[int]:
    """Images that each plan encodes."""
    return [0 if plan.images is None else len(plan.images.encodings) for plan in bench.plans]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("size", range(1, 30))
def test_a_chunk_may_end_at_every_offset_of_an_image(size: int, depth: int) -> None:
    bench = Bench(depth=depth, max_num_batched_tokens=size, images=make_images())
    prompt, images = with_images([1, 2, 3, (1, 3, 3), 4, (2, 2, 4), (3, 1, 1), 5, 6])
    (request,) = bench.submit(prompt, images=images, prompt_logprobs=1, presence_penalty=0.5)
    bench.run()
    bench.check_tokens(request)
    assert bench.executor.num_encoded == 3


def test_an_image_of_two_requests_is_encoded_once() -> None:
    bench = Bench(images=make_images(), prefix_caching=False)
    requests = [submit(bench, [n, (1, 3, 3), 7]) for n in range(4)]
    other = submit(bench, [0, (2, 3, 3), 7])
    bench.run()
    for request in (*requests, other):
        bench.check_tokens(request)
    assert bench.executor.num_encoded == 2
    again = submit(bench, [5, (2, 3, 3), 8])  # no request holds it
    bench.run()
    bench.check_tokens(again)
    assert bench.executor.num_encoded == 2
    salted = submit(bench, [5, (2, 3, 3), 8], salt="x")
    bench.run()
    bench.check_tokens(salted)
    assert bench.executor.num_encoded == 3


def test_a_cached_prefix_needs_no_tower() -> None:
    bench = Bench(images=make_images(num_slots=5), page_size=4)
    prompt = [1, 2, (1, 3, 3), 3, 4, 5, 6, 7, 8, 9]
    submit(bench, prompt)
    bench.run()
    submit(bench, [1, (2, 3, 3)])  # takes the slots
    bench.run()
    assert bench.executor.num_encoded == 2
    again = submit(bench, prompt)
    bench.run()
    bench.check_tokens(again)
    assert again.num_cached == 16 and bench.executor.num_encoded == 2


def test_a_cached_prefix_may_end_inside_of_an_image() -> None:
    bench = Bench(images=make_images(), page_size=4)
    first = submit(bench, [1, 2, (1, 3, 3)])
    bench.run()
    second = submit(bench, [1, 2, (1, 3, 3), 8, 9])
    bench.run()
    for request in (first, second):
        bench.check_tokens(request)
    assert second.num_cached == 8 and bench.executor.num_encoded == 1


def test_other_images_share_no_pages() -> None:
    bench = Bench(images=make_images(), page_size=4)
    one = submit(bench, [1, 2, (1, 3, 3), *range(10)])
    bench.run()
    other = submit(bench, [1, 2, (2, 3, 3), *range(10)])
    bench.run()
    for request in (one, other):
        bench.check_tokens(request)
    assert other.num_cached == 0


def test_page_hashes_have_the_image_and_the_offset_of_the_page_in_it() -> None:
    def hashes(parts: list[int | tuple[int, int, int]], following: int = 0) -> list[bytes]:
        made: list[bytes] = []
        prompt, images = with_images(parts)
        extend_hashes(made, prompt, (len(prompt) - following) // 4, 4, "", following=following, images=images)
        return made

    plain = hashes([1, 2, 3, 4, (1, 2, 4), 5, 6, 7, 8])
    assert len(plain) == 4
    assert hashes([1, 2, 3, 4, (2, 2, 4), 5, 6, 7, 8])[:2] == [plain[0], hashes([1, 2, 3, 4, (2, 2, 4)])[1]]
    assert hashes([1, 2, 3, 4, (2, 2, 4), 5, 6, 7, 8])[1] != plain[1]
    # the same tokens, other parts of the same image
    made: list[bytes] = []
    prompt, images = with_images([(1, 2, 4), (1, 2, 4)])
    extend_hashes(made, prompt, 4, 4, "", images=images)
    marks = images.page_marks(0, 4, 4, 0)
    assert len(set(marks.values())) == 2 and len(set(made)) == 4
    # the token after the page
    assert hashes([1, 2, 3, 4, (1, 2, 4), 5], 1)[0] != hashes([1, 2, 3, 4, (2, 2, 4), 5], 1)[0]


def test_pieces_of_a_prompt_have_the_hashes_of_the_whole() -> None:
    prompt, images = with_images([1, 2, (1, 3, 5), 4, (2, 2, 2), *range(20)])
    whole: list[bytes] = []
    extend_hashes(whole, prompt, 10, 4, "", images=images)
    made: list[bytes] = []
    for num_pages in range(1, 11):
        extend_hashes(made, prompt, num_pages, 4, "", images=images)
    assert made == whole


def test_a_step_encodes_patches_within_its_bound() -> None:
    bench = Bench(images=make_images(step_patches=40), max_num_batched_tokens=64)
    requests = [submit(bench, [n, (n, 2, 4), n]) for n in range(4)]  # 32 patches each
    bench.run()
    for request in requests:
        bench.check_tokens(request)
    assert max(encoded(bench)) == 1 and bench.executor.num_encoded == 4


def test_text_requests_do_not_wait_for_images_of_others() -> None:
    bench = Bench(images=make_images(step_patches=1), max_num_batched_tokens=64)
    requests = [submit(bench, [(n, 2, 4), n]) for n in range(3)]
    text = bench.submit([1, 2, 3])[0]
    bench.plan()
    assert text.status is Status.RUNNING and text.pending == 1
    assert [request.status for request in requests] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    bench.run()
    for request in (*requests, text):
        bench.check_tokens(request)


def test_an_image_survives_a_preemption() -> None:
    bench = Bench(images=make_images(), prefix_caching=False, max_num_batched_tokens=8)
    request = submit(bench, [1, (1, 3, 3), 2, 3], max_tokens=4)
    bench.plan()
    bench.scheduler.preempt_all()
    bench.run()
    bench.check_tokens(request)
    assert request.num_preemptions == 1 and bench.executor.num_encoded == 1


def test_samples_share_their_images() -> None:
    bench = Bench(images=make_images(), prefix_caching=False, num_pages=40)
    requests = submit_all(bench, [1, (1, 3, 3)], n=3, max_tokens=5)  # the last token is of the image
    bench.run()
    for request in requests:
        bench.check_tokens(request)
    assert bench.executor.num_encoded == 1


def test_positions_are_those_of_the_whole_prompt() -> None:
    bench = Bench(images=make_images(), max_num_batched_tokens=5, depth=1)
    prompt, images = with_images([1, 2, (1, 3, 4), 3, 4, (2, 4, 1), 5, 6, 7])
    bench.submit([9, 9, 9], max_tokens=12)
    (request,) = bench.submit(prompt, images=images, max_tokens=3)
    bench.run()
    whole = positions_of(images.spans, 0, len(prompt))
    found = np.full((3, len(prompt)), -1)
    for plan in bench.plans:
        for admission in plan.admitted:
            if admission.num_prompt_tokens == len(prompt):
                assert admission.position_shift == images.shift < 0
                row = admission.row
        if plan.images is None:
            continue
        starts = plan.lengths - plan.num_tokens
        tokens = np.concatenate(
            [np.arange(start, start + num) for start, num in zip(starts, plan.num_tokens, strict=True)]
        )
        assert (np.repeat(plan.rows, plan.num_tokens)[plan.images.placed] == row).all()
        found[:, tokens[plan.images.placed]] = plan.images.positions
    assert np.array_equal(found[:, : images.stop], whole[:, : images.stop])
    assert (found[:, images.stop :] == -1).all()  # the row's shift says them
    bench.check_tokens(request)


def test_what_can_never_be_encoded_is_refused() -> None:
    with pytest.raises(UserError, match="takes no images"):
        submit(Bench(), [1, (1, 2, 2)])
    bench = Bench(images=make_images(num_slots=4, slot_rows=2, max_patches=32))
    with pytest.raises(RequestTooLarge, match=r"image 2 .* becomes 9 tokens of 36 patches.*room for 8 tokens"):
        submit(bench, [1, (1, 2, 2), (2, 3, 3)])
    assert not bench.scheduler.has_requests()


class Day:
    """A random run with few slots."""

    def __init__(self, seed: int, depth: int) -> None:
        rng = self.rng = random.Random(seed * 5 + depth)
        self.bench = Bench(
            depth=depth,
            page_size=rng.choice([1, 2, 4, 8]),
            num_pages=rng.choice([70, 100, 200]),
            prefix_caching=rng.random() < 0.6,
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([1, 3, 7, 16, 40]),
            max_model_len=64,
            num_drafts=rng.choice([0, 0, 3]),
            draft_seed=seed,
            images=make_images(
                num_slots=rng.choice([6, 9, 30]), slot_rows=rng.choice([2, 3]), step_patches=rng.choice([1, 20, 60])
            ),
            **({"num_checkpoints": 4, "border": 8} if seed % 4 == 0 else {}),
        )
        self.aborted: set[Request] = set()

    def run(self, steps: int) -> None:
        bench, rng = self.bench, self.rng
        for _ in range(steps):
            if rng.random() < 0.4:
                parts: list[int | tuple[int, int, int]] = []
                for _ in range(rng.randint(0, 3)):
                    parts += range(rng.randint(0, 4))
                    parts.append((rng.randrange(5), rng.randint(1, 3), rng.randint(1, 4)))
                parts += [rng.randrange(VOCAB) for _ in range(rng.randint(not parts, 3))]
                prompt, images = with_images(parts)
                bench.submit(
                    prompt, images=images if images.images else None, n=rng.choice([1, 1, 2]), salt=rng.choice("aab"),
                    max_tokens=rng.choice([1, 4, 12]), prompt_logprobs=rng.choice([None, None, 1]),
                )  # fmt: skip
            if rng.random() < 0.06 and bench.requests:
                self.aborted.update(bench.scheduler.abort(rng.choice(bench.requests[-8:]).id))
            bench.step()
            if rng.random() < 0.1:
                bench.preempt_any(rng)
            bench.scheduler.check()
        bench.run()
        for request in bench.requests:
            if request not in self.aborted:
                bench.check_tokens(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", seeds(12, kept=8))
def test_a_random_run_with_images_changes_no_tokens(seed: int, depth: int) -> None:
    Day(seed, depth).run(120)


def test_the_random_runs_with_images_cover_every_event() -> None:
    days = [Day(seed, depth=1) for seed in range(12)]
    for day in days:
        day.run(120)
    requests = [request for day in days for request in day.bench.requests if request.images is not None]
    num_encoded = sum(day.bench.executor.num_encoded for day in days)
    assert 300 < num_encoded < sum(len(request.images.images) for request in requests if request.images) - 50
    assert sum(day.bench.scheduler.num_preemptions for day in days) > 60
    assert sum(request.num_cached > 0 for request in requests) > 30
    assert sum(len(day.aborted) for day in days) > 10


@pytest.mark.parametrize("bug", ["kept too short", "not in the hash", "never released", "next row"])
def test_the_random_runs_find_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "kept too short":  # slots are free while tokens of the image are still to come
        hold = ImageSlots._use

        def drop_at_once(slots: ImageSlots, request: Request, place: int, image: object) -> bool:
            held = hold(slots, request, place, image)  # type: ignore[arg-type]
            for encoded in slots._used[request].values():
                slots._idle[encoded.key] = encoded
            return held

        monkeypatch.setattr(ImageSlots, "_use", drop_at_once)
        monkeypatch.setattr(ImageSlots, "check", lambda slots, running: None)
    elif bug == "not in the hash":
        monkeypatch.setattr(PromptImages, "page_marks", lambda *args: {})
    elif bug == "never released":
        monkeypatch.setattr(ImageSlots, "release", lambda slots, request: None)
    else:
        plan = ImageSlots.plan

        def shifted(slots: ImageSlots, *args: object) -> object:
            made = plan(slots, *args)  # type: ignore[arg-type]
            if made is not None and len(made.rows) > 3:
                made.rows[[0, 1]] = made.rows[[1, 0]]
            return made

        monkeypatch.setattr(ImageSlots, "plan", shifted)
    with pytest.raises(AssertionError):
        for seed in range(20):
            Day(seed, depth=1).run(100)
