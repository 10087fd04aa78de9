import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from slipstream.metrics.prometheus import Metrics
from slipstream.metrics.stats import (
    BucketCounts,
    FrontEnds,
    FrontStats,
    LaneStats,
    ModelStats,
    SharedCounters,
    StatusLine,
    added,
)


def front(route="/v1/models 200", tokens=3, seconds=0.3):
    model = ModelStats(prompt_tokens=tokens, generated_tokens=2 * tokens, finished={"stop": 1})
    model.ttft.observe(seconds)
    return FrontStats({route: 2}, {"disconnect": 1}, {}, {"m": model}, open_requests=1)


def test_histograms_count_up_to_their_bounds():
    histogram = BucketCounts((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1] and histogram.total == 12.0


def test_sums_are_field_by_field_and_leave_the_parts_alone():
    first, second = front(), front("/health 200", tokens=5, seconds=100.0)
    whole = added(FrontStats(), first, second)
    assert whole.requests == {"/v1/models 200": 2, "/health 200": 2} and whole.aborted == {"disconnect": 2}
    model = whole.models["m"]
    assert (model.prompt_tokens, model.generated_tokens, model.finished) == (8, 16, {"stop": 2})
    assert sum(model.ttft.counts) == 2 and model.ttft.total == pytest.approx(100.3)
    assert first.models["m"].prompt_tokens == 3 and sum(first.models["m"].ttft.counts) == 1


def test_a_board_tells_what_each_wrote_last_and_survives_a_writer_at_work():
    fd = SharedCounters.create(3)
    fronts = [SharedCounters(fd, place, 3) for place in range(3)]
    os.close(fd)  # the memory stays as long as it is mapped
    fronts[0].write(front(tokens=1))
    fronts[1].write(front(tokens=10))
    fronts[1].write(front(tokens=20))
    assert [shared.total().models["m"].prompt_tokens for shared in fronts] == [21, 21, 21]
    fronts[1]._memory[2**20 + 20] ^= 255  # half written
    assert fronts[0].total().models["m"].prompt_tokens == 21  # it knew before
    assert SharedCounters.total(fronts[1]).models["m"].prompt_tokens == 21  # its own it knows in any case


def lanes(**counts):
    return [LaneStats("m", num_pages=10, num_free_pages=5, **counts)]


def test_the_status_line_gives_rates_and_has_no_result_at_rest():
    line = StatusLine()
    assert line.look(0.0, FrontStats(), lanes()) is None
    text = line.look(2.0, front(tokens=100), lanes(num_running=3, prefix_queries=100, prefix_hits=25))
    assert text == (
        "1.0 requests/s, prompt 50 tok/s, generated 100 tok/s, running 3, waiting 0, cache 50%, prefix hits 25%"
    )
    drafts = lanes(num_running=1, num_drafted_rows=10, num_drafts=40, num_accepted_drafts=15, accepted_at=(8, 4, 3, 0))
    found = line.look(3.0, front(tokens=100), drafts)
    assert found.endswith(", drafts 38% accepted (80% 40% 30% 0%), 2.50 tok/row")
    assert "generated 0 tok/s" in line.look(4.0, front(tokens=100), lanes())  # once, to say that it is over
    assert line.look(6.0, front(tokens=100), lanes()) is None


def test_a_front_end_that_follows_one_that_died_goes_on_from_its_counts():
    fd = SharedCounters.create(2)
    died, other = (SharedCounters(fd, place, 2) for place in range(2))
    died.write(msgspec.structs.replace(front(tokens=5), open_requests=3, queued_requests=2, queued_tokens=7))
    again = SharedCounters(fd, 0, 2)
    again.write(front(tokens=2))
    total = other.total()
    assert total.models["m"].prompt_tokens == again.total().models["m"].prompt_tokens == 7
    assert (total.open_requests, total.queued_requests, total.queued_tokens) == (1, 0, 0)  # its own alone


def test_the_supervisor_tells_how_many_front_ends_run():
    fd = SharedCounters.create(2)
    front_end, supervisor = SharedCounters(fd, 0, 2), SharedCounters(fd, 2, 2)
    assert front_end.front_ends() == FrontEnds(2, 2, 0)  # nothing was said yet
    supervisor.write_front_ends(FrontEnds(2, 1, 4))
    assert front_end.front_ends() == FrontEnds(2, 1, 4)
    assert front_end.total() == FrontStats()


def test_every_name_on_the_dashboard_is_on_the_page():
    stats = front()
    stats.refused["queue_full"] = 1
    page, kind = Metrics(lambda: (stats, lanes(busy=1.0, prefix_queries=1)), "1").text("")
    assert kind.startswith("text/plain")
    known = set(re.findall(r"^([a-z_:0-9]+)[{ ]", page.decode(), re.M))
    dashboard = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    names = {name for text in asked for name in re.findall(r"slipstream_\w+", text)}
    assert len(names) > 15 and names <= known, names - known


def test_adapters_have_vllms_metric():
    from slipstream.metrics.prometheus import Metrics

    def line(*lanes):
        page = Metrics(lambda: (FrontStats(), lanes), "1").text("")[0].decode()
        return next(line for line in page.splitlines() if line.startswith("vllm:lora_requests_info"))

    own = LaneStats("m", max_loras=4, running_adapters=("law", "sql"), waiting_adapters=("tax",))
    labels, value = line(LaneStats("other"), own).rsplit(" ", 1)
    assert labels == (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="law,sql",waiting_lora_adapters="tax"}'
    )
    assert float(value) > 1e9, "seconds since 1970"
    assert line(LaneStats("m")).endswith('{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 0.0')


def test_drafts_have_vllms_names_and_a_position():
    from slipstream.metrics.prometheus import Metrics

    counts = lanes(num_drafted_rows=10, num_drafts=40, num_accepted_drafts=15, accepted_at=(8, 4, 3, 0))
    page = Metrics(lambda: (FrontStats(), counts), "1").text("")[0].decode()
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0' in page
    assert 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0' in page
    assert 'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 15.0' in page
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert f'{name}{{engine="0",model_name="m",position="1"}} 4.0' in page
    assert 'slipstream_accepted_tokens_per_pos_total{model="m",position="3"} 0.0' in page
